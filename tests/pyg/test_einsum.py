"""Products that messages write by `torch.einsum`; `test_matrix_products` has others."""
from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch_geometric.utils import softmax

from tests.pyg import graphs
from tests.pyg.generated_calls import arguments, both, routes
from tests.pyg.generated_layers import WIDTH, Message
from tests.pyg.judge import compare
from tests.pyg.own_attention import Inner


class Attention(Inner):
    """Scores and weighted values."""

    def message(self, q_i, k_j, v_j, index, ptr, size_i):
        alpha = torch.einsum("ehd,ehd->eh", q_i, k_j) / math.sqrt(self.out)
        return torch.einsum("eh,ehd->ehd", softmax(alpha, index, ptr, size_i), v_j)


class Gated(Inner):
    """The same where kernels are written for it; in other letters, and a list."""

    def message(self, q_i, k_j, v_j, index):
        score = torch.einsum("n a b, n a b -> n a", [q_i, k_j]).tanh()
        return torch.einsum("nab,na->nab", torch.relu(v_j), softmax(score, index))


class Scored(Message):
    """Products with parameters of the channels, and of one number for each edge."""

    def __init__(self):
        super().__init__()
        self.v, self.w = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(3, 4))

    def message(self, x_i, x_j):
        one = torch.einsum("ei,ei->e", x_i, x_j)
        scaled = torch.einsum("e,ei,i->ei", one, x_j, self.v)
        heads = torch.einsum("ehd,hd->eh", x_i.view(-1, 3, 4), self.w)
        return scaled * torch.einsum("ehd,eh->ehd", x_j.view(-1, 3, 4), heads).reshape(-1, 12)


class Shared(Message):
    """The sum of what just one factor has the axis of."""

    def message(self, x_i, x_j):
        return torch.einsum("ei,e->ei", x_j, torch.einsum("e,ei->e", x_i[:, 0], x_i * x_j))


class Transposed(Message):
    def message(self, x_j):
        return torch.einsum("ehd,ehd->edh", x_j.view(-1, 3, 4), x_j.view(-1, 3, 4)).flatten(1)


class Diagonal(Message):
    def message(self, x_i, x_j):
        return torch.einsum("edd,ef->ef", (x_i * x_j)[:, :9].reshape(-1, 3, 3), x_j)


class OfBases(Message):
    """Weights that are sums of bases, which parameters alone make."""

    def __init__(self):
        super().__init__()
        self.bases = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 3)
        self.shares = nn.Parameter(torch.randn(3, 2))

    def message(self, x_i, x_j):
        weights = torch.einsum("rb,bio->rio", self.shares, self.bases)
        return x_i @ weights[0] + (x_j @ weights[1]) * torch.einsum("io->o", weights[2])


def test_parameters_alone(kernels):
    compare(kernels, OfBases(), *arguments(OfBases)[:2])


class OverEdges(Message):
    def message(self, x_i, x_j):
        return torch.einsum("ei,fi->ei", x_i, x_j)


def test_attention(route):
    compare(route, Attention(WIDTH, 8), graphs.features(), graphs.square())


def test_written_kernels(kernels):
    compare(kernels, Gated(WIDTH, 8), graphs.features(), graphs.square())


@pytest.mark.parametrize("cls", [Scored, Shared])
def test_products(kernels, cls):
    compare(kernels, cls(), *arguments(Message)[:2])


@pytest.mark.parametrize("cls", [Transposed, Diagonal])
def test_other_sums_are_by_torch(kernels, cls):
    compare(kernels, cls(), *arguments(Message)[:2])


def test_sums_over_edges_stay_native(emulated):
    layer = OverEdges()
    both(emulated, layer, *arguments(Message)[:2], on_fallback="native")
    assert routes(layer) == {"native": 1}
