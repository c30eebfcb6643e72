"""Messages that turn gradients off for a part: none of it, parameters neither, gets one."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch_geometric.nn import MessagePassing

import gnnaccel
from tests.pyg import graphs
from tests.pyg.judge import close


class Conv(MessagePassing):
    def __init__(self):
        super().__init__(aggr="add")
        self.lin, self.scale = nn.Linear(graphs.F, graphs.F), nn.Parameter(torch.rand(graphs.F))
        self.att, self.table = nn.Linear(2 * graphs.F, 1), nn.Embedding(3, graphs.F)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)


class OfParameters(Conv):
    def message(self, x_i, x_j):
        with torch.no_grad():
            scale, weight = torch.sigmoid(self.scale), self.lin.weight / 2
            row = torch.cat([self.table.weight.mean(0)[:6], self.scale[6:]])
        return nn.functional.linear(x_i * x_j, weight).tanh() * scale + row


class OfAMethod(Conv):
    def message(self, x_j):
        return x_j.tanh() * self.weights() * self.scale

    def weights(self):
        with torch.no_grad():
            return self.scale.softmax(0)


class SideBySide(Conv):
    def message(self, x_i, x_j):
        with torch.no_grad():
            both = torch.cat([x_i, x_j], -1)
            pile = torch.stack([x_i, x_j], 1)
        return self.att(both) * x_j + pile.sum(1).tanh()


class FirstWithout(Conv):
    """What is laid side by side before is asked for without gradients first."""

    def message(self, x_i, x_j):
        both = torch.cat([x_i.tanh(), x_i * 2], -1)
        with torch.no_grad():
            length = both.norm(dim=-1, keepdim=True)
        return self.att(both) * x_j / length


class Decorated(Conv):
    """A method, and a function, under ``no_grad``."""

    def message(self, x_i, x_j):
        return self.gate(x_i, x_j) * self.lin(x_j) * squared(x_i) + self.other()

    @torch.no_grad()
    def gate(self, x_i, x_j):
        return self.att(torch.cat([x_i, x_j], -1)).sigmoid()

    @torch.no_grad
    def other(self):
        with torch.enable_grad():
            return self.scale * 2


@torch.no_grad()
def squared(rows):
    return rows.tanh() ** 2


class AsItIs(Conv):
    """Nothing is made where torch gives the tensor itself."""

    def message(self, x_i, x_j):
        with torch.no_grad():
            rows, scale = x_j.contiguous(), self.scale.to(torch.float32)
        return rows * x_i * scale


class OfNodes(nn.Module):
    """Of a plain module."""

    def __init__(self):
        super().__init__()
        self.lin, self.scale = nn.Linear(graphs.F, graphs.F), nn.Parameter(torch.rand(graphs.F))

    def forward(self, x, edge_index):
        row, col = edge_index
        h = self.lin(x)
        with torch.no_grad():
            before = torch.zeros_like(h).index_add_(0, col, h[row] * self.scale.exp())
            both = torch.cat([h, x], -1).sum(-1, keepdim=True)
        out = torch.zeros_like(h).index_add_(0, col, h[row] * h[col].tanh())
        return out * both + before


CLASSES = [OfParameters, OfAMethod, SideBySide, FirstWithout, Decorated, AsItIs, OfNodes]


@pytest.mark.parametrize("cls", CLASSES)
def test_gradients(kernels, cls):
    layer = cls().to(kernels.device)
    x, edges = graphs.features().to(kernels.device), graphs.square().to(kernels.device)

    def results():
        given = x.clone().requires_grad_()
        out = layer(given, edges)
        return [out, *torch.autograd.grad(out.sin().sum(), [given, *layer.parameters()],
                                          allow_unused=True)]

    expected = results()
    with kernels.on():
        for _ in range(2):
            found = results()
            assert [one is None for one in found] == [one is None for one in expected]
            for one, other in zip(found, expected):
                assert one is None or close(one, other, 1e-4)


class Enabled(Conv):
    def message(self, x_i, x_j):
        with torch.enable_grad():
            return self.lin(x_i * x_j)


@pytest.mark.long
def test_gradients_turned_on(emulated):
    """Where the caller's are off, the host records what is inside all the same."""
    layer, x, edges = Enabled(), graphs.features(), graphs.square()
    for grad in (True, False, True):
        with torch.set_grad_enabled(grad):
            expected = layer(x, edges)
            gnnaccel.reset_stats()
            with emulated.on(on_fallback="native"):
                found = layer(x, edges)
        assert close(found, expected) and found.requires_grad is expected.requires_grad
        assert gnnaccel.stats()["Enabled"]["routes"] == {"cuda" if grad else "native": 1}


@pytest.mark.long
def test_a_decorated_method_is_replaced(emulated, monkeypatch):
    layer, x, edges = Decorated(), graphs.features(), graphs.square()
    with emulated.on():
        before = layer(x, edges)
    monkeypatch.setattr(Decorated, "gate", torch.no_grad()(lambda self, x_i, x_j: x_i - x_j))
    expected = layer(x, edges)
    assert not close(before, expected)
    with emulated.on(on_fallback="native"):
        assert close(layer(x, edges), expected)
