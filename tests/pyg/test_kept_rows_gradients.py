"""Rows of the edges that a message keeps on its layer, and what is made of them: a gradient of the
results goes through these rows, as scripts that explain attention or regularise it ask."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter, softmax

import gnnaccel
from tests.pyg.judge import close

N, E, C = 30, 140, 8


class Layer(MessagePassing):
    def __init__(self):
        super().__init__(aggr="add")
        self.lin, self.att, self.out = nn.Linear(C, C), nn.Linear(2 * C, 1), nn.Linear(C, C)
        self.both = nn.Linear(2 * C, C)

    def forward(self, x, edge_index, e):
        return self.propagate(edge_index, x=self.lin(x), e=e)


class Weights(Layer):
    def message(self, x_i, x_j, index, ptr, size_i):
        a = F.leaky_relu(self.att(torch.cat([x_i, x_j], -1)))
        self.kept = softmax(a, index, ptr, size_i)
        return x_j * self.kept


class Gate(Layer):
    def message(self, x_i, x_j):
        self.kept = torch.sigmoid(x_i * x_j)
        return x_j * self.kept


class Network(Layer):
    def message(self, x_i, x_j):
        self.kept = torch.relu(self.both(torch.cat([x_i, x_j], -1)))
        return self.out(self.kept)


class OfEdges(Layer):
    def message(self, x_j, e):
        self.kept = self.lin(e)
        return x_j * torch.tanh(self.kept)


class Whole(Layer):
    """The message itself."""

    def message(self, x_i, x_j):
        self.kept = x_i * x_j
        return self.kept


class Scores(Layer):
    """Dots of heads, before their softmax."""

    def message(self, x_i, x_j, index, ptr, size_i):
        q, k = self.lin(x_i).view(-1, 2, 4), self.out(x_j).view(-1, 2, 4)
        self.kept = (q * k).sum(-1) / 2
        a = softmax(self.kept, index, ptr, size_i)
        return (x_j.view(-1, 2, 4) * a.unsqueeze(-1)).view(-1, C)


class Mapped(Layer):
    """A map of a function that is kept, and the function itself."""

    def message(self, x_i, x_j):
        m = torch.relu(self.both(torch.cat([x_i, x_j], -1)))
        self.kept, self.doubled = m, m * 2
        return self.doubled * torch.sigmoid(self.out(m))


class Distances(Layer):
    def message(self, x_i, x_j):
        self.kept = (x_i - x_j).pow(2).sum(-1, keepdim=True)
        return x_j * torch.exp(-self.kept)


class Argument(Layer):
    def message(self, x_j, e):
        self.kept = e
        return x_j * e


class Aggregated(Layer):
    """A result that has the rows besides."""

    def forward(self, x, edge_index, e):
        out, self.kept = self.propagate(edge_index, x=self.lin(x), e=e)
        return out

    def message(self, x_i, x_j):
        return torch.tanh(x_i - 2 * x_j)

    def aggregate(self, inputs, index, dim_size):
        return scatter(torch.sin(inputs) + inputs, index, 0, dim_size, "mean"), inputs


class Pair(Layer):
    """Rows that are kept beside others."""

    @property
    def kept(self):
        return self.pair[0]

    def message(self, x_i, x_j):
        self.pair = x_i, x_j[:, :1]
        return x_j * (x_i - x_i.mean(-1, keepdim=True))


@pytest.mark.long
@pytest.mark.parametrize("cls", [Weights, Gate, Network, OfEdges, Whole, Scores, Mapped,
                                 Distances, Argument, Aggregated, Pair])
def test_gradients_go_through_them(emulated, cls):
    torch.manual_seed(0)
    layer, x, e = cls(), torch.randn(N, C), torch.randn(E, C)
    edge_index = torch.randint(N, (2, E))

    def run():
        leaf, edges = x.clone().requires_grad_(), e.clone().requires_grad_()
        out = layer(leaf, edge_index, edges * 1.0)
        kept = layer.kept
        first, = torch.autograd.grad(out.square().sum(), kept, retain_graph=True)
        kept.retain_grad()
        (out.square().sum() + kept.square().sum()).backward()
        return [out, kept, first, kept.grad, leaf.grad, edges.grad]

    expected = run()
    with emulated.on():
        for _ in range(6):
            for one, two in zip(run(), expected):
                assert (one is None) == (two is None) and (two is None or close(one, two, 1e-5))
    assert "native" not in gnnaccel.stats()[cls.__name__]["routes"]


class PieceTwice(Layer):
    def message(self, x_i, x_j):
        self.kept = x_j[:, :1]
        return x_i * x_j[:, :1]


class ChunksTwice(Layer):
    def message(self, x_i, x_j):
        self.kept, _ = x_j.chunk(2, -1)
        a, b = x_j.chunk(2, -1)
        return torch.cat([a * b, x_i[:, :4]], -1)


class Copy(Layer):
    def message(self, x_i, x_j):
        m = x_i * x_j
        self.kept = m.clone()
        return torch.sigmoid(m)


class CopyOfEdges(Layer):
    def message(self, x_j, e):
        self.kept = e.clone()
        return x_j * e


@pytest.mark.parametrize("cls", [PieceTwice, ChunksTwice, Copy, CopyOfEdges])
def test_rows_that_are_computed_a_second_time_are_others(emulated, cls):
    torch.manual_seed(0)
    layer, x, e = cls(), torch.randn(N, C), torch.randn(E, C, requires_grad=True)
    edge_index = torch.randint(N, (2, E))
    with emulated.on():
        out = layer(x, edge_index, e)
        assert torch.autograd.grad(out.sum(), layer.kept, allow_unused=True) == (None,)
    assert "native" not in gnnaccel.stats()[cls.__name__]["routes"]


class CopyOfKinds(Layer):
    def forward(self, x, edge_index, e, kind):
        return self.propagate(edge_index, x=self.lin(x), e=e, kind=kind)

    def message(self, x_j, e, kind):
        self.kept, self.kinds = e.clone(), kind.clone()
        return x_j * e + self.both.weight[kind, :C]


def test_copies_of_what_the_caller_passes_are_the_layers_own(emulated):
    torch.manual_seed(0)
    layer, x, e = CopyOfKinds(), torch.randn(N, C), torch.randn(E, C)
    edge_index, kind = torch.randint(N, (2, E)), torch.randint(3, (E,))
    edges, kinds = e.clone(), kind.clone()
    with emulated.on():
        layer(x, edge_index, e, kind)
    layer.kept.add_(1)
    layer.kinds.add_(1)
    assert torch.equal(e, edges) and torch.equal(kind, kinds)
    assert "native" not in gnnaccel.stats()["CopyOfKinds"]["routes"]
