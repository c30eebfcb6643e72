"""Messages with arguments that PyG's message passing passes by itself, such as ``index``."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

import gnnaccel
from tests.pyg import graphs
from tests.pyg.graphs import E, F as WIDTH, N
from tests.pyg.judge import close, compare


class Conv(MessagePassing):
    def __init__(self, **options):
        super().__init__(**{"aggr": "add", **options})

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)


class NoCount(Conv):
    def message(self, x_j, size_i):
        return x_j.relu() if size_i is None else x_j


class NoneCount(Conv):
    def message(self, x_j, x_i, size_i):
        return (x_j - x_i).abs() if None is size_i else x_j.exp() - x_i


class EqualToNone(Conv):
    def message(self, x_j, size_i):
        return x_j.relu() if size_i == None else x_j  # noqa: E711 - as some write it


class WithDefault(Conv):
    def message(self, x_j, x_i, edge_index_j=None):
        return (x_j - x_i).abs() if edge_index_j is None else x_j.exp() - x_i


class Sized(Conv):
    def message(self, x_j, size=None):
        return x_j.relu() if size is None else x_j


class HandedOn(Conv):
    def message(self, x_j, x_i, size_i):
        return self.combined(x_j, x_i, size_i)

    def combined(self, left, right, given):
        return (left - right).abs() if given is None else left.exp() - right


class Attending(Conv):
    def message(self, x_j, x_i, index, ptr, size_i):
        score = (x_i + x_j).sum(-1, keepdim=True)
        if size_i is None:
            score = F.leaky_relu(score, 0.2)
        return softmax(score, index, ptr, size_i) * x_j


class AttendingOnOneLine(Conv):
    """Where Python 3.13 writes and reads by one instruction."""

    def message(self, x_j, x_i, index, ptr, size_i):
        a = (x_i + x_j).sum(-1, keepdim=True); b = a if size_i is None else -a  # noqa: E702
        return softmax(b, index, ptr, size_i) * x_j


class AttendingRenamed(Conv):
    def message(self, x_j, x_i, index, ptr, size_i):
        score, given = (x_i + x_j).sum(-1, keepdim=True), size_i
        if given is None:
            score = F.leaky_relu(score, 0.2)
        return softmax(score, index, ptr, size_i) * x_j


@pytest.mark.parametrize("cls", [NoCount, NoneCount, HandedOn, Attending, AttendingOnOneLine,
                                 AttendingRenamed, WithDefault])
def test_messages_that_ask_whether_nodes_are_counted(emulated, cls):
    """They are, where features of nodes are given; and their ids are always there."""
    compare(emulated, cls(), graphs.features(), graphs.square())


@pytest.mark.parametrize("cls", [EqualToNone, Sized])
def test_messages_that_ask_what_they_were_passed(emulated, cls):
    """No stand-in can answer that: the branch for None was the one that ran, or not."""
    layer, x, ei = cls(), graphs.features(), graphs.square()
    expected = layer(x, ei)
    with emulated.on(on_fallback="native"):
        got = layer(x, ei)
    assert torch.equal(got, expected)
    found = gnnaccel.stats()[cls.__name__]
    assert found["routes"] == {"native": 1} and set(found["reasons"]) == {"GA211"}


class Unused(Conv):
    def message(self, x_j, edge_index, size):
        return x_j


class UnusedInExpression(Conv):
    def message(self, x_i, x_j, edge_index, index):
        return torch.tanh(x_j - x_i)


class Classic(Conv):
    """GAT as for PyG 1: ``edge_index_i`` is what ``index`` is now."""

    def __init__(self):
        super().__init__(node_dim=0)
        self.lin, self.att = nn.Linear(WIDTH, 16), nn.Parameter(torch.randn(1, 2, 16))

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, edge_index_i, x_i, x_j, size_i):
        x_i, x_j = x_i.view(-1, 2, 8), x_j.view(-1, 2, 8)
        alpha = (torch.cat([x_i, x_j], dim=-1) * self.att).sum(dim=-1)
        alpha = softmax(F.leaky_relu(alpha, 0.2), edge_index_i, num_nodes=size_i)
        return x_j * alpha.view(-1, 2, 1)


@pytest.mark.parametrize("cls", [Unused, UnusedInExpression, Classic])
def test_messages_that_hand_them_on_or_leave_them(emulated, cls):
    layer = cls()
    compare(emulated, layer, graphs.features(), graphs.square())
    assert gnnaccel.stats()[cls.__name__]["routes"].keys() == {"cuda"}


class Grouping(Classic):
    def message(self, edge_index_j, x_i, x_j, size_j):
        alpha = softmax((x_i + x_j).sum(-1, keepdim=True), edge_index_j, num_nodes=size_j)
        return x_j * alpha


class OtherEnd(Classic):
    def message(self, edge_index, x_i, x_j):
        return x_j * softmax((x_i + x_j).sum(-1, keepdim=True), edge_index[0])


@pytest.mark.parametrize("cls", [Grouping, OtherEnd])
def test_a_softmax_over_the_edges_that_leave(emulated, cls):
    layer, x, ei = cls(), graphs.features(), graphs.square()
    expected = layer(x, ei)
    with emulated.on(on_fallback="native"):
        assert close(layer(x, ei), expected)
    assert gnnaccel.stats()[cls.__name__]["routes"] == {"cuda": 1}


def test_edges_that_the_host_does_not_pass(emulated):
    """PyG refuses to make an ``edge_index`` of a sparse matrix, and so does the call."""
    adjacency = torch.sparse_coo_tensor(graphs.square().flip(0), torch.ones(E), (N, N))
    for _ in range(2):
        with emulated.on(on_fallback="native"), pytest.raises(ValueError, match="Cannot collect"):
            Unused()(graphs.features(), adjacency.coalesce().to_sparse_csr())


# --- changed in place -----------------------------------------------------------------------------

class Weighed(Conv):
    """With a number and features for each edge."""

    def forward(self, x, edge_index, w):
        return self.propagate(edge_index, x=x, w=w)


class OtherName(Weighed):
    def message(self, x_j, w):
        before = x_j
        x_j *= w
        return before


class SumOfIt(Weighed):
    def message(self, x_j, w):
        before = x_j
        x_j += 0.5
        return (before + w).relu()


class AttendsToIt(Weighed):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def message(self, x_i, x_j, w, index):
        before = x_j.view(-1, 1, x_j.size(1))
        x_j += self.bias
        score = (before.squeeze(1) + x_i).sum(-1, keepdim=True)
        return x_j * softmax(F.leaky_relu(score), index)


class ChangesTheUsers(Weighed):
    def message(self, x_i, x_j, w, index):
        w *= 0.5
        return x_j * softmax((x_i + x_j).sum(-1, keepdim=True) + w.sum(-1, keepdim=True), index)


@pytest.mark.parametrize("cls", [OtherName, SumOfIt, AttendsToIt, ChangesTheUsers])
def test_messages_that_change_their_arguments(emulated, cls):
    """Whoever else has the tensor sees the change: views, other names, the caller."""
    layer, x, ei = cls(), graphs.features(), graphs.square()
    weights = torch.rand(E, WIDTH), torch.zeros(E, WIDTH)
    weights[1].copy_(weights[0])
    expected = layer(x, ei, weights[0])
    with emulated.on(on_fallback="native"):
        got = layer(x, ei, weights[1])
    assert close(got, expected) and torch.equal(*weights)


class Counting(Conv):
    def message(self, x_i, x_j):
        return (x_j - x_i).abs() if x_j.size(0) == E else x_j.exp() - x_i


def test_a_message_that_depends_on_how_many_edges_there_are(emulated):
    layer, x, ei = Counting(), graphs.features(), graphs.square()
    for edges in (ei, ei[:, 1:]):
        expected = layer(x, edges)
        with emulated.on(on_fallback="native"):
            assert close(layer(x, edges), expected)


# --- edges beside edges ---------------------------------------------------------------------------

class Mistaken(Weighed):
    """A new axis too many: a number for each pair of edges, which torch computes all the same."""

    def message(self, x_j, w):
        return x_j * w[:, None]


@pytest.mark.parametrize("aggr", ["add", "max"])
def test_messages_of_pairs_of_edges(emulated, aggr):
    layer, x, ei = Mistaken(node_dim=0, aggr=aggr), graphs.features(), graphs.square()[:, :9]
    w = torch.rand(9, 1)
    expected = layer(x, ei, w)
    assert expected.shape == (N, 9, WIDTH)
    with emulated.on(on_fallback="native"):
        assert close(layer(x, ei, w), expected)


class OfTheGraph(MessagePassing):
    """Features of the whole graph, repeated for each edge beside those of its ends."""

    def __init__(self, aggr="mean"):
        super().__init__(aggr=aggr)
        self.lin, self.last = nn.Linear(2 * WIDTH + 3, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, edge_index, whole):
        return self.propagate(edge_index, x=x, whole=whole)

    def message(self, x_i, x_j, whole):
        rows = whole.repeat(x_i.shape[0], 1)
        out = torch.cat((x_i - x_j, x_j, rows), dim=1)
        return self.last(torch.relu(self.lin(out))) * rows[:, :1]


class RepeatedTwice(OfTheGraph):
    def message(self, x_i, x_j, whole):
        return x_j * whole.repeat(x_i.shape[0], 2)[:, -1:]


@pytest.mark.parametrize("aggr", ["mean", "max"])
@pytest.mark.parametrize("shape", [(3,), (1, 3)])
def test_one_row_for_each_edge(kernels, aggr, shape):
    compare(kernels, OfTheGraph(aggr), graphs.features(), graphs.square(), torch.randn(shape))


@pytest.mark.long
def test_rows_for_each_edge_of_other_sizes(emulated):
    """Another row, more of them, and one that is repeated along its channels."""
    layer, x, ei = OfTheGraph(), graphs.features(), graphs.square()
    for row in (torch.randn(1, 3), torch.randn(3), torch.randn(1, 3).double().float()):
        expected = layer(x, ei, row)
        with emulated.on():
            for _ in range(2):
                assert close(layer(x, ei, row), expected)
    for other, row in ((RepeatedTwice(), torch.randn(1, 3)), (layer, torch.randn(2, 3))):
        results = []
        for on in (False, True):
            try:
                with emulated.on(on_fallback="native") if on else torch.enable_grad():
                    results.append(other(x, ei, row))
            except RuntimeError as why:  # two rows are twice as many
                results.append(type(why))
        assert results[0] is results[1] or close(results[1], results[0])
