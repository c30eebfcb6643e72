"""An ``update`` that takes the list of edges."""
from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import degree, softmax

import gnnaccel
from tests.pyg import graphs
from tests.pyg.generated_calls import routes
from tests.pyg.graphs import E, N
from tests.pyg.graphs import F as WIDTH
from tests.pyg.judge import close, compare


SEEN: list[torch.Tensor] = []  # what updates were given


class Taking(MessagePassing):
    """No layer is made of it: classes would inherit the ``propagate`` that PyG writes then."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, scale=0.5)

    def update(self, out, x, edge_index, scale):
        SEEN.append(edge_index)
        count = degree(edge_index[1], x.shape[0], dtype=x.dtype).clamp(min=1)
        return x - scale * out / count.view(-1, 1)


class Copied(Taking):
    """PyG's own message."""


class Written(Taking):
    def message(self, x_i, x_j):
        return torch.tanh(x_j - x_i) * x_i


class Attending(Taking):
    def __init__(self, **options):
        super().__init__(aggr="add", **options)
        self.att = nn.Parameter(torch.randn(1, 2 * WIDTH))

    def message(self, x_i, x_j, index, ptr, size_i):
        alpha = (torch.cat([x_i, x_j], -1) * self.att).sum(-1)
        alpha = softmax(nn.functional.leaky_relu(alpha, 0.2), index, ptr, size_i)
        return x_j * alpha.unsqueeze(-1)


class Halves(Taking):
    """Two results, put together."""

    def message(self, x_i, x_j):
        return torch.relu(x_j - x_i), x_j

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        one = MessagePassing.aggregate(self, inputs[0], index, ptr, dim_size)
        return one * MessagePassing.aggregate(self, inputs[1], index, ptr, dim_size)


CLASSES = [Copied, Written, Attending, Halves]


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("cls", CLASSES)
def test_values_and_gradients(kernels, cls, flow):
    compare(kernels, cls(flow=flow), graphs.features(), graphs.square())


@pytest.mark.long
@pytest.mark.parametrize("cls", CLASSES)
def test_it_is_the_callers(emulated, cls):
    """In repeated calls and over other graphs; also edges that kernels read a copy of."""
    layer, x = cls(), graphs.features()
    graph = graphs.square()
    over = [graph, graph, graph.flip(0), graphs.square(edges=E - 3), graph.t().contiguous().t()]
    gnnaccel.reset_stats()
    SEEN.clear()
    for edge_index in over:
        expected = layer(x, edge_index)
        with emulated.on():
            assert close(layer(x, edge_index), expected)
    assert routes(layer) == {"cuda": len(over)}
    assert len(SEEN) == 2 * len(over)
    assert all(one is over[at // 2] for at, one in enumerate(SEEN))


def test_sparse_matrices_are_the_hosts(emulated):
    """Which has no list of edges to pass on."""
    layer, x = Copied(), graphs.features()
    matrix = torch.sparse_coo_tensor(graphs.square(), torch.ones(E), (N, N)).coalesce()
    for on in (contextlib.nullcontext(), emulated.on(on_fallback="native")):
        with on, pytest.raises(ValueError, match="for sparse matrices"):
            layer(x, matrix.t())
