"""Models made by `to_hetero_with_bases`: all bases of a layer as one relational layer, against the
model's own code."""
from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_geometric.nn import GCNConv, GINConv, GraphConv, SAGEConv, to_hetero_with_bases
from torch_geometric.nn.to_hetero_with_bases_transformer import HeteroBasisConv

import gnnaccel
from gnnaccel.adapters.pyg.fx import basis
from gnnaccel.dispatch.graph import cache
from gnnaccel.errors import GraphError
from tests.pyg.hetero_graphs import (METADATA, NODES, OUT, RELATIONS, WIDTH, edges, features, on,
                                     results_of_types)
from tests.pyg.judge import compare, native_again, on_routes, took

KINDS = {
    "sage": lambda i, o: SAGEConv(i, o), "sums": lambda i,
    o: SAGEConv(i, o, aggr="sum", root_weight=False, bias=False),
    "graph": lambda i, o: GraphConv(i, o), "gcn": lambda i, o: GCNConv(i, o, add_self_loops=False),
    "plain gcn": lambda i, o: GCNConv(i, o, normalize=False, bias=False),
}


class Net(torch.nn.Module):
    def __init__(self, make=KINDS["sage"]):
        super().__init__()
        self.first, self.second, self.last = make(WIDTH,
                                                  OUT), make(OUT, OUT), torch.nn.Linear(OUT, 5)

    def forward(self, x, edge_index):
        return self.last(self.second(self.first(x, edge_index).relu(), edge_index))


def model_of(make=KINDS["sage"], bases: int = 3, metadata=METADATA, **options) -> torch.nn.Module:
    torch.manual_seed(5)
    made = to_hetero_with_bases(Net(make), metadata, bases, **options)
    with torch.no_grad():
        for name, t in made.named_parameters():
            # which the host leaves as it is where there is one basis
            if name.endswith("edge_type_weight"):
                torch.nn.init.normal_(t)
            elif (name.endswith("bias")
                  and not isinstance(t, torch.nn.parameter.UninitializedParameter)):
                torch.nn.init.normal_(t)
    return made


def close(got: dict, expected: dict, tolerance: float = 1e-5) -> bool:
    return (list(got) == list(expected)
            and all(torch.allclose(got[k], t, rtol=tolerance, atol=tolerance * max(
        1.0, t.abs().max().item())) for k, t in expected.items()))


@on_routes("kind,bases", [("sage", 3), ("graph", 1), ("gcn", 2)],
           [(kind, bases) for kind in KINDS for bases in (1, 4)])
def test_layers_and_bases(route, kind, bases):
    compare(route, model_of(KINDS[kind], bases), features(), edges(empty=RELATIONS[3:4]), calls=2,
            floor=2e-6)


def test_one_edge_type(route):
    metadata = (["paper"], [("paper", "cites", "paper")])
    compare(route, model_of(metadata=metadata), {"paper": features()["paper"]}, edges(metadata[1]),
            calls=2, floor=2e-6)


@pytest.mark.parametrize("metadata",
                         [(["a", "b"], [("a", "to", "b")]), (["a", "b"], [("b", "to", "b")])],
                         ids=str)
@pytest.mark.filterwarnings("ignore:There exist node types")
def test_one_edge_type_among_several_node_types(route, metadata):
    """The host does not shift its ids, so they are those of other nodes."""
    made, name = model_of(metadata=metadata).to(route.device), metadata[1][0]
    x = {"a": torch.randn(8, WIDTH, device=route.device),
         "b": torch.randn(9, WIDTH, device=route.device)}
    ei = {name: torch.randint(0, 8, (2, 20), device=route.device)}
    expected = made(x, ei)
    with route.on(on_fallback="native"):
        assert close(made(x, ei), expected)
    assert gnnaccel.stats()["HeteroBasisConv"]["reasons"] == {"GA208": 2}


