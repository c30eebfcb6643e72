"""Sums that are added to values per node, in place or not; and what a ``forward`` asks about its
list of edges first."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import gnnaccel
from tests.plain.held import codes, same
from tests.plain.test_layers import EDGES, NODES, tensors


def onto_values(self, x, row, col):
    h = self.lin(x)
    return h.index_add(0, col, x[row] * h[col])


def onto_an_argument(self, x, row, col):
    return x.index_add(0, col, self.lin(x)[row])


def into_a_copy(self, x, row, col):
    out = x.clone()
    out.index_add_(0, col, self.lin(x)[row])
    return out


def into_values(self, x, row, col):
    h = self.lin(x)
    messages, before = h[row], h.relu()
    h.scatter_add_(0, col[:, None].expand(-1, 8), messages)
    return h, before


def by_both_ends(self, x, row, col):
    h, out = self.lin(x), torch.zeros_like(x)
    out.index_add_(0, row, h[col])
    out.index_add_(0, col, (h[row] * x[col]).tanh())
    return out


def counted_at_both_ends(self, x, row, col):
    count = torch.zeros(x.size(0)).index_add_(0, col, torch.ones(col.size(0)))
    count.index_add_(0, row, torch.ones(len(row)))
    return self.lin(x).index_add(0, col, x[row]) / count.clamp(min=1)[:, None]


def counted_by_what_is_added_to(self, x, row, col):
    h = self.lin(x)
    count = torch.zeros(h.size(0)).index_add_(0, col, torch.ones(col.size(0)))
    h += count[:, None]
    return torch.zeros_like(x).index_add_(0, col, h[row])


def ones_like_what_is_added_to(self, x, row, col):
    h = self.lin(x)
    h += torch.zeros_like(h).index_add_(0, col, torch.ones(col.size(0), 8))
    return torch.zeros_like(x).index_add_(0, col, h[row])


def without_dropout(self, x, row, col):
    total = torch.zeros_like(x).index_add_(0, col, self.never(self.lin(x))[row])
    return self.norm(x + nn.functional.dropout(total, 0.5, training=False))


FOLLOWED = [onto_values, onto_an_argument, into_a_copy, into_values, by_both_ends,
            counted_at_both_ends, counted_by_what_is_added_to, ones_like_what_is_added_to,
            without_dropout]


def through_a_view(self, x, row, col):
    h = self.lin(x)
    h[:, :4].index_add_(0, col, x[row][:, :4])
    return h


def under_a_view(self, x, row, col):
    h = self.lin(x)
    view = h[:, :4]
    h.index_add_(0, col, x[row])
    return view + 1


def scaled(self, x, row, col):
    return self.lin(x).index_add(0, col, x[row], alpha=2)


def with_others(self, x, row, col):
    return self.lin(x).scatter_reduce(0, col[:, None].expand(-1, 8), x[row], "mean")


NATIVE = [through_a_view, under_a_view, scaled, with_others]


class Written(nn.Module):
    """Its subclasses compute what is ``written``."""

    def __init__(self):
        super().__init__()
        self.lin, self.norm, self.never = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.0)

    def forward(self, x, edge_index):
        return self.written(x, edge_index[0], edge_index[1])


def made(written):
    return type(written.__name__.title().replace("_", ""), (Written,), {"written": written})()


@pytest.fixture
def on(emulated):
    with gnnaccel.enabled(backend="cuda", when="supported"):
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("written", FOLLOWED)
def test_sums_onto_values(on, written):
    layer, (x, edges) = made(written), tensors("x edge_index")
    for _ in range(2):
        assert same(layer, x.requires_grad_(), edges)
    assert same(layer.eval(), *tensors("x edge_index", NODES + 7, EDGES + 30, 5))


@pytest.mark.parametrize("written", NATIVE)
def test_what_is_not_followed(on, written):
    layer, (x, edges) = made(written), tensors("x edge_index")
    for _ in range(2):
        assert not same(layer, x.requires_grad_(), edges)
    assert codes(layer) == {"GA211"}


class Dropped(Written):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x, edge_index):
        total = torch.zeros_like(x).index_add_(0, edge_index[1], self.lin(x)[edge_index[0]])
        return x + self.drop(total)


def test_dropout_at_nodes(on):
    layer, given = Dropped(), tensors("x edge_index")
    for training in (True, False, True, False):
        with torch.set_grad_enabled(training):
            assert same(layer.train(training), *given, grad=training)


# --- attention by hand -----------------------------------------------------------------------------

def largest(scores, places, count):
    return torch.full((count, 2), float("-inf")).scatter_reduce(0, places, scores, "amax")


def largest_in_place(scores, places, count):
    out = torch.full((count, 2), -1e9, device=scores.device)
    out.scatter_reduce_(0, places, scores, reduce="amax", include_self=True)
    return out


def largest_of_new_rows(scores, places, count):
    with torch.no_grad():
        return scores.new_full((count, 2), -0.5).scatter_reduce(0, places, scores, "amax")


def smallest_or_zero(scores, places, count):
    return torch.zeros(count, 2).scatter_reduce(0, places, scores.detach(), "amin")


class Attends(nn.Module):
    def __init__(self, extremum, end=1):
        super().__init__()
        self.lin, self.att = nn.Linear(8, 8), nn.Parameter(torch.randn(2, 4))
        self.extremum, self.end = extremum, end

    def forward(self, x, edge_index):
        to, fro = edge_index[self.end], edge_index[1 - self.end]
        h = self.lin(x).view(-1, 2, 4)
        scores = nn.functional.leaky_relu(((h[fro] + h[to]) * self.att).sum(-1), 0.2)
        shift = self.extremum(scores, to[:, None].expand(-1, 2), x.size(0))
        weights = (scores - shift[to]).exp()
        total = torch.zeros(x.size(0), 2).index_add_(0, to, weights)
        weights = weights / (total[to] + 1e-16)
        return torch.zeros_like(h).index_add_(0, to, h[fro] * weights.unsqueeze(-1)).flatten(1)


@pytest.mark.parametrize("extremum", [largest, largest_in_place, largest_of_new_rows,
                                      smallest_or_zero])
@pytest.mark.parametrize("end", [0, 1])
def test_extrema_with_what_is_there(on, extremum, end):
    layer, (x, edges) = Attends(extremum, end), tensors("x edge_index")
    for _ in range(2):
        assert same(layer, x.requires_grad_(), edges)
    assert same(layer.eval(), *tensors("x edge_index", NODES + 7, EDGES + 30, 5))


def sums_into_ones(scores, places, count):
    return torch.full((count, 2), 1.0).scatter_add(0, places, scores)


def means_with_zero(scores, places, count):
    return torch.zeros(count, 2).scatter_reduce(0, places, scores, "mean")


@pytest.mark.parametrize("reduction", [sums_into_ones, means_with_zero])
def test_other_reductions_with_what_is_there(on, reduction):
    layer, given = Attends(reduction), tensors("x edge_index")
    assert not same(layer, *given) and not same(layer, *given)


# --- questions about the list of edges -------------------------------------------------------------

class Asks(Written):
    def forward(self, x, edge_index):
        if edge_index.numel() == 0 or not edge_index.dim() == 2 or len(edge_index) != 2:
            return x
        row, col = edge_index
        if len(row) == 0 or row.dim() != 1 or not col.numel() > 0:
            return x
        places = col
        for _ in range(places.dim(), x.dim()):
            places = places.unsqueeze(-1)
        messages = self.lin(x)[row]
        return torch.zeros_like(x).scatter_add_(0, places.expand(messages.size()), messages)


class Compares(Written):
    """What it asks depends on numbers."""

    def forward(self, x, edge_index):
        if edge_index.numel() == x.numel():
            return x
        return torch.zeros_like(x).index_add_(0, edge_index[1], self.lin(x)[edge_index[0]])


def test_how_many_edges_there_are(on):
    for count, followed in ((EDGES, True), (4 * NODES, True), (0, False)):
        given = tensors("x edge_index", NODES, count)
        assert same(Asks(), *given) is followed
        assert not same(Compares(), *given)
