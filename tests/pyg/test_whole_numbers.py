"""Messages with whole numbers and truth values of edges or nodes, such as kinds and masks."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.pyg import graphs
from tests.pyg.generated_calls import compare_second, routes, to
from tests.pyg.generated_layers import WIDTH, Message
from tests.pyg.graphs import E, N
from tests.pyg.judge import close, compare
from tests.pyg.test_generated_changes import each_seen

KINDS = 4


class OfKinds(Message):
    """``kind``: [E] or [E, k] of edges, [N] of nodes."""

    def __init__(self, aggr: str = "add"):
        super().__init__(aggr, node_dim=0)
        self.table, self.embed = nn.Parameter(torch.randn(KINDS, WIDTH)), nn.Embedding(KINDS, WIDTH)

    def forward(self, x, edge_index, edge_attr=None, kind=None):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr, kind=kind)


# --- kinds of nodes -------------------------------------------------------------------------------

class Picked(OfKinds):
    def message(self, x_j, kind_j):
        return torch.sigmoid(x_j) * self.table[kind_j]


class Embedded(OfKinds):
    def message(self, x_i, x_j, kind_i):
        return torch.tanh(x_j - x_i) * self.embed(kind_i)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("cls", [Picked, Embedded])
def test_nodes_that_no_edge_reads_may_be_of_no_kind(kernels, cls, grad, frozen):
    """The host looks up the kinds that edges read alone."""
    layer, kind = cls().requires_grad_(not frozen), torch.randint(0, KINDS, (N,))
    kind[-1] = 77  # no edge is there
    layer = layer.to(kernels.device)
    x, ei, kind = to(kernels.device, graphs.features(), graphs.square(), kind)
    with torch.set_grad_enabled(grad):
        expected = layer(x, ei, kind=kind)
        with kernels.on():
            assert close(layer(x, ei, kind=kind), expected)
    assert routes(layer) == {"cuda": 1}


class OfChannel(OfKinds):
    """The last feature of a node is its kind (InforMARL)."""

    def message(self, x_i, x_j):
        return torch.tanh(x_j[:, :-1] - x_i[:, :-1]) * self.embed(x_j[:, -1].long())[:, 1:]


def with_kinds() -> torch.Tensor:
    x = graphs.features()
    x[:, -1] = torch.randint(0, KINDS, (N,))
    return x


@pytest.mark.long
def test_kinds_among_the_features(kernels):
    for train in (True, False):
        compare(kernels, OfChannel(), with_kinds(), graphs.square(), None, train=train)


class Alike(OfKinds):
    def message(self, x_j, kind_i, kind_j):
        return x_j * (kind_i == kind_j).unsqueeze(-1)


class SeveralAlike(OfKinds):
    """Several numbers of each end."""

    def message(self, x_i, x_j, kind_i, kind_j):
        other = (kind_i != kind_j) & (kind_i < 2 + kind_j)
        return torch.where(kind_i == kind_j, x_j, x_i - x_j) * (1 + other.float())


@pytest.mark.parametrize("cls, shape", [(Alike, (N,)), (SeveralAlike, (N, WIDTH))])
def test_kinds_of_both_ends(kernels, cls, shape):
    """As exactly as whole numbers are: as floats these are the same."""
    kind = torch.randint(0, 2, shape) + 2**24
    assert kind.float().unique().numel() == 1
    compare(kernels, cls(), graphs.features(), graphs.square(), kind=kind)


# --- kinds of edges -------------------------------------------------------------------------------

class Hops(OfKinds):
    """Several hops of features, each with a mask (KP-GNN)."""

    def message(self, x_j, edge_attr, kind):
        x_j = x_j.view(-1, 2, WIDTH // 2) + edge_attr.view(-1, 2, 2).sum(-1, keepdim=True)
        return x_j.masked_fill_(kind.unsqueeze(-1) == 0, 0.0)


class Factor(OfKinds):
    def message(self, x_i, x_j, kind):
        return torch.tanh(x_j - x_i) * (1 - kind).unsqueeze(-1)


class Where(OfKinds):
    def message(self, x_i, x_j, kind):
        return torch.where((kind >= 2).unsqueeze(-1), x_j.sigmoid(), x_i * x_j)


class Converted(OfKinds):
    def message(self, x_i, x_j, kind):
        return torch.relu(x_j - x_i) * kind.float().view(-1, 1) / (2 * kind.view(-1, 1) + 1)


class Several(OfKinds):
    """Whole numbers in a sum over channels, and side by side with features."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2 * WIDTH + 1, WIDTH)

    def message(self, x_i, x_j, kind):
        score = (x_i * x_j * kind.view(-1, 1)).sum(-1, keepdim=True)
        return score.sigmoid() * self.lin(torch.cat([x_i, x_j, kind.view(-1, 1)], -1))


