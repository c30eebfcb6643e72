"""Layers with ``flow="target_to_source"``: pairs of features, attention, and layers for directed
graphs that are made of two."""
from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch_geometric import EdgeIndex
from torch_geometric.nn import (AGNNConv, DirGNNConv, GATConv, GATv2Conv, GCNConv, GraphConv,
                                MessagePassing, SAGEConv, SuperGATConv, TransformerConv)

import gnnaccel
from tests.pyg import graphs
from tests.pyg.aggregating_layers import BySuper, Extremes, Scattered
from tests.pyg.generated_layers import DistMult
from tests.pyg.graphs import E, EDGE, F, N
from tests.pyg.judge import as_native, close, compare, on_routes
from tests.pyg.own_layers import Copying, Weighing
from tests.pyg.test_own_attention import LAYERS as ATTENTION
from tests.pyg.test_own_attention import made

AGAINST = dict(flow="target_to_source")


class Paired(nn.Module):
    """A layer that is given one tensor for both ends."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, edge_index, *more):
        return self.layer((x, x), edge_index, *more)


class Placed(MessagePassing):
    """PyG writes no ``propagate`` for it: the types of ``ptr`` differ in its functions."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j, ptr):
        return x_j


class PlacedBoth(Placed):
    def message(self, x_i, x_j, ptr):
        return x_j + x_i


class Directed(nn.Module):
    """As users write it."""

    def __init__(self):
        super().__init__()
        self.there = SAGEConv(F, 8, root_weight=False)
        self.back = SAGEConv(F, 8, root_weight=False, **AGAINST)
        self.lin = nn.Linear(F, 8)

    def forward(self, x, edge_index):
        return self.lin(x) + 0.5 * self.there(x, edge_index) + 0.5 * self.back(x, edge_index)


def in_turn(route, layer, *args, **options):
    """The routes and reasons of a call, whose result and gradients are the host's."""
    expected = layer(*args)
    gnnaccel.reset_stats()
    with route.on(**options):
        got = layer(*args)
    assert close(got, expected)
    found, = gnnaccel.stats().values()
    return found["routes"], found["reasons"]


# ---- pairs ----

@on_routes("aggr", ["sum", "mean", "max"], ["min", ["mean", "max"]])
@pytest.mark.parametrize("size", [None, (N, N)])
def test_one_object_for_both_ends(route, aggr, size):
    more = (None,) if size is None else (None, size)
    compare(route, Paired(Weighing(aggr=aggr, **AGAINST)), graphs.features(), graphs.square(),
            *more, positions=("x", "edge_index", "weight", "size"))
    compare(route, Paired(Weighing(aggr=aggr, **AGAINST)), graphs.features(), graphs.square(),
            torch.randn(E), positions=("x", "edge_index", "weight"))


@pytest.mark.parametrize("x", ["two", "first", "list"])
def test_features_for_each_end(route, x):
    pair = {"two": (graphs.features(), graphs.features(width=5)),
            "first": (graphs.features(), None),
            "list": [graphs.features(), graphs.features()]}[x]
    for size in (None, (N, N)):
        compare(route, Weighing(**AGAINST), pair, graphs.square(), torch.randn(E), size=size,
                positions=("x", "edge_index", "weight"), require=False)


@pytest.mark.parametrize("cls", [SAGEConv, GraphConv])
@pytest.mark.parametrize("aggr", ["mean", "max"])
def test_layers_of_pygs(route, cls, aggr):
    compare(route, cls(F, 8, aggr=aggr, **AGAINST), graphs.features(), graphs.square())
    compare(route, cls((F, F), 8, aggr=aggr, **AGAINST), (graphs.features(), graphs.features()),
            graphs.square())


def test_generated_messages(kernels):
    layer = DistMult()
    layer.flow = "target_to_source"
    for pair in ((graphs.features(), graphs.features()), [graphs.features(), graphs.features()]):
        compare(kernels, layer, pair, graphs.square(), graphs.edge_features(E, layer.edge))
    compare(kernels, Paired(layer), graphs.features(), graphs.square(),
            graphs.edge_features(E, layer.edge))


@pytest.mark.parametrize("form", [lambda: Scattered("mean"), BySuper, Extremes])
def test_an_aggregate_of_the_users(kernels, form):
    layer = form()
    layer.flow = "target_to_source"
    for more in ((), (None, (N, N))):
        compare(kernels, layer, (graphs.features(), graphs.features()), graphs.square(), *more,
                positions=("x", "edge_index", "edge_attr", "size"))
    compare(kernels, Paired(layer), graphs.features(), graphs.square())


def test_sizes_that_differ(route):
    """PyG takes the first of a pair for the neighbours and for the number of results."""
    x, ei = graphs.features().to(route.device), graphs.square().to(route.device)
    for other, size in ((graphs.features(N + 4), None), (graphs.features(N - 4), None),
                        (None, (N, N + 4))):
        pair = x, None if other is None else other.to(route.device)
        routes, reasons = in_turn(route, Copying(**AGAINST), pair, ei, size, on_fallback="native")
        assert (routes, reasons) == ({"native": 1}, {"GA202": 1})


