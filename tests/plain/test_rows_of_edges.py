"""Lists of edges with a row for each edge, [E, 2], and arguments that a forward does not name."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import gnnaccel
from tests.plain.held import codes, same
from tests.plain.test_layers import EDGES, NODES, tensors


def columns(self, x, pairs, w):
    messages = torch.tanh(self.lin(torch.cat([x[pairs[:, 0]], x[pairs[:, 1]], w[:, None]], 1)))
    return torch.zeros_like(x).index_add_(0, pairs[:, 1], messages)


def rows_of_all_channels(self, x, pairs, w):
    messages = x[pairs[:, 0], :] * w[:, None] - x[pairs[:, 1], ...]
    index = pairs[:, [1]].expand(-1, messages.shape[1])
    return x + torch.zeros(x.shape[0], messages.shape[1]).to(x.device).scatter_add(
        0, index, messages)


def of_the_first_end(self, x, pairs, w):
    src, dst = pairs.unbind(1)
    messages = (x[dst] * w.view(pairs.shape[0], pairs.size(1) - 1)).sigmoid() / pairs.dim()
    return torch.zeros_like(x).index_add_(0, src, messages), messages


def turned_back(self, x, pairs, w):
    src, dst = pairs.t()
    return torch.zeros_like(x).index_add_(0, dst, x[src, 1:3].sum(-1, True) * x[dst])


def any_more(self, x, pairs, *more, w=None, **others):
    if more or others:
        raise ValueError("no others are known")
    return torch.zeros_like(x).index_add_(0, pairs[:, 1], x[pairs[:, 0]].relu())


FORWARDS = [columns, rows_of_all_channels, of_the_first_end, turned_back, any_more]


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(17, 8)


def module(forward):
    return type(forward.__name__.title(), (Module,), {"forward": forward})()


@pytest.mark.parametrize("forward", FORWARDS)
def test_forwards(emulated, forward):
    with gnnaccel.enabled(backend="cuda", when="supported"):
        layer, (x, edges, w) = module(forward), tensors("x edge_index w")
        x.requires_grad_()
        more = {"w": w} if forward is any_more else {}
        given = [] if more else [w.requires_grad_()]
        for pairs in (edges.t().contiguous(), edges.t()):
            for _ in range(3):
                assert same(layer, x, pairs, *given, **more)
        pairs = edges.t().contiguous()
        for _ in range(2):
            assert same(layer, x, pairs, *given, **more)
            pairs[3:9] = pairs[3:9].flip(1)  # noticed
        with torch.no_grad():
            assert same(layer, x, pairs, *given, grad=False, **more)
        x, edges, w = tensors("x edge_index w", NODES + 7, EDGES + 30, 5)
        assert same(layer, x, edges.t().contiguous(), *[w][:len(given)])


def test_two_edges_are_not_taken_for_two_ends(emulated):
    layer, x = module(columns), torch.randn(5, 8)
    with gnnaccel.enabled(backend="cuda", when="supported"):
        for pairs in ([[0, 1], [2, 3]], [[0, 1], [2, 3], [4, 0]]):
            same(layer, x, torch.tensor(pairs), torch.rand(len(pairs)))


def test_more_arguments_than_are_named(emulated):
    layer, (x, edges, w) = module(lambda self, x, pairs, **others: others["scale"] * columns(
        self, x, pairs, others["w"])), tensors("x edge_index w")
    with gnnaccel.enabled(backend="cuda", when="supported"):
        assert not same(layer, x, edges.t().contiguous(), w=w, scale=2.0)
        assert codes(layer) == {"GA206"}
