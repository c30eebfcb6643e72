"""HeteroGraphConv of GraphConv and of SAGEConv against DGL's own code, and what is left to it."""
from __future__ import annotations

import dgl
import pytest
import torch
from dgl.nn import GATConv, GraphConv, HeteroGraphConv, SAGEConv
from torch.autograd import gradcheck

import gnnaccel
from gnnaccel.dispatch.graph import joining
from tests import probes
from tests.dgl.judge import close, compare, on_routes, took

NODES = {"author": 13, "field": 6, "lonely": 4, "paper": 20}
RELATIONS = [("author", "knows", "author"), ("author", "writes", "paper"),
             ("paper", "about", "field"), ("paper", "cites", "paper"),
             ("paper", "written", "author")]
INSIDE = {"graph": lambda i, o: GraphConv(i, o, norm="right"), "graph sum": lambda i,
          o: GraphConv(i, o, norm="none"), "graph bare": lambda i,
          o: GraphConv(i, o, norm="right", bias=False), "sage": lambda i, o: SAGEConv(i, o, "mean"),
          "sage bare": lambda i, o: SAGEConv(i, o, "mean", bias=False)}


def graph(relations=RELATIONS, empty: tuple = (), edges: int = 40) -> dgl.DGLGraph:
    """Random edges with duplicates and a hub for each relation; the last node at each end has
    none."""
    made = {}
    for name in relations:
        count = 0 if name in empty else edges
        u, v = (torch.randint(0, NODES[name[end]] - 1, (count,)) for end in (0, 2))
        v[:count // 4] = 1
        made[name] = u, v
    return dgl.heterograph(made,
                           num_nodes_dict={k: n for k, n in NODES.items()
                                           if any(k in (r[0], r[2]) for r in relations)})


def features(width: int = 12) -> dict[str, torch.Tensor]:
    return {name: torch.randn(n, width) for name, n in NODES.items() if name != "lonely"}


def layer(kind: str = "graph", i: int = 12, o: int = 8, aggregate: str = "sum",
          relations=RELATIONS) -> HeteroGraphConv:
    return HeteroGraphConv({name[1]: INSIDE[kind](i, o) for name in relations}, aggregate=aggregate)


@on_routes("kind", list(INSIDE))
@pytest.mark.parametrize("aggregate", ["sum", "mean"])
def test_layers_inside(route, kind, aggregate):
    compare(route, layer(kind, aggregate=aggregate), graph(), features())


INVERSE = [("user", "rates", "movie"), ("movie", "rated-by", "user")]


@pytest.mark.parametrize("aggregate", ["sum", "mean"])
@pytest.mark.parametrize("kind", ["graph", "sage"])
@pytest.mark.parametrize("relations", [INVERSE, [*INVERSE, ("user", "knows", "user")],
                                       [("b", "0", "c"), ("c", "1", "a"), ("a", "2", "b")]],
                         ids=["inverse", "three", "ring"])
def test_relations_that_enter_types_in_another_order(route, relations, kind, aggregate):
    """DGL sorts relations and types each by their names: a type may be entered by the one relation
    that has not its number."""
    nodes = {name: 9 + 4 * at
             for at, name in enumerate(sorted({end for r in relations for end in (r[0], r[2])}))}
    g = dgl.heterograph({r: tuple(torch.randint(0, nodes[r[end]], (50,)) for end in (0, 2))
                         for r in relations}, nodes)
    x = {name: torch.randn(count, 12) for name, count in nodes.items()}
    compare(route, layer(kind, aggregate=aggregate, relations=relations), g, x)


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (12, 20), (33, 3)], ids=str)
@pytest.mark.parametrize("kind", ["graph", "sage"])
def test_widths(route, kind, shape):
    compare(route, layer(kind, *shape), graph(), features(shape[0]))


@pytest.mark.parametrize("aggregate", ["sum", "mean"])
def test_types_of_several_widths(route, aggregate):
    """Sources are papers, all of one width; the root terms are of the destinations."""
    relations, widths = [r for r in RELATIONS
                         if r[0] == "paper"], {"paper": 12, "author": 5, "field": 7}
    made = HeteroGraphConv({r[1]: SAGEConv((12, widths[r[2]]), 8, "mean") for r in relations},
                           aggregate=aggregate)
    compare(route, made, graph(relations),
            {name: torch.randn(NODES[name], width) for name, width in widths.items()})


@pytest.mark.parametrize("formats", ["coo", "csc"])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_edges_read_where_they_lie(route, monkeypatch, ids, formats):
    """Where kernels run, one of them reads the arrays of all relations."""
    by_kernel, joined = joining.by_kernel, []
    monkeypatch.setattr(joining, "by_kernel",
                        lambda *given: joined.append(len(given[0])) or by_kernel(*given))
    compare(route, layer(), graph().astype(ids).formats(formats), features())
    assert set(joined) == ({len(RELATIONS)} if route.backend == "cuda" else set())


