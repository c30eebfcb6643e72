"""HGTConv whose keys and values are made for pairs from the features, which the kernels do for
large graphs only."""
from __future__ import annotations

import pytest
import torch

import gnnaccel
from gnnaccel.dispatch.graph import view as graph_module
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.relational import by_type, pair_maps
from gnnaccel.dispatch.run import attention_families
from tests.helpers import relative
from tests.pyg import hgt_graphs
from tests.pyg.hgt_graphs import NODES, features, on
from tests.pyg.judge import compare, on_routes

# each type receives something: else types are mapped one by one
RELATIONS = [*hgt_graphs.RELATIONS, ("paper", "left", "lonely")]
WORTH_FROM = pair_maps.WORTH_FROM


def layer(channels: int = 16, **sizes):
    return hgt_graphs.layer(channels, metadata=(list(NODES), RELATIONS), **sizes)


def edges(relations=RELATIONS, **options):
    return hgt_graphs.edges(relations, **options)


@pytest.fixture(autouse=True)
def runs(request, route, monkeypatch):
    """For graphs of any size; counts how often it was done."""
    seen, maps = [], pair_maps.pair_maps
    monkeypatch.setattr(pair_maps, "WORTH_FROM", 0)
    monkeypatch.setattr(pair_maps, "pair_maps", lambda *args: seen.append(1) or maps(*args))
    yield seen
    if "else" not in request.node.name:
        assert bool(seen) == (route.backend == "cuda")


@on_routes("out,heads,width", [(16, 2, 16), (3, 1, 5), (15, 3, 16)],
           [(64, 4, 64), (7, 1, 7), (12, 12, 4)])
def test_shapes(route, out, heads, width):
    compare(route, layer(width, out=out, heads=heads), features(width), edges())


@pytest.mark.long
@on_routes("out,heads,width", [(16, 2, 16), (3, 1, 5)], [(64, 4, 64)])
def test_else_shapes_by_type(route, monkeypatch, out, heads, width):
    monkeypatch.setattr(pair_maps, "WORTH_FROM", 1 << 40)
    compare(route, layer(width, out=out, heads=heads), features(width), edges())


@pytest.mark.parametrize("kept", [RELATIONS[1:4], RELATIONS[:2]], ids=len)
def test_edge_types_that_are_not_given(route, kept):
    compare(route, layer(), features(16), edges(kept))


@pytest.mark.long
@pytest.mark.parametrize("empty", [RELATIONS[:1], RELATIONS[1:4]], ids=len)
def test_edge_types_without_edges(route, empty):
    compare(route, layer(), features(16), edges(empty=empty))


def test_node_types_that_are_not_given(route):
    x = features(16)
    del x["field"], x["lonely"]
    got = compare(route, layer(), x,
                  edges([r for r in RELATIONS if "field" not in r and "lonely" not in r]))
    assert got["kqv_lin.lins.lonely.weight"] is None


@pytest.mark.parametrize("order", [[3, 1, 0, 2], [1, 0, 3, 2]], ids=str)
def test_any_order_of_node_types(route, order):
    x = list(features(16).items())
    compare(route, layer(), dict(x[i] for i in order), edges())


@pytest.mark.long
def test_priors(route):
    made = layer()
    for prior in made.p_rel.values():
        torch.nn.init.normal_(prior, std=2.0)
    compare(route, made, features(16), edges())


@pytest.mark.parametrize("frozen", ["kqv_lin", "k_rel", "p_rel", "out_lin", "skip"])
def test_some_gradients(route, frozen):
    made = layer()
    getattr(made, frozen).requires_grad_(False)
    compare(route, made, features(16), edges())


def test_without_gradients_of_the_features(route):
    compare(route, layer(), features(16), edges(), require=False)


