"""Arguments that are tensors of a subclass, whose functions are others than torch's: the layer is
the host's."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import (GCNConv, GINEConv, GraphConv, HeteroConv, MessagePassing,
                                SAGEConv)

import gnnaccel
from tests.judge import native_again
from tests.pyg import graphs

EDGES = graphs.square().shape[1]


class Doubled(Tensor):
    """Its sums and products are twice as large."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        out = super().__torch_function__(function, types, args, kwargs or {})
        if function.__name__ not in ("add", "mul"):
            return out
        with torch._C.DisableTorchFunctionSubclass():
            return (out * 2).as_subclass(Doubled)


class Own(MessagePassing):
    def forward(self, x, edge_index, weight):
        return self.propagate(edge_index, x=x, weight=weight)

    def message(self, x_j, x_i, weight):
        return torch.sigmoid(x_i + weight) * x_j


def as_the_host(route, layer, *plain, doubled):
    """A call with one argument of the subclass, after plain ones, gives the host's result."""
    layer = layer.to(route.device)

    def call():
        out = layer(*plain[:-1], doubled(plain[-1]))
        return out.as_subclass(Tensor), type(out)

    with route.on(on_fallback="native"):
        for _ in range(3):
            layer(*plain)
        got, kind = call()
    with gnnaccel.disabled():
        expected, expected_kind = call()
    assert kind is expected_kind is Doubled
    assert native_again(got, expected)


@pytest.mark.parametrize("layer", [
    pytest.param(lambda width: GCNConv(width, 8), id="gcn"),
    pytest.param(lambda width: GraphConv(width, 8, aggr="max"), id="graph"),
])
def test_weights_of_edges(route, inputs, layer):
    x, edge_index = inputs
    as_the_host(route, layer(x.shape[1]), x, edge_index, torch.rand(EDGES, device=route.device),
                doubled=lambda weight: weight.as_subclass(Doubled))


@pytest.mark.parametrize("layer", [lambda width: GINEConv(nn.Linear(width, 8)),
                                   lambda width: Own()], ids=["gine", "own"])
def test_features_of_edges(route, inputs, layer):
    x, edge_index = inputs
    edge_attr = torch.rand(EDGES, x.shape[1], device=route.device)
    as_the_host(route, layer(x.shape[1]), x, edge_index, edge_attr,
                doubled=lambda features: features.as_subclass(Doubled))


def test_results_of_groups_in_hetero_conv_are_not_added_up_by_the_subclass(route, inputs):
    x, edge_index = inputs
    kinds = {("a", str(k), "a"): made(x.shape[1], 8) for k, made in
             enumerate((SAGEConv, SAGEConv, GraphConv, GraphConv))}
    layer = HeteroConv(kinds, "mean").to(route.device)
    with route.on(on_fallback="native"):
        got = layer({"a": x.as_subclass(Doubled)}, dict.fromkeys(kinds, edge_index))["a"]
    with gnnaccel.disabled():
        expected = layer({"a": x.as_subclass(Doubled)}, dict.fromkeys(kinds, edge_index))["a"]
    assert type(got) is type(expected)
    assert native_again(got.as_subclass(Tensor), expected.as_subclass(Tensor))
