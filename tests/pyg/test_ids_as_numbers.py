"""Messages that calculate with the ids of the nodes at an edge's ends."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch_geometric.nn import MessagePassing

from tests.plain.held import same
from tests.pyg import graphs
from tests.pyg.generated_calls import both
from tests.pyg.judge import compare


class Conv(MessagePassing):
    def __init__(self, **options):
        super().__init__(aggr="add", **options)
        self.table = nn.Embedding(8, graphs.F)

    def forward(self, x, edge_index, size=None):
        return self.propagate(edge_index, x=x, size=size)


class Apart(Conv):
    """By how far they are apart, in numbers and in a table."""

    def message(self, x_j, edge_index):
        row, col = edge_index
        apart = (row - col).abs()
        return x_j * torch.exp(-apart.float() / 10).view(-1, 1) + self.table(apart.clamp(max=7))


class Loops(Conv):
    def message(self, x_j, edge_index_i, edge_index_j):
        loops = edge_index_i == edge_index_j
        later = (edge_index_j > edge_index_i).float().unsqueeze(-1)
        return torch.where(loops.unsqueeze(-1), -x_j, x_j.tanh() * (1 + later))


class Some(Conv):
    def message(self, x_j, index, edge_index_j):
        first = (index < 5).float().view(-1, 1)
        return x_j * first * self.table((index + 2 * edge_index_j) % 8) + (index / 9).sin()[:, None]


class Asked(Conv):
    def message(self, x_j, index=None):
        return x_j.tanh() if index is None else x_j * (index % 3).unsqueeze(-1)


CLASSES = [Apart, Loops, Some, Asked]


@pytest.mark.long
@pytest.mark.parametrize("cls", CLASSES)
def test_results_and_gradients(kernels, cls):
    layer, x = cls(), graphs.features()
    for edges in (graphs.square(), graphs.square(edges=90)):
        compare(kernels, layer, x, edges)
        compare(kernels, layer, x, edges.flip(0))
    edges = graphs.square().to(kernels.device)
    for _ in range(3):
        both(kernels, layer, x, edges)
        edges[1] = edges[1].roll(1)


@pytest.mark.long
@pytest.mark.parametrize("cls", CLASSES)
def test_other_ends(emulated, cls):
    left, right = graphs.features(), graphs.features(graphs.M)
    layer = cls()
    both(emulated, layer, (left, right), graphs.bipartite(), (graphs.N, graphs.M))
    both(emulated, cls(flow="target_to_source"), left, graphs.square())
    both(emulated, layer, left, graphs.square().int(), on_fallback="native")


class Plain(nn.Module):
    def forward(self, x, edge_index):
        row, col = edge_index
        weights = torch.exp(-(row - col).abs().float()) * (row != col)
        return torch.zeros_like(x).index_add_(0, col, x[row] * weights.unsqueeze(-1))


def test_plain_modules(emulated):
    layer, x, edges = Plain(), graphs.features(), graphs.square()
    with emulated.on(on_fallback="native"):
        for _ in range(2):
            assert same(layer, x.requires_grad_(), edges)
        edges[0, 3] = -2  # which picks a row from behind
        assert not same(layer, x, edges)
