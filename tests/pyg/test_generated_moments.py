"""Variances and deviations of messages that kernels are written for."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.pyg import graphs
from tests.pyg.generated_calls import arguments, both, compare_second
from tests.pyg.generated_layers import WIDTH, Message
from tests.pyg.judge import compare


class Product(Message):
    def message(self, x_i, x_j):
        return torch.tanh(x_i * x_j) + x_j


class Mapped(Message):
    """Which ends in a linear map."""

    def __init__(self, aggr):
        super().__init__(aggr)
        self.lin = nn.Linear(2 * WIDTH, 5)

    def message(self, x_i, x_j):
        return self.lin(torch.cat([x_i, x_j - x_i], -1).relu())


class Heads(Message):
    def message(self, x_i, x_j):
        left, right = x_i.view(-1, 3, 4), x_j.view(-1, 3, 4)
        return (left * right).sum(-1, keepdim=True) * right


AGGREGATIONS = ["var", "std", ["mean", "std", "max"]]


@pytest.mark.long
@pytest.mark.parametrize("aggr", AGGREGATIONS, ids=str)
@pytest.mark.parametrize("cls", [Product, Mapped])
def test_values_and_gradients(kernels, cls, aggr):
    layer, given = cls(aggr), arguments(cls)[:2]
    for _ in range(2):
        compare(kernels, layer, *given)
    both(kernels, layer, graphs.features(), graphs.square(edges=90))
    with torch.no_grad():
        both(kernels, layer.eval(), *given)


@pytest.mark.long
@pytest.mark.parametrize("aggr", ["var", "std"])
def test_blocks_of_channels(emulated, aggr):
    layer = Heads(aggr)
    layer.node_dim = 0
    compare(emulated, layer, *arguments(Heads)[:2])


def test_second_derivatives(emulated):
    compare_second(emulated, Product("var"), *arguments(Product))


@pytest.mark.long
def test_nodes_with_few_edges(emulated):
    """Nothing enters most nodes, one edge some, and the same edge twice another."""
    edges = torch.tensor([[1, 2, 2, 5], [0, 3, 3, 4]])
    for aggr in ("var", "std"):
        both(emulated, Product(aggr), graphs.features(), edges)
        compare(emulated, Mapped(aggr), graphs.features(), edges)