@pytest.mark.long
def test_errors_of_the_hosts(route):
    x, ei = graphs.features().to(route.device), graphs.square().to(route.device)
    layer = Copying(**AGAINST)
    for pair, size in (((x, x), (N, N + 1)), ((x, x), (N + 1, N)), ((x, None), (N + 1, N)),
                       ((None, x), None), ((x, x, x), None)):
        with pytest.raises((ValueError, AttributeError, AssertionError)) as expected:
            layer(pair, ei, size)
        with route.on(on_fallback="native"), pytest.raises(expected.type) as got:
            layer(pair, ei, size)
        assert str(got.value) == str(expected.value)


def test_classes_without_a_propagate_of_their_own(route):
    """Of these PyG gives neighbours the second of a pair."""
    x, y = graphs.features().to(route.device), graphs.features().to(route.device)
    ei = graphs.square().to(route.device)
    for layer in (Placed(**AGAINST), PlacedBoth(**AGAINST)):
        assert "message_passing" in type(layer)._jinja_propagate.__module__.split(".")
        routes, reasons = in_turn(route, layer, (x, y), ei, on_fallback="native")
        assert routes == {"native": 1} and not close(layer((x, y), ei), layer((y, x), ei), 0.1)
    assert in_turn(route, Placed(**AGAINST), (x, x), ei) == ({route.backend: 1}, {})
    assert in_turn(route, Placed(), (x, y), ei) == ({route.backend: 1}, {})


# ---- attention ----

@pytest.mark.parametrize("name", ATTENTION)
def test_attention_of_the_users(route, name):
    layer, more = made(name)
    layer.flow = "target_to_source"
    if name == "Apart":  # which has pairs, and no propagate of its own
        args = graphs.features(), graphs.square(), *more
        args, layer = [t.to(route.device) for t in args], layer.to(route.device)
        found = in_turn(route, layer, *args, on_fallback="native")
        assert found == ({"native": 1}, {"GA202": 1})
        return
    compare(route, layer, graphs.features(), graphs.square(), *more,
            positions=("x", "edge_index", "edge_attr"))


LAYERS = {"GATConv": lambda **more: GATConv(F, 8, 2, **more),
          "without loops": lambda **more: GATConv(F, 8, 2, add_self_loops=False, **more),
          "residual": lambda **more: GATConv(F, 8, 2, residual=True, concat=False, **more),
          "GATv2Conv": lambda **more: GATv2Conv(F, 8, 2, **more),
          "TransformerConv": lambda **more: TransformerConv(F, 8, 2, **more),
          "folded": lambda **more: TransformerConv(F, 16, beta=True, **more),
          "AGNNConv": lambda **more: AGNNConv(**more),
          "SuperGATConv": lambda **more: SuperGATConv(F, 8, 2, **more),
          "of products": lambda **more: SuperGATConv(F, 8, 2, attention_type="SD", **more)}


@pytest.mark.parametrize("name", LAYERS)
def test_attention_of_pygs(route, name):
    layer = LAYERS[name](**AGAINST)
    compare(route, layer, graphs.features(), graphs.square(),
            loss=SuperGATConv.get_attention_loss if type(layer) is SuperGATConv else None)


@pytest.mark.parametrize("cls", [GATConv, GATv2Conv, TransformerConv])
def test_pairs_in_attention(route, cls):
    pair = graphs.features(), graphs.features(width=7)
    compare(route, cls((F, 7), 8, 2, **AGAINST), pair, graphs.square())
    compare(route, Paired(cls(F, 8, 2, **AGAINST)), graphs.features(), graphs.square())


@on_routes("fill", ["mean", "max"], ["add", 0.5])
@pytest.mark.parametrize("cls", [GATConv, GATv2Conv])
def test_features_of_added_loops(route, cls, fill):
    """PyG reduces the features of the edges that enter a node, whatever the flow."""
    compare(route, cls(F, 8, 2, edge_dim=EDGE, fill_value=fill, **AGAINST), graphs.features(),
            graphs.square(), graphs.edge_features())


def test_pairs_of_other_sizes_in_attention(route):
    x, ei = graphs.features().to(route.device), graphs.square().to(route.device)
    for cls in (GATConv, GATv2Conv):
        layer = cls((F, F), 8, 2, add_self_loops=False, **AGAINST).to(route.device)
        pair = x, graphs.features(N + 5).to(route.device)
        found = in_turn(route, layer, pair, ei, on_fallback="native")
        assert found == ({"native": 1}, {"GA202": 1})
    if route.device.type == "cpu":  # on a GPU the host's own code fails an assertion there
        with route.on(on_fallback="native"), pytest.raises(IndexError):
            layer((x, graphs.features(4).to(route.device)), ei)


def test_edge_index_of_pygs(route):
    x, ei = graphs.features().to(route.device), graphs.square().to(route.device)
    layer = GATConv(F, 8, 2, **AGAINST).to(route.device)
    for by in (None, "row", "col"):
        kept = EdgeIndex(ei, sparse_size=(N, N))
        kept = kept if by is None else kept.sort_by(by)[0]
        assert in_turn(route, layer, x, kept)[0] == {route.backend: 1}