def test_features_of_several_widths(route):
    """Aligned by linear maps of the model."""
    widths = {"paper": 12, "author": 7, "field": 5}
    made = model_of(in_channels={"x": WIDTH})
    with torch.no_grad():
        made(features(widths), edges())
    compare(route, made, features(widths), edges(), calls=2, floor=2e-6)


@st.composite
def cases(draw):
    """(kind, bases, metadata, nodes by type, edges by edge type)."""
    types = [f"t{i}" for i in range(draw(st.integers(1, 4)))]
    nodes = {t: draw(st.sampled_from([1, 2, 9])) for t in types}
    names = [(draw(st.sampled_from(types)), f"r{at}",
              types[at] if at < len(types) else draw(st.sampled_from(types)))
             for at in range(len(types) + draw(st.integers(0, 5)))]
    found = {}
    for name in names:
        count = draw(st.sampled_from([0, 1, 7, 70]))
        found[name] = torch.stack([torch.randint(0, nodes[name[end]], (count,)) for end in (0, 2)])
    return draw(st.sampled_from(sorted(KINDS))), draw(st.integers(1, 5)), (types,
                                                                           names), nodes, found


@pytest.mark.long
@settings(max_examples=12, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases())
def test_any_types(route, case):
    kind, bases, metadata, nodes, ei = case
    made = model_of(KINDS[kind], bases, metadata).double().to(route.device)
    x = {t: torch.randn(n, WIDTH, device=route.device, dtype=torch.float64, requires_grad=True)
         for t, n in nodes.items()}
    ei = {name: t.to(route.device) for name, t in ei.items()}
    leaves = {**x, **dict(made.named_parameters())}

    native = results_of_types(made, x, ei, leaves)
    with route.on(on_fallback="native"):
        got = results_of_types(made, x, ei, leaves)
    assert gnnaccel.stats()["HeteroBasisConv"]["calls"] == 2
    gnnaccel.reset_stats()
    assert close(got, native, 1e-9)


# ---- the structure, and the model ----

def test_the_structure_is_found_again_and_a_change_is_seen(route):
    made, (x, ei) = model_of().to(route.device), on(route.device, features(), edges())
    with route.on(), torch.no_grad():
        # kept are, on a CPU, what comes the second time, and each layer's structure
        for _ in range(4):
            made(x, ei)
        misses = cache.info()["misses"]
        made(x, ei)
        assert cache.info()["misses"] == misses
        ei[RELATIONS[0]][0, 0] = (ei[RELATIONS[0]][0, 0] + 1) % NODES["author"]
        got = made(x, ei)
    assert close(got, made(x, ei))


def test_the_model_stays_what_it_is(route):
    made, (x, ei) = model_of().to(route.device), on(route.device, features(), edges())
    expected, code, own = made(x, ei), made.code, {k for m in made.modules() for k in vars(m)}
    with route.on():
        # such models cannot be loaded from a pickle, in PyG itself
        for model in (made, copy.deepcopy(made)):
            gnnaccel.reset_stats()
            assert close(model(x, ei), expected)
            took(route, 2)
    assert made.code == code and {k for m in made.modules() for k in vars(m)} == own
    assert b"gnnaccel" not in pickle.dumps(made)


# ---- what stays native ----

@pytest.mark.parametrize("make,code", [
    (lambda i, o: SAGEConv(i, o, aggr="max"), "GA201"),
    (lambda i, o: GINConv(torch.nn.Linear(i, o)), "GA208"),
    (lambda i, o: SAGEConv(i, o, normalize=True), "GA208")], ids=["max", "gin", "normalize"])
def test_bases_that_cannot_run_as_one_are_no_fallback(route, make, code):
    made, (x, ei) = model_of(make).to(route.device), on(route.device, features(), edges())
    expected = made(x, ei)
    with route.on(records=40, on_fallback="native"):
        got = made(x, ei)
        texts = [r["rejected"][0]["text"] for r in gnnaccel.records()
                 if r["layer"] == "HeteroBasisConv"]
    assert all(native_again(got[k], t) for k, t in expected.items())
    assert gnnaccel.stats()["HeteroBasisConv"]["reasons"] == {"GA210": 2} and all(code in text
                                                                                  for text in texts)


