"""Layers that change after they were compiled with ``enable(compile=True)``, or differ from one of
their class that was compiled before."""
from __future__ import annotations

import types

import pytest
import torch
from torch_geometric import nn
from torch_geometric.nn import MessagePassing

import gnnaccel
from tests.pyg import graphs
from tests.pyg.compiling import on, route, same, step  # noqa: F401
from tests.pyg.graphs import F


class Own(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j


def double(layer):
    layer.message = types.MethodType(lambda self, x_j: x_j * 2, layer)


def other_aggregation(layer):
    layer.aggr_module = nn.MaxAggregation()


def other_map(layer):
    layer.lin.forward = types.MethodType(
        lambda self, x: torch.nn.functional.linear(x, self.weight) * 3, layer.lin)


#: label -> (layer, change)
CHANGES = {
    "message": (lambda: nn.SAGEConv(F, 8), double),
    "aggregation": (lambda: nn.GCNConv(F, 8), other_aggregation),
    "update": (lambda: nn.GCNConv(F, 8), lambda layer: setattr(layer, "update", lambda x: x * 5)),
    "a map's forward": (lambda: nn.GATConv(F, 8), other_map),
    "own message": (Own, double),
    "own aggregation": (Own, other_aggregation),
    "own update": (Own, lambda layer: setattr(layer, "update", lambda inputs: inputs * 5)),
}


def native(layer, inputs):
    with gnnaccel.disabled():
        return step(layer, *inputs)


@pytest.mark.long
@pytest.mark.parametrize("label", CHANGES)
@pytest.mark.parametrize("another", [False, True])
def test_replaced_methods_are_compiled_anew(route, label, another):
    make, change = CHANGES[label]
    inputs = graphs.features().to(route.device), graphs.square().to(route.device)
    layer = make().to(route.device)
    on(route)
    step(torch.compile(layer, backend="aot_eager"), *inputs)
    if another:
        layer = make().to(route.device)
    change(layer)
    same(step(torch.compile(layer, backend="aot_eager"), *inputs), native(layer, inputs))


class Tripled(MessagePassing):
    """Methods for other classes."""

    def message(self, x_j):
        return x_j * 3

    def update(self, inputs):
        return inputs * 3

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        return inputs.new_zeros(dim_size, F).index_add(0, index, inputs * 3)


@pytest.mark.long
@pytest.mark.parametrize("name", ["message", "update", "aggregate"])
def test_methods_replaced_on_a_class_are_compiled_anew(route, name):
    class Replaced(Own):
        pass

    inputs = graphs.features().to(route.device), graphs.square().to(route.device)
    layer = Replaced().to(route.device)
    on(route)
    compiled = torch.compile(layer, backend="aot_eager")
    same(step(compiled, *inputs), native(layer, inputs))
    setattr(Replaced, name, getattr(Tripled, name))
    same(step(compiled, *inputs), native(layer, inputs))


@pytest.mark.long
@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv"])
def test_methods_replaced_on_a_class_of_pyg_are_traced(route, monkeypatch, name):
    cls = getattr(nn, name)
    inputs = graphs.features().to(route.device), graphs.square().to(route.device)
    layer = cls(F, 8).to(route.device)
    layer.factor = 3.0
    on(route)
    compiled = torch.compile(layer, backend="aot_eager")
    same(step(compiled, *inputs), native(layer, inputs))
    messages = {"GCNConv": lambda self, x_j, edge_weight: x_j * self.factor,
                "SAGEConv": lambda self, x_j: x_j * self.factor}
    monkeypatch.setattr(cls, "message", messages[name])
    same(step(compiled, *inputs), native(layer, inputs))
    assert gnnaccel.stats()[name]["compiled"] == 1


@pytest.mark.long
def test_a_weight_that_is_another_view_of_its_memory(route):
    inputs = graphs.features().to(route.device), graphs.square().to(route.device)
    layer = nn.GCNConv(F, F).to(route.device)
    on(route)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    step(compiled, *inputs)
    layer.lin.weight.data = layer.lin.weight.data.t()
    same(step(compiled, *inputs), native(layer, inputs))