class Learned(OfKinds):
    def message(self, x_i, x_j, kind):
        return torch.sigmoid(x_j - x_i) * (self.table[0] * kind.view(-1, 1))


class Masked(OfKinds):
    def message(self, x_i, x_j, kind):
        return (x_j - x_i).masked_fill(~kind.view(-1, 1), 0.5) * (1.0 + kind.view(-1, 1))


def whole(dtype: torch.dtype = torch.int64, *tail: int) -> torch.Tensor:
    return torch.randint(0, 2 if dtype is torch.bool else KINDS, (E, *tail)).to(dtype)


OF_EDGES = [Factor, Where, Converted, Several, Learned]


@pytest.mark.parametrize("cls", OF_EDGES)
def test_kinds_of_edges(kernels, cls):
    for train in (True, False):
        compare(kernels, cls(), graphs.features(), graphs.square(), None, kind=whole(), train=train)


@pytest.mark.long
def test_other_dtypes(kernels):
    compare(kernels, Where(), graphs.features(), graphs.square(), None, kind=whole(torch.int32))
    compare(kernels, Masked(), graphs.features(), graphs.square(), None, kind=whole(torch.bool))


@pytest.mark.parametrize("aggr", ["add", "mean", "max"])
def test_masks_of_heads(kernels, aggr):
    compare(kernels, Hops(aggr), graphs.features(), graphs.square(), graphs.edge_features(),
            kind=whole(torch.int64, 2))


def test_numbers_are_compared_exactly(kernels):
    """As floats they would be the same."""
    class Exact(OfKinds):
        def message(self, x_i, x_j, kind):
            return (x_j - x_i) * (kind == 2**24 + 1).view(-1, 1)

    kind = 2**24 + torch.randint(0, 2, (E,))
    compare(kernels, Exact(), graphs.features(), graphs.square(), None, kind=kind)


def test_second_derivatives(kernels):
    class Kept(Where):
        def forward(self, x, edge_index, edge_attr):
            return self.propagate(edge_index, x=x, kind=(edge_attr[:, 0] > 0).long() * 2)

    compare_second(kernels, Kept().to(kernels.device), *to(
        kernels.device, graphs.features(), graphs.square(), graphs.edge_features()))


@pytest.mark.parametrize("cls", [Where, Factor])
def test_kinds_that_change(kernels, cls):
    """In place, as another tensor, and as one of another dtype."""
    kinds = [whole().to(kernels.device)]

    class Current(cls):
        def forward(self, x, edge_index, edge_attr):
            return super().forward(x, edge_index, edge_attr, kinds[-1])

    layer = Current()
    each_seen(kernels, layer, graphs.features(), graphs.square(), graphs.edge_features(), changes=(
        lambda: kinds[-1].add_(1), lambda: kinds[-1].mul_(0),
        lambda: kinds.append(whole().to(kernels.device)),
        lambda: kinds.append(whole(torch.int32).to(kernels.device)),
        lambda: kinds.append(whole().to(kernels.device))))
