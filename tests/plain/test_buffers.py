"""Zeros and other numbers that sums and extrema go into, made, moved and asked in the ways of plain
modules; and numbers among their results."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import gnnaccel
from tests.judge import compare
from tests.plain.held import same
from tests.plain.test_layers import EDGES, NODES, tensors


def of_a_shape(self, h, row, col):
    messages = h[row].tanh()
    total, count = torch.zeros(h.shape).to(h), torch.zeros(h.shape).to(h.device).to(h.dtype)
    total.index_add_(0, col, messages)
    count.index_add_(0, col, torch.ones(messages.shape).to(messages))
    count[count == 0] = 1
    return total / count


def of_the_shape_of_zeros(self, h, row, col):
    total = torch.zeros(h.size(0), h.size(1)).type_as(h)
    count, moved = torch.zeros(total.shape[0], 1).to(h), total.to(h.dtype)
    moved.index_add_(0, col, h[row].tanh())
    count.index_add_(0, col, h.new_ones(col.size(0), 1))
    return total / torch.max(count, torch.ones_like(count))


def chosen_by_a_mask(self, h, row, col):
    total = torch.zeros_like(h, dtype=h.dtype, device=h.device).index_add_(0, col, h[row].tanh())
    count = h.new_zeros(h.size(0)).index_add_(0, col, h.new_ones(col.size(0)))
    alone = count == 0
    mean = total / count.masked_fill(alone, 1).unsqueeze(-1)
    return torch.where(alone.unsqueeze(-1), torch.zeros_like(total), mean)


def used_before_it_is_added_to(self, h, row, col):
    total = torch.zeros_like(h)
    before = total + 1
    total.index_add_(0, col, h[row].tanh())
    return total * torch.ones_like(total) + before + torch.full_like(h, 3)


def largest(self, h, row, col):
    messages = h[row].tanh() * h[col]
    most = torch.full(h.shape, float("-inf")).to(messages)
    most = most.scatter_reduce(0, col.unsqueeze(-1).expand_as(messages), messages, reduce="amax")
    return most.masked_fill(most == float("-inf"), 0)


def least_of_neighbours(self, h, row, col):
    messages = h[row].tanh() * h[col]
    least = torch.full((h.size(0), 8), 5, dtype=h.dtype, device=h.device).scatter_reduce(
        0, col[:, None].expand_as(messages), messages, "amin", include_self=False)
    return torch.nan_to_num(least, neginf=0.0)


def attention(self, h, row, col):
    scores = (h[row] * h[col]).view(-1, 2, 4).sum(-1)
    most = torch.full((h.size(0), 2), -torch.inf).to(h).scatter_reduce(
        0, col.unsqueeze(-1).expand(-1, 2), scores.detach(), "amax", include_self=False)
    weights = (scores - most[col]).exp()
    total = torch.zeros(h.size(0), 2, dtype=h.dtype).to(h.device).index_add_(0, col, weights)
    weights = weights / total[col]
    values = h[row].view(-1, 2, 4) * weights.unsqueeze(-1)
    return torch.zeros_like(h).index_add_(0, col, values.flatten(1))


def by_all_edges(self, h, row, col):
    messages = h[row] * h[col]
    messages = messages - messages.mean(0)
    weights = (messages.sum(-1, keepdim=True) - messages.sum(-1).max()).sigmoid()
    return torch.zeros_like(h).index_add_(0, col, messages * weights)


WAYS = [of_a_shape, of_the_shape_of_zeros, chosen_by_a_mask, used_before_it_is_added_to, largest,
        least_of_neighbours, attention, by_all_edges]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.number = nn.Linear(8, 8), 3

    def forward(self, x, edge_index):
        return self.written(self.lin(x), edge_index[0], edge_index[1])


def made(written):
    return type(written.__name__.title().replace("_", ""), (Layer,), {"written": written})()


@pytest.fixture
def on(emulated):
    with gnnaccel.enabled(backend="cuda", when="supported"):
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("written", WAYS)
def test_ways(kernels, written):
    layer = made(written).to(kernels.device)
    given = [one.to(kernels.device) for one in tensors("x edge_index")]
    compare(kernels, layer, *given)
    more = [one.to(kernels.device) for one in tensors("x edge_index", NODES + 7, EDGES + 30, 5)]
    with kernels.on():
        for _ in range(2):
            assert same(layer, given[0].clone().requires_grad_(), given[1])
        assert same(layer.eval(), *more)


def numbers(self, h, row, col):
    total = torch.zeros_like(h).index_add_(0, col, h[row].tanh())
    return {"total": total, "nodes": h.size(0), "other": [self.number, "text", None, 1.5, True],
            "shape": (h.shape[1],)}


def test_numbers_among_results(on):
    layer = made(numbers)
    for count in (NODES, NODES, NODES + 9):
        x, edges = tensors("x edge_index", count)
        for layer.number in (4, 5.0):
            out = layer(x, edges)
            assert out["other"] == [layer.number, "text", None, 1.5, True]
            assert type(out["other"][0]) is type(layer.number)
            assert out["nodes"] == count and type(out["nodes"]) is int and out["shape"] == (8,)
        assert same(layer, x, edges)
    assert gnnaccel.stats()["Numbers"]["routes"] == {"cuda": 1}


def view_of_zeros(self, h, row, col):
    total = torch.zeros_like(h)
    part = total[:, :1]
    total.index_add_(0, col, h[row].tanh())
    return total, part + 0


def view_in_another_shape(self, h, row, col):
    total = torch.zeros_like(h)
    part = total.view(-1, 2, 4)
    total.index_add_(0, col, h[row].tanh())
    return total + part.sum(1).repeat(1, 2)


@pytest.mark.parametrize("written", [view_of_zeros, view_in_another_shape])
def test_views_of_zeros_are_not_followed(on, written):
    assert not same(made(written), *tensors("x edge_index"))
