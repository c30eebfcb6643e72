"""Messages that multiply rows with a matrix for each edge, or with rows of the other end."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch_geometric.nn import MessagePassing, NNConv
from torch_geometric.utils import softmax

from tests.pyg import graphs
from tests.pyg.generated_calls import arguments, both, hub, repeats, routes
from tests.pyg.generated_layers import EDGE, WIDTH, Message
from tests.pyg.judge import compare

KINDS = 3


class Network(Message):
    """A network of the edge's features gives its matrix."""

    def __init__(self, aggr: str = "add"):
        super().__init__(aggr)
        self.net = nn.Sequential(nn.Linear(EDGE, 6), nn.Tanh(), nn.Linear(6, WIDTH * 5))


class OfBatches(Network):
    def message(self, x_j, edge_attr):
        return torch.bmm(x_j.unsqueeze(1), self.net(edge_attr).view(-1, WIDTH, 5)).squeeze(1)


class FromTheLeft(Network):
    def message(self, x_j, edge_attr):
        return (self.net(edge_attr).view(-1, 5, WIDTH) @ x_j.unsqueeze(-1)).squeeze(-1)


class ByEinsum(Network):
    def message(self, x_j, edge_attr):
        return torch.einsum("ei,eio->eo", x_j, self.net(edge_attr).view(-1, WIDTH, 5))


class Outer(Message):
    """The outer product of both ends."""

    def message(self, x_i, x_j):
        return torch.bmm(x_i.unsqueeze(2), x_j[:, :3].unsqueeze(1)).flatten(1)


class AtOneEnd(Message):
    """A product of the sources' rows alone, and one with a parameter from the left."""

    def __init__(self):
        super().__init__()
        self.left, self.heads = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3, 4, 4))

    def message(self, x_i, x_j):
        x = x_j.view(-1, 3, 4)
        squares = torch.matmul(x, self.left @ x).flatten(1)
        return squares + torch.einsum("ehd,hdf->ehf", torch.tanh(x_i.view(-1, 3, 4) - x),
                                      self.heads).flatten(1)


class Scores(Message):
    """Scores by `torch.bmm`, and their softmax."""

    def message(self, x_i, x_j, index):
        score = torch.bmm(x_i.unsqueeze(1), x_j.unsqueeze(2)).view(-1, 1)
        return softmax(score / WIDTH, index) * x_j


class OfKinds(MessagePassing):
    """A matrix for each kind of edge."""

    def __init__(self, aggr: str = "add"):
        super().__init__(aggr)
        self.weight = nn.Parameter(torch.randn(KINDS, WIDTH, WIDTH))

    def forward(self, x, edge_index, kinds):
        return self.propagate(edge_index, x=x, kinds=kinds)

    def message(self, x_j, kinds):
        return torch.bmm(x_j.unsqueeze(1), self.weight[kinds]).squeeze(1)


class NoRow(Message):
    """No row of each row: the host adds up over the edges."""

    def message(self, x_j):
        return torch.bmm(x_j.unsqueeze(0), (x_j.unsqueeze(2) * x_j.unsqueeze(1)).sum(0, True))[0]


@pytest.mark.parametrize("cls", [OfBatches, FromTheLeft, ByEinsum, Outer, AtOneEnd, Scores])
def test_products(kernels, cls):
    compare(kernels, cls(), *arguments(cls))


@pytest.mark.parametrize("aggr", ["mean", "max"])
def test_other_reductions(kernels, aggr):
    compare(kernels, ByEinsum(aggr), *arguments(ByEinsum))


def test_on_both_routes(route):
    both(route, OfBatches(), *arguments(OfBatches), on_fallback="native")


def test_the_hosts_layer(kernels):
    layer = NNConv(WIDTH, 5, nn.Linear(EDGE, WIDTH * 5), aggr="mean")
    compare(kernels, layer, *arguments(Message))


@pytest.mark.long
def test_a_matrix_for_each_kind(kernels):
    """Also after kinds, weights and edges have changed."""
    layer, native = OfKinds(), OfKinds()
    x, edge_index = graphs.features(), graphs.square()
    kinds = torch.randint(0, KINDS, (edge_index.shape[1],))
    for step in range(4):
        native.load_state_dict(copy.deepcopy(layer.state_dict()))
        compare(kernels, layer, x, edge_index, kinds)
        both(kernels, layer, x, edge_index, kinds)
        assert routes(layer) == {"cuda": 1}
        with torch.no_grad():
            if step == 0:
                kinds.copy_(kinds.flip(0))
            elif step == 1:
                layer.weight = nn.Parameter(torch.randn(KINDS, WIDTH, WIDTH))
            else:
                edge_index[1] = edge_index[1].flip(0)


@pytest.mark.long
def test_repeats_bit_for_bit(emulated):
    repeats(emulated, ByEinsum(), EDGE)


def test_long_rows(kernels):
    edge_index = hub()
    edge = graphs.edge_features(edge_index.shape[1], EDGE)
    compare(kernels, ByEinsum("mean"), graphs.features(), edge_index, edge)


@pytest.mark.long
def test_what_is_no_row_of_each_stays_native(emulated):
    layer = NoRow()
    both(emulated, layer, *arguments(Message), on_fallback="native")
    assert routes(layer) == {"native": 1}