@pytest.mark.parametrize("kind", ["graph", "sage"])
def test_relations_without_edges_or_features(route, kind):
    compare(route, layer(kind), graph(empty=(RELATIONS[1], RELATIONS[2])), features())
    given = features()
    del given["author"]
    g = graph([r for r in RELATIONS if r != ("paper", "written", "author")])
    compare(route, layer(kind), g, given)


@pytest.mark.parametrize("kind", ["graph", "sage"])
def test_pairs_and_blocks(route, kind):
    compare(route, layer(kind), graph(), (features(), features()))
    seeds = {"paper": torch.randperm(20)[:6], "author": torch.randperm(13)[:5],
             "field": torch.arange(6)}
    block = dgl.to_block(dgl.in_subgraph(graph(), seeds), seeds)
    x = {name: torch.randn(block.num_src_nodes(name), 12) for name in block.srctypes
         if block.num_src_nodes(name)}
    compare(route, layer(kind), block, {**{n: torch.randn(0, 12) for n in block.srctypes}, **x})


def test_canonical_names_and_shared_layers(route):
    compare(route, HeteroGraphConv({name: GraphConv(12, 8, norm="right") for name in RELATIONS}),
            graph(), features())
    shared = GraphConv(12, 8, norm="right")
    compare(route, HeteroGraphConv({name[1]: shared for name in RELATIONS}), graph(), features())


def test_the_order_of_results_is_dgls(route):
    made, g, x = (layer("sage").to(route.device), graph().to(route.device),
                  {k: t.to(route.device) for k, t in features().items()})
    with route.on():
        got = made(g, x)
    assert list(got) == list(made(g, x))
    for out in got.values():
        assert out._base is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(route, dtype):
    made, g = layer("sage").to(route.device), graph().to(route.device)
    x = {k: t.to(route.device) for k, t in features().items()}
    exact = made.double()(g, {k: t.double() for k, t in x.items()})
    with route.on():
        got = made.to(dtype)(g, {k: t.to(dtype) for k, t in x.items()})
    for name, out in got.items():
        assert out.dtype is dtype and (out - exact[name]).norm() <= 3e-2 * exact[name].norm()


def test_the_structure_is_found_again(route):
    made, g, x = (layer().to(route.device), graph().to(route.device),
                  {k: t.to(route.device) for k, t in features().items()})
    found = []
    for _ in range(2):
        with route.on(records=1):
            made(g, x)
            found.append(gnnaccel.records()[-1]["cache"])
    assert found == ["miss", "hit"]


# ---- what is left to DGL ----

def natively(route, code: str, made: HeteroGraphConv, *args, **kwargs) -> None:
    expected = made(*args, **kwargs)
    gnnaccel.reset_stats()
    with route.on(on_fallback="native"):
        got = made(*args, **kwargs)
    entry = gnnaccel.stats()["HeteroGraphConv"]
    assert list(entry["reasons"]) == [code] and got.keys() == expected.keys()
    assert all(close(got[k], t) for k, t in expected.items())


@pytest.mark.parametrize("inside", [
    lambda: GraphConv(12, 8), lambda: GraphConv(12, 8, norm="left"),
    lambda: GraphConv(12, 8, norm="right", activation=torch.relu),
    lambda: SAGEConv(12, 8, "gcn"), lambda: SAGEConv(12, 8, "pool"),
    lambda: SAGEConv(12, 8, "mean", activation=torch.relu),
    lambda: SAGEConv(12, 8, "mean", norm=torch.nn.ReLU())],
    ids=["both", "left", "activation", "gcn", "pool", "sage activation", "sage norm"])
def test_options_of_the_layers(route, inside):
    made = HeteroGraphConv({name[1]: inside() for name in RELATIONS}).to(route.device)
    natively(route, "GA210", made, graph().to(route.device),
             {k: t.to(route.device) for k, t in features().items()})


@pytest.mark.long
def test_other_calls_and_layers(route):
    g, x = graph().to(route.device), {k: t.to(route.device) for k, t in features().items()}
    mixed = HeteroGraphConv({n[1]: (GraphConv(12, 8, norm="right")
                                    if n[1] == "cites" else SAGEConv(12, 8, "mean"))
                             for n in RELATIONS}).to(route.device)
    natively(route, "GA210", mixed, g, x)
    for aggregate in ("max", "stack", lambda tensors, target: sum(tensors)):
        natively(route, "GA210", layer(aggregate=aggregate).to(route.device), g, x)
    weighted = dict(cites=dict(edge_weight=torch.rand(40).to(route.device)))
    natively(route, "GA210", layer().to(route.device), g, x, mod_kwargs=weighted)
    hooked = layer().to(route.device)
    hooked.mods["cites"].register_forward_hook(lambda module, args, out: 2 * out)
    natively(route, "GA210", hooked, g, x)
    dropping = HeteroGraphConv({n[1]: SAGEConv(12, 8, "mean", feat_drop=1.0)
                                for n in RELATIONS}).to(route.device)
    natively(route, "GA210", dropping, g, x)
    with route.on():
        dropping.eval()(g, x)
    empty = graph(empty=tuple(RELATIONS)).to(route.device)
    natively(route, "GA210", layer().to(route.device), empty, x)


