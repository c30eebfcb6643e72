"""Rows of the edges that a message keeps on its layer beside pieces of them, views, maps and other
rows that it keeps: gradients at all of them."""
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
    names = ("kept",)

    def __init__(self):
        super().__init__(aggr="add")
        self.lin, self.out, self.wide = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C // 2, C)
        self.both = nn.Linear(2 * C, C)

    def forward(self, x, edge_index, e):
        return self.propagate(edge_index, x=self.lin(x), e=e)


class Chunks(Layer):
    """Pieces are cut before the whole is kept."""

    def message(self, x_i, x_j):
        m = x_i * x_j
        a, b = m.chunk(2, -1)
        self.kept = m
        return torch.cat([a * torch.sigmoid(b), m[:, :4]], -1)


class ChunksAfter(Layer):
    def message(self, x_i, x_j):
        m = torch.tanh(x_i - 2 * x_j)
        self.kept = m
        a, b = m.chunk(2, -1)
        return torch.cat([a * torch.sigmoid(b), m[:, :4]], -1)


class Split(Layer):
    def message(self, x_i, x_j, e):
        m = self.both(torch.cat([x_i, x_j], -1))
        a, b, _ = m.split([2, 2, 4], -1)
        self.kept = m
        return torch.sin(a) * b * e[:, :2]


class Slice(Layer):
    def message(self, x_i, x_j):
        m = torch.relu(self.both(torch.cat([x_i, x_j], -1)))
        gate = m[:, :1]
        self.kept = m
        return x_j * gate


class Unbind(Layer):
    def message(self, x_i, x_j):
        m = (x_i * x_j).view(-1, 4, 2)
        a, b = m.unbind(-1)
        self.kept = m
        return torch.cat([a * b, x_j[:, :4]], -1)


class View(Layer):
    def message(self, x_i, x_j):
        m = x_i * x_j
        heads = m.view(-1, 2, 4)
        self.kept = m
        return (heads * heads.sum(-1, keepdim=True)).view(-1, C)


class PieceKept(Layer):
    """Of two pieces that are cut one is kept."""

    def message(self, x_i, x_j):
        m = torch.exp(-(x_i - x_j).pow(2))
        self.kept, b = m.chunk(2, -1)
        return torch.cat([self.kept * b, b], -1)


class Of(Layer):
    """A map of the rows before they are kept."""

    def message(self, x_i, x_j):
        m = torch.tanh(x_i * x_j)
        mapped = self.out(m)
        self.kept = m
        return mapped * x_j


class SumBefore(Layer):
    def message(self, x_i, x_j):
        m = x_i * x_j
        norm = m.pow(2).sum(-1, keepdim=True)
        self.kept = m
        return x_j * torch.exp(-norm)


class OneOfAnother(Layer):
    names = ("a", "b")

    def message(self, x_i, x_j):
        m = x_i * x_j
        c, gate = m.chunk(2, -1)
        self.a, self.b = m, m.relu()
        return self.b + self.wide(torch.sin(gate) * c)


class SoftmaxOfPieces(Layer):
    names = ("scores", "alpha")

    def message(self, x_i, x_j, index, ptr, size_i):
        m = self.both(torch.cat([x_i, x_j], -1))
        s = F.leaky_relu(m[:, :2])
        self.scores = m
        self.alpha = softmax(s, index, ptr, size_i)
        return (x_j.view(-1, 2, 4) * self.alpha.unsqueeze(-1)).view(-1, C)


class PieceOfEdges(Layer):
    """The same piece of the caller's rows is cut again."""

    def message(self, x_j, e):
        self.kept = e[:, :1]
        return x_j * e[:, :1] + self.kept


class ChunksOfEdges(Layer):
    def message(self, x_j, e):
        a, b = e.chunk(2, -1)
        self.kept = b
        c, d = e.chunk(2, -1)
        return x_j[:, :4] * a * b + torch.sin(c) * d


class ViewOfEdges(Layer):
    def message(self, x_j, e):
        self.kept = e.view(-1, 2, 4)
        return x_j * e + self.kept.flatten(1)


class PieceOfMapOfEdges(Layer):
    """A piece of rows that torch makes of edges' features is cut again."""

    def message(self, x_j, e):
        m = self.lin(e)
        self.kept = m[:, :4]
        return torch.cat([torch.sin(m[:, :4]), self.kept * x_j[:, 4:]], -1)


class Aggregated(Layer):
    """Rows that ``aggregate`` gives back, and of which it cuts pieces."""

    names = ("kept", "given")

    def forward(self, x, edge_index, e):
        out, self.given = self.propagate(edge_index, x=self.lin(x), e=e)
        return out

    def message(self, x_i, x_j):
        m = torch.tanh(x_i - 2 * x_j)
        self.kept = m[:, 1:4]
        return m

    def aggregate(self, inputs, index, dim_size):
        a, b = inputs.chunk(2, -1)
        return scatter(torch.cat([a * b, b], -1), index, 0, dim_size, "mean"), inputs


class Stacked(Layer):
    """Nodes are in the second dimension."""

    def message(self, x_i, x_j, e):
        m = self.out(x_i) * x_j
        a = m[..., :4]
        self.kept = m
        return torch.cat([a * a, m[..., 4:] * e[..., :4]], -1)


class StackedEdges(Layer):
    def message(self, x_j, e):
        self.kept = e[..., :1]
        return x_j * self.kept


LAYERS = [Chunks, ChunksAfter, Split, Slice, Unbind, View, PieceKept, Of, SumBefore, OneOfAnother,
          SoftmaxOfPieces, PieceOfEdges, ChunksOfEdges, ViewOfEdges, PieceOfMapOfEdges, Aggregated,
          Stacked, StackedEdges]


def gradients(layer, x, edge_index, e):
    """All that a script may ask for of a call."""
    leaf, edges = x.clone().requires_grad_(), e.clone().requires_grad_()
    out = layer(leaf, edge_index, edges * 1.0)
    kept = [getattr(layer, name) for name in layer.names]
    loss, hooked = out.square().sum(), [None] * len(kept)
    results = [out, *kept]
    for one in (*kept, leaf, edges):  # each alone, and all at once
        results += torch.autograd.grad(loss, one, retain_graph=True, allow_unused=True)
    results += torch.autograd.grad(loss, [*kept, leaf], retain_graph=True, allow_unused=True)
    for at, one in enumerate(kept):
        one.retain_grad()
        one.register_hook(lambda grad, at=at: hooked.__setitem__(at, grad))
    (loss + sum(one.pow(3).sum() for one in kept)).backward()
    return [*results, *[one.grad for one in kept], *hooked, leaf.grad, edges.grad,
            layer.lin.weight.grad.clone()]


@pytest.mark.parametrize("cls", LAYERS)
def test_gradients_at_what_is_kept(emulated, cls):
    torch.manual_seed(0)
    layer, x, e = cls(), torch.randn(N, C), torch.randn(E, C)
    if cls in (Stacked, StackedEdges):
        layer.node_dim = -2
        x, e = torch.stack([x, x.cos(), x * 2]), torch.stack([e, e.sin(), e + 1])
    edge_index = torch.randint(N, (2, E))

    def run():
        layer.zero_grad()
        return gradients(layer, x, edge_index, e)

    expected = run()
    with emulated.on():
        for _ in range(3):
            for at, (one, two) in enumerate(zip(run(), expected)):
                assert (one is None) == (two is None), at
                assert two is None or close(one, two, 1e-5), at
    assert "native" not in gnnaccel.stats()[cls.__name__]["routes"]
