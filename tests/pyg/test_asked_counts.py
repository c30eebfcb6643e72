"""Messages and aggregates that ask whether they know how many nodes there are, and `bincount`."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter, softmax

import gnnaccel
from tests.pyg.generated_calls import arguments, both, routes
from tests.pyg.generated_layers import EDGE, WIDTH, Message
from tests.pyg.graphs import N
from tests.pyg.judge import close, compare


def counts(index, dim_size=None):
    """A helper of the user's, which asks too."""
    if dim_size is None:
        dim_size = int(index.max()) + 1
    return torch.bincount(index, minlength=dim_size)


class MeanByHand(Message):
    """As assistants write it."""

    def message(self, x_i, x_j):
        return torch.tanh(x_j - x_i), torch.relu(x_j)

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        first, second = inputs
        total = self.aggr_module(first, index, ptr=ptr, dim_size=dim_size)
        other = self.aggr_module(second, index, ptr=ptr, dim_size=dim_size)
        if dim_size is None:
            dim_size = int(index.max().item()) + 1 if index.numel() > 0 else 0
        if dim_size > 0:
            degrees = torch.bincount(index, minlength=dim_size).clamp(min=1).to(other.device)
            other = other / degrees.view(-1, 1)
        return total + other


class HelperAsks(Message):
    def message(self, x_i, x_j):
        return torch.relu(x_j * x_i)

    def aggregate(self, inputs, index, dim_size=None):
        out = scatter(inputs, index, dim=0, dim_size=dim_size, reduce="sum")
        return out / counts(index, dim_size).clamp(min=1).unsqueeze(-1)


class SizeAsked(Message):
    def message(self, x_i, x_j, size_i):
        return torch.tanh(x_i * x_j) if size_i is None else torch.tanh(x_i - x_j)


class CountsOfSources(Message):
    """Degrees at the other end, in the message, by a list of edges of its own."""

    def message(self, x_j, x_i, edge_index, size):
        degrees = torch.bincount(edge_index[0, :], minlength=size[0]).to(x_j.dtype)
        return torch.tanh(x_j - x_i) / degrees[edge_index[0]].view(-1, 1)


@pytest.mark.parametrize("cls", [MeanByHand, HelperAsks, SizeAsked, CountsOfSources])
def test_values_and_gradients(kernels, cls):
    compare(kernels, cls(), *arguments(Message)[:2], **(
        dict(size=(N, N)) if cls is CountsOfSources else {}))


class OfEdgesAlone(MessagePassing):
    """Nothing tells how many nodes there are, unless ``size`` does."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(EDGE, WIDTH)

    def forward(self, x, edge_index, edge_attr, size=None):
        return self.propagate(edge_index, edge_attr=edge_attr, size=size)

    def message(self, edge_attr):
        return torch.tanh(self.lin(edge_attr))

    def aggregate(self, inputs, index, dim_size=None):
        if dim_size is None:
            inputs = inputs * 2
        return scatter(inputs, index, 0, dim_size)


@pytest.mark.parametrize("size", [None, (N, N)])
def test_where_nothing_tells(emulated, size):
    layer, given = OfEdgesAlone(), arguments(Message)
    expected = layer(*given, size)
    with emulated.on(on_fallback="native"):
        assert close(layer(*given, size), expected)
    assert routes(layer) == {"native": 1}


def test_no_nodes(emulated):
    """Another way is taken where there are none."""
    layer = MeanByHand()
    both(emulated, layer, *arguments(Message)[:2])
    x, edges = torch.randn(0, WIDTH), torch.zeros(2, 0, dtype=torch.int64)
    expected = layer(x, edges)
    gnnaccel.reset_stats()
    with emulated.on(on_fallback="native"):
        layer(*arguments(Message)[:2])
        assert close(layer(x, edges), expected)
    assert routes(layer)["native"] == 1


class OtherEnd(Message):
    """Counts of one end divided by the number of nodes at the other."""

    def message(self, x_i, x_j):
        return torch.tanh(x_j - x_i)

    def aggregate(self, inputs, index, edge_index, dim_size):
        out = scatter(inputs, index, 0, dim_size)
        return out / torch.bincount(edge_index[0], minlength=dim_size).clamp(min=1).view(-1, 1)


@pytest.mark.long
def test_counts_of_another_end_between_two_kinds_of_nodes(emulated):
    layer, (x, edges, _) = OtherEnd(), arguments(Message)
    both(emulated, layer, x, edges)
    assert routes(layer) == {"cuda": 1}
    few = torch.randn(N - 5, WIDTH)
    edges = torch.stack([edges[0], edges[1].clamp(max=N - 6)])
    edges[0].clamp_(max=N - 6)
    edges[0, 0] = N - 6
    expected = layer((x, few), edges)
    gnnaccel.reset_stats()
    with emulated.on(on_fallback="native"):
        assert close(layer((x, few), edges), expected)
    assert routes(layer) == {"native": 1}


class AsManyAsEdges(Message):
    """Takes the number of edges for that of nodes in a softmax, as some do."""

    def __init__(self, by: str = "rows", aggr: str = "add"):
        super().__init__(aggr)
        self.by, self.weight = by, nn.Parameter(torch.randn(WIDTH, 1))

    def message(self, x_i, x_j, edge_index):
        ids = edge_index[1]
        count = x_i.shape[0] if self.by == "rows" else ids.size(0)
        return softmax((x_i - x_j) @ self.weight, ids, num_nodes=count) * x_j


@pytest.mark.long
@pytest.mark.parametrize("by", ["rows", "ids"])
@pytest.mark.parametrize("aggr", ["add", "max"])
def test_a_softmax_of_as_many_nodes_as_edges(kernels, by, aggr):
    compare(kernels, AsManyAsEdges(by, aggr), *arguments(Message)[:2])


@pytest.mark.parametrize("by", ["rows", "ids"])
def test_a_softmax_of_fewer_nodes_than_there_are(emulated, by):
    """The host refuses it where an edge enters one beyond; in a call after one by kernels too."""
    layer, (x, edges, _) = AsManyAsEdges(by), arguments(Message)
    few = torch.randint(0, 3, (2, N - 1))
    beyond = few.clone()
    beyond[1, 0] = N - 1
    with emulated.on(on_fallback="native"):
        for _ in range(2):
            layer(x, edges)
            layer(x, few)
        with pytest.raises((IndexError, RuntimeError)):
            layer(x, beyond)
        got = layer(x, few)
    assert close(got, layer(x, few)) and routes(layer)["cuda"] == 2