@pytest.mark.parametrize("shape", [(1,), (1, 8)], ids=str)
@pytest.mark.parametrize("kind,part", [("graph", ""), ("sage", "fc_self")])
def test_biases_that_are_broadcast(route, kind, part, shape):
    g, x = graph().to(route.device), {k: t.to(route.device) for k, t in features().items()}
    made = layer(kind).to(route.device)
    with route.on():
        made(g, x)
    own = made.mods["cites"].get_submodule(part)
    own.bias = torch.nn.Parameter(torch.randn(shape, device=route.device))
    natively(route, "GA210", made, g, x)


def test_root_weights_of_fewer_channels_fail_as_with_dgl(route):
    g, x = graph().to(route.device), {k: t.to(route.device) for k, t in features().items()}
    made = layer("sage").to(route.device)
    own = made.mods["about"].fc_self
    own.weight.data = own.weight.data[:1].clone()
    with pytest.raises(RuntimeError):
        made(g, x)
    with route.on(on_fallback="native"), pytest.raises(RuntimeError):
        made(g, x)


def test_layers_that_are_routed_by_themselves(route):
    g, x = graph().to(route.device), {k: t.to(route.device) for k, t in features().items()}
    made = HeteroGraphConv({n[1]: GATConv(12, 8, 2) for n in RELATIONS}).to(route.device)
    expected = made(g, x)
    with route.on():
        got = made(g, x)
    assert all(close(got[k], t) for k, t in expected.items())
    stats = gnnaccel.stats()
    assert list(stats["HeteroGraphConv"]["reasons"]) == ["GA210"] and stats["GATConv"][
        "routes"] == {route.backend: 5}


def test_an_excluded_layer_inside(route):
    g, x = graph().to(route.device), {k: t.to(route.device) for k, t in features().items()}
    made = layer().to(route.device)
    gnnaccel.exclude(made.mods["cites"])
    expected = made(g, x)
    with route.on(on_fallback="native"):
        assert all(close(t, expected[k]) for k, t in made(g, x).items())
    assert gnnaccel.stats()["HeteroGraphConv"]["routes"] == {"native": 1}
    gnnaccel.reset_stats()
    with route.on():
        layer("sage").to(route.device)(g, x)
    took(route, 1)


@pytest.mark.long
def test_derivatives():
    made, g = layer("sage", 3, 2, "mean").double(), graph(edges=5)
    x = {k: t.double().requires_grad_() for k, t in features(3).items()}

    def call(*tensors):
        return tuple(made(g, dict(zip(x, tensors))).values())

    with gnnaccel.enabled(backend="torch", when="supported", on_fallback="raise"):
        assert gradcheck(call, tuple(x.values()))


@pytest.mark.parametrize("aggregate", ["sum", "mean"])
@pytest.mark.parametrize("kind", ["graph", "sage"])
def test_what_only_unused_results_read_gets_no_gradient(route, kind, aggregate):
    made, g = layer(kind, aggregate=aggregate).to(route.device), graph().to(route.device)

    def gradients() -> dict:
        made.zero_grad(set_to_none=True)
        x = {name: t.requires_grad_() for name, t in given.items()}
        found = torch.autograd.grad(made(g, x)["field"].pow(2).sum(),
                                    [*made.parameters(), *x.values()], allow_unused=True)
        return dict(zip([*(name for name, _ in made.named_parameters()), *x], found))

    given = {name: t.to(route.device) for name, t in features().items()}
    expected = gradients()
    with route.on():
        got = gradients()
    took(route, 1)
    assert {k for k, t in got.items() if t is None} == {k for k, t in expected.items()
                                                        if t is None} >= {"author"}
    assert all(t is None or close(got[name], t) for name, t in expected.items())


def test_layers_of_several_widths_are_looked_through_once(route, monkeypatch):
    """Which is how they are made, so that nothing of it may pass with the next call."""
    widths = {"author": 5, "field": 7, "paper": 12}
    made = HeteroGraphConv({r[1]: SAGEConv((widths[r[0]], widths[r[2]]), 8, "mean")
                            for r in RELATIONS}).to(route.device)
    g = graph(edges=400).to(route.device)
    x = {name: torch.randn(NODES[name], width).to(route.device) for name, width in widths.items()}
    decided, expected = probes.decided(monkeypatch), made(g, x)
    with route.on(on_fallback="native"):
        for _ in range(3):
            made(g, x)
        decided.clear()
        got = made(g, x)
    assert "HeteroGraphConv" not in decided
    assert all(close(got[k], t) for k, t in expected.items())
