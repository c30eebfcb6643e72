"""Values per node in pieces, and cells and norms of torch that they go through."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import gnnaccel
from tests.plain.held import same
from tests.plain.test_layers import EDGES, NODES, tensors


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.gates = nn.Linear(8, 24), nn.Linear(8, 16)
        self.gru, self.lstm, self.norm = nn.GRUCell(8, 8), nn.LSTMCell(8, 8), nn.BatchNorm1d(8)


class Attention(Base):
    """Queries, keys and values of one map; gates of what was summed."""

    def forward(self, x, edge_index, w):
        src, dst = edge_index
        query, key, value = torch.split(self.wide(x), [8, 8, 8], dim=-1)
        weight = (query[dst] * key[src]).sum(-1, keepdim=True).tanh() * w[:, None]
        total = torch.zeros_like(x).index_add_(0, dst, weight * value[src])
        gate, more = self.gates(total).chunk(2, 1)
        return gate * x + more, gate


class Heads(Base):
    def forward(self, x, edge_index, w):
        src, dst = edge_index
        first, last = x.view(-1, 2, 4).unbind(1)
        total = torch.zeros_like(first).index_add_(0, dst, (first * last)[src] * w[:, None])
        return torch.cat([*total.split(2, dim=1)][::-1], dim=1) + last


class Gated(Base):
    """Rounds of a gated graph network (GGNN)."""

    def forward(self, x, edge_index, w):
        src, dst = edge_index
        for _ in range(2):
            total = torch.zeros_like(x).index_add_(0, dst, x[src] * w[:, None])
            x = self.gru(total, x)
        return x


class Remembering(Base):
    """Rounds with two states (NeuroSAT)."""

    def forward(self, x, edge_index, w):
        src, dst = edge_index
        state = (x, x * 0.5)
        for _ in range(2):
            total = torch.zeros_like(x).index_add_(0, dst, state[0][src] * w[:, None])
            state = self.lstm(total, state)
        return state


class Normed(Base):
    def forward(self, x, edge_index, w):
        src, dst = edge_index
        h = self.norm(x)
        return self.norm(torch.zeros_like(h).index_add_(0, dst, h[src] * w[:, None])) + x


FORMS = [Attention, Heads, Gated, Remembering, Normed]


@pytest.fixture
def taken(emulated):
    with gnnaccel.enabled(backend="cuda", when="supported"):
        yield


def given(nodes=NODES, edges=EDGES, seed=0):
    x, ei, w = tensors("x edge_index w", nodes, edges, seed)
    return x.requires_grad_(), ei, w.requires_grad_()


@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients(taken, form):
    torch.manual_seed(0)
    layer = form()
    for _ in range(2):
        assert same(layer, *given())
    assert same(layer.eval(), *given(NODES + 7, EDGES + 30, 5))
    with torch.no_grad():
        assert same(layer, *given(), grad=False)
        for t in (*layer.parameters(), *layer.buffers()):
            if t.is_floating_point():
                t.mul_(1.1)
    assert same(layer, *given())


@pytest.mark.parametrize("form, name", [(Gated, "gru"), (Remembering, "lstm"), (Normed, "norm")])
def test_other_modules(taken, form, name):
    layer = form().eval()
    assert same(layer, *given())
    setattr(layer, name, getattr(form(), name).eval())
    assert same(layer, *given())
    seen = []
    getattr(layer, name).register_forward_hook(lambda *args: seen.append(1))
    assert not same(layer, *given()) and len(seen) == 4


class OverNodes(Base):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, edge_index, w):
        src, dst = edge_index
        total = torch.zeros_like(x).index_add_(0, dst, x[src] * w[:, None])
        return self.function(total)


@pytest.mark.parametrize("function", [
    lambda t: t.chunk(2)[0], lambda t: torch.split(t, 5, 0)[0], lambda t: t.unbind(0)[0],
    lambda t: t.split(20, dim=-2)[0], lambda t: t.t().chunk(2, 1)[0]])
def test_pieces_of_the_nodes_are_not_followed(taken, function):
    assert not same(OverNodes(function), *given())


class InMessages(Base):
    def forward(self, x, edge_index, w):
        src, dst = edge_index
        h, c = self.lstm(x[src], (x[dst], x[src]))
        return torch.zeros_like(x).index_add_(0, dst, h * c)


def test_memory_at_the_edges_is_not_followed(taken):
    assert not same(InMessages(), *given())