# ---- both directions ----

@pytest.mark.parametrize("conv", [lambda: SAGEConv(F, 8), lambda: GraphConv(F, 8),
                                  lambda: GCNConv(F, 8), lambda: GATConv(F, 8),
                                  lambda: GATConv(F, 8, **AGAINST)])
def test_directed_graphs(route, conv):
    compare(route, DirGNNConv(conv()), graphs.features(), graphs.square(), calls=2,
            went=lambda: all(route.backend in one["routes"] for one in gnnaccel.stats().values()))


def test_directed_graphs_of_the_users(route):
    compare(route, Directed(), graphs.features(), graphs.square(), calls=2)


def test_one_structure_for_layers_of_all_kinds(route):
    x, ei = graphs.features().to(route.device), graphs.square().to(route.device)
    layers = [Copying(**AGAINST), GATv2Conv(F, 8, add_self_loops=False, **AGAINST),
              GATConv(F, 8, **AGAINST), GATConv(F, 8), Copying()]
    expected = [layer.to(route.device)(x, ei) for layer in layers]
    for _ in range(3):
        with route.on():
            assert all(close(layer(x, ei), one) for layer, one in zip(layers, expected))


# ---- what changes between calls ----

CHANGING = {"sum": lambda: Copying(), "SAGEConv": lambda: SAGEConv(F, 8),
            "GATConv": lambda: GATConv(F, 8, 2), "AGNNConv": lambda: AGNNConv(),
            "own": lambda: made("Summed")[0]}


@pytest.mark.long
@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize("times", [1, 3])
def test_a_flow_that_changes(route, name, times):
    layer = CHANGING[name]().to(route.device)
    x, ei = graphs.features().to(route.device), graphs.square().to(route.device)
    for flow in ("target_to_source", "source_to_target") * 2:
        layer.flow = flow
        with route.on():
            for _ in range(times):
                as_native(lambda: layer(x, ei))


@pytest.mark.parametrize("name", CHANGING)
def test_graphs_of_other_sizes(route, name):
    layer = CHANGING[name]().to(route.device)
    layer.flow = "target_to_source"
    with route.on():
        for nodes, edges in ((30, 150), (40, 150), (30, 300), (12, 60), (30, 150)):
            x = graphs.features(nodes).to(route.device).requires_grad_()
            ei = graphs.square(nodes, edges).to(route.device)
            as_native(lambda: layer(x, ei))
            with gnnaccel.disabled():
                expected, = torch.autograd.grad(layer(x, ei).pow(2).sum(), x)
            grad, = torch.autograd.grad(layer(x, ei).pow(2).sum(), x)
            assert close(grad, expected)


@pytest.mark.parametrize("cls", [SAGEConv, GATConv])
def test_pairs_that_change(route, cls):
    """From pairs of as many nodes to others, over the same edges and over new ones."""
    layer = cls((F, F), 8, **AGAINST, **(dict(add_self_loops=False) if cls is GATConv else
                                         dict(root_weight=False))).to(route.device)
    x, y, more = (graphs.features(n).to(route.device) for n in (N, N, N + 6))
    ei = graphs.square().to(route.device)
    with route.on(on_fallback="native"):
        for pair in ((x, x), (x, y), (x, more), (x, x), (x, more), (y, x), (more, more)):
            for edges in (ei, ei, ei.clone()):
                as_native(lambda: layer(pair, edges))


@pytest.mark.parametrize("name", CHANGING)
def test_edges_that_change(route, name):
    layer = CHANGING[name]().to(route.device)
    layer.flow = "target_to_source"
    x, ei = graphs.features().to(route.device).requires_grad_(), graphs.square().to(route.device)
    with route.on():
        for _ in range(2):
            as_native(lambda: layer(x, ei))
        ei[1, :20] = 7
        for _ in range(2):
            as_native(lambda: layer(x, ei))


@pytest.mark.parametrize("name", CHANGING)
def test_edges_that_are_gone_before_backward(route, name):
    layer = CHANGING[name]().to(route.device)
    layer.flow = "target_to_source"
    x, ei = graphs.features().to(route.device).requires_grad_(), graphs.square().to(route.device)
    expected, = torch.autograd.grad(layer(x, ei).pow(2).sum(), x)
    with route.on():
        out = layer(x, ei.clone())
        gc.collect()
        grad, = torch.autograd.grad(out.pow(2).sum(), x)
    assert close(grad, expected)


@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(route, name, mode):
    layer = CHANGING[name]().to(route.device)
    layer.flow = "target_to_source"
    x, ei = graphs.features().to(route.device), graphs.square().to(route.device)
    with mode(), route.on():
        for _ in range(3):
            as_native(lambda: layer(x, ei))
    with route.on():
        copied = copy.deepcopy(layer)
        assert close(copied(x.requires_grad_(), ei), layer(x, ei))
