"""A softmax over neighbours that a message tells by a number how many nodes there are."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

from tests.pyg import graphs
from tests.pyg.generated_calls import routes
from tests.pyg.graphs import N
from tests.pyg.graphs import F as WIDTH
from tests.pyg.judge import close, compare


class Told(MessagePassing):
    """GAT that hands the number of nodes through ``propagate``."""

    more = 0

    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.lin = nn.Linear(WIDTH, 8)
        self.att = nn.Parameter(torch.randn(1, 2, 8))

    def forward(self, x, edge_index):
        x = self.lin(x).view(-1, 2, 4)
        return self.propagate(edge_index, x=x, num_nodes=x.size(0) + self.more).flatten(1)

    def message(self, edge_index_i, x_i, x_j, num_nodes):
        alpha = F.leaky_relu((torch.cat([x_i, x_j], -1) * self.att).sum(-1), 0.2)
        return x_j * softmax(alpha, edge_index_i, num_nodes=num_nodes).view(-1, 2, 1)


class More(Told):
    more = 7


class Holds(MessagePassing):
    """The layer holds the number of nodes."""

    def __init__(self):
        super().__init__(aggr="add")
        self.num_nodes, self.lin = N, nn.Linear(WIDTH, 8)
        self.a, self.b = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_i, x_j, index, ptr):
        alpha = F.leaky_relu(self.a(x_i) + self.b(x_j), 0.2)
        return x_j * softmax(alpha, index, ptr, self.num_nodes)


class Gated(Holds):
    """One that kernels are written for."""

    def message(self, x_i, x_j, index, ptr):
        alpha = softmax(torch.tanh(self.a(x_i) * self.b(x_j)), index, ptr, self.num_nodes)
        return torch.sigmoid(x_i) * x_j * alpha


class Aggregates(Holds):
    """The softmax is in the ``aggregate``."""

    def message(self, x_j):
        return x_j

    def aggregate(self, inputs, index, ptr, dim_size):
        alpha = softmax(self.a(inputs), index, ptr, self.num_nodes)
        return self.aggr_module(inputs * alpha, index, dim_size=dim_size, dim=0)


@pytest.mark.parametrize("cls", [Told, More, Holds])
def test_attention(route, cls):
    compare(route, cls(), graphs.features(), graphs.square())


@pytest.mark.parametrize("cls", [Gated, Aggregates])
def test_written_kernels(kernels, cls):
    compare(kernels, cls(), graphs.features(), graphs.square())


@pytest.mark.long
@pytest.mark.parametrize("cls", [Holds, Gated, Aggregates])
@pytest.mark.parametrize("grad", [True, False])
def test_more_nodes_than_told(emulated, cls, grad):
    """The host's error where edges enter such nodes, its result where none does, whatever earlier
    calls over fewer nodes and the same edges found."""
    layer, ei = cls(), graphs.square()
    x, longer = graphs.features(), graphs.features(N + 10)
    with torch.set_grad_enabled(grad), emulated.on(on_fallback="native"):
        for _ in range(3):
            layer(x, ei)
        assert routes(layer) == {"cuda": 3}
        native = layer(longer, ei)
        assert routes(layer) == {"cuda": 3, "native": 1}
        beyond = ei.clone()
        beyond[1, 0] = N + 5
        with pytest.raises(RuntimeError):
            layer(longer, beyond)
        layer.num_nodes = N + 10
        layer(longer, beyond)
        assert close(layer(longer, ei), native)
        layer.num_nodes = 1
        with pytest.raises(RuntimeError):
            layer(x, ei)