@pytest.mark.parametrize("where", ["layer", "message", "another message", "none", "basis"])
def test_only_the_hosts_hook_is_understood(route, where):
    made, (x, ei), log = model_of().to(route.device), on(route.device, features(), edges()), []
    conv = made.first.convs[1]

    def note(module, inputs, output):
        log.append(1)
        return output * 2 if where in ("message", "another message") else None

    if where in ("message", "none"):
        conv._message_forward_hooks.clear()
    if where != "none":
        target = {"layer": made.first}.get(where, conv)
        (target.register_message_forward_hook
         if "message" in where else target.register_forward_hook)(note)
    expected, calls = made(x, ei), len(log)
    with route.on(on_fallback="native"):
        assert close(made(x, ei), expected)
    assert len(log) == 2 * calls and gnnaccel.stats()["HeteroBasisConv"]["reasons"] == {"GA210": 1}


@pytest.mark.long
def test_rules_and_other_ways_to_call(route):
    made, (x, ei) = model_of().to(route.device), on(route.device, features(), edges())
    expected = made(x, ei)
    with route.on(exclude=["HeteroBasisConv"], on_fallback="native"):
        assert close(made(x, ei), expected)
        assert gnnaccel.stats()["HeteroBasisConv"]["reasons"] == {"GA101": 2}
    gnnaccel.exclude(made.first.convs[0])
    gnnaccel.reset_stats()
    with route.on(on_fallback="native"):
        assert close(made(x, ei), expected)
    assert gnnaccel.stats()["HeteroBasisConv"]["reasons"] == {"GA210": 1}
    gnnaccel.reset_rules()
    missing = {k: t for k, t in ei.items() if k != RELATIONS[0]}
    for block in (gnnaccel.disabled(), route.on(on_fallback="native")):
        with block, pytest.raises(KeyError):
            made(x, missing)
    with route.on(on_fallback="native"), torch.autocast(route.device.type, torch.bfloat16):
        made(x, ei)
    assert gnnaccel.stats()["HeteroBasisConv"]["reasons"]["GA203"] == 2


def test_small_calls_go_native():
    made, x, ei = model_of(), features(), edges()
    expected = made(x, ei)
    with gnnaccel.enabled():
        got = made(x, ei)
    assert all(torch.equal(got[k], t) for k, t in expected.items())
    assert gnnaccel.stats()["HeteroBasisConv"]["reasons"] == {"GA401": 2}


@pytest.mark.long
def test_explaining_and_comparing(route):
    made, (x, ei) = model_of().to(route.device), on(route.device, features(), edges())
    with route.on():
        explained = gnnaccel.explain(made, x, ei)
        assert [(one.name, one.status) for one in explained.layers
                if one.layer == HeteroBasisConv.__name__] == [
            ("first", "taken over"), ("second", "taken over")]
        assert gnnaccel.compare(made, x, ei).ok


def test_edges_are_put_together_once_where_layers_stay_native(route, monkeypatch):
    made, (x, ei) = model_of(KINDS["sage"]).to(route.device), on(route.device, features(), edges())
    seen = []
    native = basis.Edges.together.func
    monkeypatch.setattr(basis.Edges.together, "func", lambda self: seen.append(1) or native(self))
    with route.on(exclude=["HeteroBasisConv"], on_fallback="native"):
        made(x, ei)
    assert len(seen) == 1


@pytest.mark.parametrize("kind", ["sage", "sums", "gcn"])
@pytest.mark.parametrize("end, what", [(0, "source"), (1, "destination")])
def test_ids_of_no_node(route, kind, end, what):
    made, (x, ei) = model_of(KINDS[kind]).to(route.device), on(route.device, features(), edges())
    ei[RELATIONS[4]][end, 3] = 1000
    with route.on(), pytest.raises(GraphError,
                                   match=rf"{what} ids from \d to 1000; there are 13 nodes of type "
                                   r"'author'"):
        made(x, ei)