def test_second_derivatives_are_the_hosts(route):
    made, (x, ei) = layer().to(route.device), on(route.device, features(16), edges())
    x["paper"].requires_grad_()
    wanted = [x["paper"], made.k_rel.weight, made.kqv_lin.lins["paper"].weight,
              made.kqv_lin.lins["author"].bias]

    def second():
        total = sum(t.pow(2).sum() for t in made(x, ei).values())
        first = torch.autograd.grad(total, wanted, create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in first), wanted)

    expected = second()
    with route.on():
        got = second()
    assert all(relative(a, b) < 1e-3 for a, b in zip(got, expected))


def test_two_layers_train(route):
    first, second = layer().to(route.device), layer().to(route.device)
    x, ei = on(route.device, features(16), edges())

    def grads():
        hidden = first(x, ei)
        second({**hidden, "lonely": hidden["paper"][:NODES["lonely"]].relu()},
               ei)["paper"].pow(2).mean().backward()
        found = [p.grad for p in (*first.parameters(), *second.parameters())]
        first.zero_grad()
        second.zero_grad()
        return found

    expected = grads()
    with route.on():
        got = grads()
    for a, b in zip(got, expected):
        if b is None:  # of types whose result nobody reads
            assert a is None or not a.any()
        else:
            assert relative(a, b) < 1e-4 or b.norm() < 1e-6


@pytest.mark.parametrize("how", ["half", "passes", "wide", "many pairs"])
def test_else_by_type(route, runs, monkeypatch, how):
    made, (x, ei) = layer().to(route.device), on(route.device, features(16), edges())
    if how == "half":
        made, x = made.half(), {k: t.half() for k, t in x.items()}
    if how in ("wide", "many pairs"):
        monkeypatch.setattr(pair_maps, "_MOST" if how == "wide" else "_PAIRS", 0)
    expected = made(x, ei)
    with route.on(**(dict(passes=("compaction",)) if how == "passes" else {})):
        got = made(x, ei)
    assert not runs and all(relative(got[k], expected[k]) < (2e-2 if how == "half" else 1e-5)
                            for k in expected)
    assert gnnaccel.stats()["HGTConv"]["routes"] == {route.backend: 1}


@pytest.mark.parametrize("train,kept",
                         [("", False), ("all", False), ("all", True), ("kqv_lin", False),
                          ("out_lin", False)])
def test_else_index_arrays_are_there_before_rows(route, monkeypatch, train, kept):
    """What sorting needs of memory would come on top of them. ``train``: what of the layer; of the
    last maps alone backward does not come to the attention."""
    if kept:
        monkeypatch.setattr(graph_module, "SORT_FROM", 1)
        monkeypatch.setattr(attention_families, "_KEPT_SHARE", 0)
    made, (x, ei) = layer().to(route.device), on(route.device, features(16), edges())
    for name, p in made.named_parameters():
        p.requires_grad_(train == "all" or name.startswith(train or "all"))
    order, asked, sort, cat = [], [], GraphView._build_csr, by_type.together
    monkeypatch.setattr(GraphView, "_build_csr", lambda self,
                        *how: order.append("sort") or asked.append(how) or sort(self, *how))
    monkeypatch.setattr(by_type, "together", lambda x: order.append("rows") or cat(x))
    with torch.set_grad_enabled(bool(train)), route.on():
        out = made(x, ei)
        if train:
            sum(t.sum() for t in out.values()).backward()
    assert route.backend == "torch" or order[:2] == (["sort", "rows"]
                                                     if train in ("all", "kqv_lin") else ["rows"])
    assert not kept or route.backend == "torch" or [how for how in asked
                                                    if how[1]] == asked[:1] == [(False, True)]


@pytest.mark.parametrize("route", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_large_graphs_without_being_told(route, runs, monkeypatch):
    monkeypatch.setattr(pair_maps, "WORTH_FROM", WORTH_FROM)
    sizes = dict(paper=70_000, author=50_000, field=300, lonely=5_000)
    compare(route, layer(64, out=64, heads=4), features(64, **sizes), edges(count=300_000, **sizes))
