"""Classes without an adapter, a user's own among them, under torch.compile with
``enable(compile=True)``: each ``propagate`` with a plain message is one operator."""
from __future__ import annotations

import pytest
import torch
from torch_geometric import nn
from torch_geometric.nn import MessagePassing

import gnnaccel
from tests.pyg import graphs
from tests.pyg.compiling import compiles, on, reset, route, same, step, truth  # noqa: F401
from tests.pyg.graphs import F, M

INDUCTOR = ["aot_eager", *(pytest.param(name, marks=pytest.mark.long)
                           for name in ("inductor", "eager"))]


class Own(MessagePassing):
    def __init__(self, aggr="add"):
        super().__init__(aggr=aggr)
        self.lin = torch.nn.Linear(F, 8)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x)).relu()

    def message(self, x_j):
        return x_j


class Gated(Own):
    def forward(self, x, edge_index, weight):
        return self.propagate(edge_index, x=self.lin(x), weight=weight, other=None)

    def message(self, x_j, weight, other=None):
        return weight.sigmoid().view(-1, 1) * x_j


class Pair(Own):
    def forward(self, x, y, edge_index):
        return self.propagate(edge_index, x=(self.lin(x), y)) + y.sum(-1, keepdim=True)


class PerChannel(Own):
    def forward(self, x, edge_index, weight):
        return self.propagate(edge_index, x=self.lin(x), weight=weight.view(-1, 1).expand(-1, 8))

    def message(self, x_j, weight):
        return weight * x_j


class Scaled(Own):
    """A message that reads the layer."""

    def message(self, x_j):
        return x_j * self.lin.bias.sum()


class Updating(Own):
    def update(self, inputs):
        return inputs + 1


class Both(Own):
    def message(self, x_i, x_j):
        return x_i - x_j


def weights():
    return graphs.edge_features(width=None)


#: label -> (layer, arguments after x and the edges, operators)
CARRIED = {"copies": lambda: (Own(), (), 1), "means": lambda: (Own("mean"), (), 1),
           "maxima": lambda: (Own("max"), (), 1), "weights": lambda: (Gated(), (weights(),), 1),
           "ChebConv": lambda: (nn.ChebConv(F, 8, 3), (), 2),
           "LGConv": lambda: (nn.LGConv(), (), 1)}


@pytest.mark.long
@pytest.mark.parametrize("backend", INDUCTOR)
@pytest.mark.parametrize("label", CARRIED)
def test_a_call_of_propagate_is_one_operator(route, label, backend):
    layer, more, count = CARRIED[label]()
    layer = layer.to(route.device)
    inputs = [t.to(route.device) for t in (graphs.features(), graphs.square(), *more)]
    expected = truth(layer, *inputs)
    on(route)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for _ in range(2):
        same(step(compiled, *inputs), expected)
    found = gnnaccel.stats()["SimpleConv"]
    assert found["compiled"] == 2 * count and found["routes"] == {route.backend: 2 * count}
    assert compiles() == 1


def test_pairs_of_features(route):
    layer = Pair().to(route.device)
    inputs = [t.to(route.device) for t in (graphs.features(), graphs.features(M),
                                           graphs.bipartite())]
    expected = truth(layer, *inputs)
    on(route)
    same(step(torch.compile(layer, backend="aot_eager", fullgraph=True), *inputs), expected)
    assert gnnaccel.stats()["SimpleConv"]["compiled"] == 1


@pytest.mark.long
def test_graphs_change_without_recompiling(route):
    layer = Gated().to(route.device)
    on(route)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for nodes, edges in ((30, 150), (40, 170), (25, 90)):
        inputs = [t.to(route.device) for t in (graphs.features(nodes), graphs.square(nodes, edges),
                                               graphs.edge_features(edges, None))]
        same(step(compiled, *inputs), truth(layer, *inputs))
    assert compiles() == 1 and gnnaccel.stats()["SimpleConv"]["compiled"] == 3


@pytest.mark.long
def test_another_aggregation_is_compiled_anew(route):
    layer = Own().to(route.device)
    inputs = [graphs.features().to(route.device), graphs.square().to(route.device)]
    on(route)
    compiled = torch.compile(layer, backend="aot_eager")
    same(step(compiled, *inputs), truth(layer, *inputs))
    layer.aggr_module, layer.aggr = nn.aggr.MeanAggregation(), "mean"
    same(step(compiled, *inputs), truth(layer, *inputs))
    layer.aggr_module, layer.aggr = nn.aggr.SumAggregation(), "max"  # which is not what it says
    same(step(compiled, *inputs), truth(layer, *inputs))
    assert gnnaccel.stats()["SimpleConv"]["compiled"] == 2


def replaced():
    layer = Own()
    layer.message = lambda x_j: x_j * 2
    return layer


def hooked():
    layer = Own()
    layer.register_aggregate_forward_hook(lambda module, given, out: out * 2)
    return layer


NATIVE = {"a weight per channel": lambda: (PerChannel(), (weights(),)),
          "a message that reads the layer": lambda: (Scaled(), ()),
          "an update": lambda: (Updating(), ()), "both ends": lambda: (Both(), ()),
          "a method on the object": lambda: (replaced(), ()), "a hook": lambda: (hooked(), ()),
          "several aggregations": lambda: (Own(["mean", "max"]), ()),
          "another flow": lambda: (nn.LGConv(flow="target_to_source"), ())}


@pytest.mark.long
@pytest.mark.parametrize("label", NATIVE)
def test_what_is_not_carried_is_traced(route, label):
    layer, more = NATIVE[label]()
    layer = layer.to(route.device)
    inputs = [t.to(route.device) for t in (graphs.features(), graphs.square(), *more)]
    expected = step(torch.compile(layer, backend="aot_eager"), *inputs)  # without PyG's own hooks
    on(route)
    same(step(torch.compile(layer, backend="aot_eager"), *inputs), expected)
    assert "SimpleConv" not in gnnaccel.stats()


@pytest.mark.parametrize("what", ["excluded", "autocast", "export", "without the option"])
def test_where_it_does_not_hold(route, what):
    layer = Own().to(route.device).eval()
    inputs = graphs.features().to(route.device), graphs.square().to(route.device)
    on(route, compile=what != "without the option")
    if what == "excluded":
        gnnaccel.exclude(layer)
    with torch.no_grad(), torch.autocast(route.device.type, torch.bfloat16, what == "autocast"):
        if what == "export":
            assert "gnnaccel" not in str(torch.export.export(layer, inputs, strict=True).graph)
        else:
            torch.compile(layer, backend="aot_eager")(*inputs)
    assert "SimpleConv" not in gnnaccel.stats()
