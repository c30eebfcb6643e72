"""Users' copies of layers that divide by the edges of each kind, as `RGCNConv` has them."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.utils import one_hot, scatter

from tests.pyg import graphs
from tests.pyg.generated_calls import both, routes
from tests.pyg.generated_layers import WIDTH, Message
from tests.pyg.graphs import E, N
from tests.pyg.judge import close, compare

KINDS = 4


class MeanOfKinds(Message):
    """A matrix for each kind of edge; the mean of each kind, all added up, in `aggregate`."""

    edge, hot = 1, staticmethod(one_hot)

    def __init__(self, aggr="mean"):
        super().__init__(aggr, node_dim=0)
        self.weight, self.num_relations = nn.Parameter(torch.randn(KINDS, WIDTH, 6)), KINDS

    def forward(self, x, edge_index, edge_type):
        return self.propagate(edge_index, x=x, edge_type=edge_type, size=(x.size(0), x.size(0)))

    def message(self, x_j, edge_type):
        return torch.bmm(x_j.unsqueeze(-2), self.weight[edge_type]).squeeze(-2)

    def aggregate(self, inputs, edge_type, index, dim_size=None):
        if self.aggr == "mean":
            norm = one_hot(edge_type, self.num_relations, dtype=inputs.dtype)
            norm = scatter(norm, index, dim=0, dim_size=dim_size)[index]
            norm = torch.gather(norm, 1, edge_type.view(-1, 1))
            norm = 1. / norm.clamp_(1.)
            inputs = norm * inputs
        return scatter(inputs, index, dim=self.node_dim, dim_size=dim_size)


class ByTorch(MeanOfKinds):
    """With torch's own function, and by the index's name."""

    def aggregate(self, inputs, edge_type, index, dim_size=None):
        norm = F.one_hot(edge_type, num_classes=self.num_relations).to(torch.float)
        norm = scatter(norm, index, dim=0, dim_size=dim_size)[index]
        norm = torch.gather(norm, dim=-1, index=edge_type.unsqueeze(1))
        return scatter(inputs / norm.clamp(min=1), index, dim=0, dim_size=dim_size)


class InMessage(MeanOfKinds):
    """The counts are made in the message; no ``aggregate``."""

    def message(self, x_j, edge_type, index, size_i):
        counts = scatter(one_hot(edge_type, KINDS), index, 0, size_i)[index]
        norm = torch.gather(counts, 1, edge_type.view(-1, 1))
        return torch.tanh(x_j) / norm

    aggregate = Message.aggregate


class Beside(MeanOfKinds):
    """Kinds of nodes beside features, as a number for each kind."""

    def __init__(self):
        super().__init__("add")
        self.lin = nn.Linear(WIDTH + KINDS, 6)

    def forward(self, x, edge_index, kind):
        return self.propagate(edge_index, x=x, kind=kind)

    def message(self, x_j, kind_j, kind_i):
        return self.lin(torch.cat([x_j, F.one_hot(kind_j, KINDS).float()], -1)) * (
            kind_i == kind_j).float().view(-1, 1)

    aggregate = Message.aggregate


def given():
    return graphs.features(), graphs.square(), torch.randint(0, KINDS, (E,))


@pytest.mark.long
@pytest.mark.parametrize("cls", [MeanOfKinds, ByTorch, InMessage])
def test_values_and_gradients(kernels, cls):
    for aggr in ("mean", "add") if cls is MeanOfKinds else ("mean",):
        compare(kernels, cls(aggr), *given())


def test_kinds_of_nodes(kernels):
    x, ei, _ = given()
    compare(kernels, Beside(), x, ei, torch.randint(0, KINDS, (N,)))


def test_nodes_that_no_edge_reads_may_be_of_no_kind(emulated):
    layer, (x, ei, _) = Beside(), given()
    kind = torch.randint(0, KINDS, (N,))
    kind[-1] = 77
    assert N - 1 not in ei
    expected = layer(x, ei, kind)
    with emulated.on():
        assert close(layer(x, ei, kind), expected)
    assert routes(layer) == {"cuda": 1}


@pytest.mark.parametrize("cls", [MeanOfKinds, InMessage])
def test_kinds_that_there_are_none_of(emulated, cls):
    layer, (x, ei, kind) = cls(), given()
    kind[3] = KINDS
    with pytest.raises((RuntimeError, IndexError)):
        layer(x, ei, kind)
    with emulated.on(), pytest.raises((RuntimeError, IndexError)):
        layer(x, ei, kind)


@pytest.mark.long
def test_other_calls(emulated):
    layer = MeanOfKinds()
    for at in range(4):
        x, ei, kind = graphs.features(), torch.randint(0, N, (2, E + at)), torch.randint(
            0, KINDS, (E + at,))
        both(emulated, layer, x, ei, kind)
        layer.num_relations = KINDS + at  # more kinds than the edges have
        with torch.no_grad():
            both(emulated, layer, x, ei, kind)
