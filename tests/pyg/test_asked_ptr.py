"""Messages and aggregates that ask whether ``ptr`` is None, which it is for edges in a tensor."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter, segment, softmax

import gnnaccel
from tests.pyg import graphs
from tests.pyg.generated_calls import routes, to
from tests.pyg.graphs import F as WIDTH, M, N
from tests.pyg.judge import close, compare


class Asking(MessagePassing):
    """The attention of course notebooks."""

    def __init__(self, dropout: float = 0.0):
        super().__init__(node_dim=0)
        self.heads, self.out, self.slope, self.dropout = 2, 4, 0.2, dropout
        self.lin_l, self.lin_r = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
        self.att_l, self.att_r = (nn.Parameter(torch.randn(1, 2, 4)) for _ in range(2))

    def forward(self, x, edge_index, size=None):
        pair = x if isinstance(x, tuple) else (x, x)
        left, right = (lin(one).view(-1, self.heads, self.out)
                       for lin, one in zip((self.lin_l, self.lin_r), pair))
        alpha = (left * self.att_l).sum(2), (right * self.att_r).sum(2)
        out = self.propagate(edge_index, x=(left, right), alpha=alpha, size=size)
        return out.view(-1, self.heads * self.out)

    def message(self, x_j, alpha_j, alpha_i, index, ptr, size_i):
        alpha = F.leaky_relu(alpha_i + alpha_j, negative_slope=self.slope)
        if ptr is None:
            alpha = softmax(alpha, index, num_nodes=size_i)
        else:
            alpha = softmax(alpha, ptr=ptr)
        alpha = F.dropout(alpha, p=self.dropout, training=self.training)
        return x_j * alpha.unsqueeze(-1)


class Course(Asking):
    def message(self, x_j, alpha_j, alpha_i, index, ptr, size_i):
        alpha = F.leaky_relu(alpha_i + alpha_j, negative_slope=self.slope)
        if ptr:
            alpha = softmax(alpha, ptr)
        else:
            alpha = softmax(alpha, index)
        alpha = F.dropout(alpha, p=self.dropout, training=self.training)
        return x_j * alpha.unsqueeze(-1)

    def aggregate(self, inputs, index, dim_size=None):
        return scatter(inputs, index, dim=self.node_dim, dim_size=dim_size, reduce="sum")


class Segments(Asking):
    """Its aggregate asks."""

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        if ptr is not None:
            return segment(inputs, ptr) * 2.0
        return scatter(inputs, index, 0, dim_size, "sum")


class ByMethod(Asking):
    def message(self, x_j, x_i, index, ptr):
        return self.scaled(torch.tanh(x_i * x_j), ptr)

    def scaled(self, rows, ptr):
        return rows if ptr is None else rows * 2.0


def args() -> list[torch.Tensor]:
    return [graphs.features(), graphs.square()]


@pytest.mark.parametrize("cls", [Asking, Course, Segments, ByMethod])
def test_values_and_gradients(kernels, cls):
    compare(kernels, cls(), *args())
    both = (graphs.features(), graphs.features(M))
    if cls is not ByMethod:
        compare(kernels, cls(), both, graphs.bipartite(), (N, M), positions=(
            "x", "edge_index", "size"))


def test_the_kernels_of_attention(route):
    compare(route, Asking(), *args())


@pytest.mark.parametrize("cls", [Asking, Course])
def test_dropout(kernels, cls):
    """All of it is left out, or none."""
    layer, given = cls(1.0).to(kernels.device), to(kernels.device, *args())
    with kernels.on():
        assert not layer(*given).any()
        layer.eval()
        got = layer(*given)
    assert routes(layer) == {"cuda": 2} and close(got, layer(*given))


@pytest.mark.parametrize("cls", [Asking, Segments, ByMethod])
@pytest.mark.parametrize("first", ["tensor", "sorted"])
def test_edges_that_bring_a_ptr(kernels, cls, first):
    """Of sorted edges the message gets one, whatever it was told before."""
    layer, (x, edges) = cls().to(kernels.device), to(kernels.device, *args())
    edges = edges[:, edges[1].argsort(stable=True)]
    index = EdgeIndex(edges, sparse_size=(N, N), sort_order="col")
    forms = [edges, index] if first == "tensor" else [index, edges]
    with kernels.on(on_fallback="native"):
        for form in forms * 3:
            with gnnaccel.disabled():
                expected = layer(x, form)
            assert close(layer(x, form), expected)
