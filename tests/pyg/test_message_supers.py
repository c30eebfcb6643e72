"""Messages that call the methods of the classes above their own."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch_geometric.nn import MessagePassing

from tests.pyg import graphs
from tests.pyg.generated_calls import routes
from tests.pyg.graphs import F as WIDTH
from tests.pyg.judge import close, compare


class Base(MessagePassing):
    factor = 2.0

    def __init__(self):
        super().__init__(aggr="add")
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, w=x.new_ones(edge_index.shape[1]))

    def message(self, x_j, w=None):
        out = self.scaled(self.lin(x_j))
        return out if w is None else w.view(-1, 1) * out

    def scaled(self, out):
        return out * self.factor


class Between(Base):
    """Without a message."""


class Sub(Between):
    def message(self, x_i, x_j, w):
        return super().message(x_j, w) * torch.sigmoid(x_i)


class Named(Between):
    def message(self, x_i, x_j, w):
        return super(Named, self).message(x_j) * torch.sigmoid(x_i)  # noqa: UP008 - as older code


class Explicit(Between):
    def message(self, x_i, x_j, w):
        return Base.message(self, x_j, w=w) * torch.sigmoid(x_i)


class Twice(Sub):
    """With another method, which its base calls."""

    def message(self, x_i, x_j, w):
        return torch.relu(super().message(x_i, x_j, w) + x_i)

    def scaled(self, out):
        return super().scaled(out).abs()


class Stepped(nn.Linear):
    def forward(self, x):
        return torch.tanh(super().forward(x))


class OfModule(Base):
    def __init__(self):
        super().__init__()
        self.lin = Stepped(WIDTH, WIDTH)

    def message(self, x_i, x_j, w):
        return self.lin(x_j * x_i)


class OfHost(Base):
    def message(self, x_i, x_j, w):
        return torch.relu(super(Base, self).message(x_j) - x_i) if False else (
            MessagePassing.message(self, x_j) * torch.tanh(x_i))


@pytest.mark.parametrize("cls", [Sub, Named, Explicit, Twice, OfModule, OfHost])
def test_values_and_gradients(kernels, cls):
    compare(kernels, cls(), graphs.features(), graphs.square())


class ReadsItsClass(Base):
    def message(self, x_i, x_j, w):
        return super().message(x_j, w) * __class__.factor + x_i


class ReadsItsBase(Base):
    def message(self, x_i, x_j, w):
        return Base.message(self, x_j, w) * Base.factor + x_i


class OfAnother(Base):
    """Calls the method with another layer."""

    def __init__(self):
        super().__init__()
        self.other = [Base()]

    def message(self, x_i, x_j, w):
        return Base.message(self.other[0], x_j, w) + x_i


@pytest.mark.parametrize("cls", [ReadsItsClass, ReadsItsBase, OfAnother])
def test_native(emulated, cls):
    layer, x, ei = cls(), graphs.features(), graphs.square()
    expected = layer(x, ei)
    with emulated.on(on_fallback="native"):
        assert close(layer(x, ei), expected)
    assert routes(layer) == {"native": 1}


def halved(self, x_j, w=None):
    return self.lin(x_j) * 0.5


def above(self, x_j, w=None):
    return self.lin(x_j).abs()


@pytest.mark.long
@pytest.mark.parametrize("cls", [Sub, Named, Explicit, Twice])
@pytest.mark.parametrize("change", [
    lambda patch: patch.setattr(Base, "message", halved),
    lambda patch: patch.setattr(Between, "message", above, raising=False),
    lambda patch: patch.setattr(Base.message, "__code__", halved.__code__),
    lambda patch: patch.setattr(Base, "scaled", lambda self, out: out - 1),
    lambda patch: patch.setattr(Base, "factor", 3.0)])
def test_classes_that_change(emulated, monkeypatch, cls, change):
    layer, x, ei = cls(), graphs.features(), graphs.square()
    for _ in range(2):
        expected = copy.deepcopy(layer)(x, ei)
        with emulated.on(on_fallback="native"):
            for _ in range(2):
                assert close(layer(x, ei), expected)
        change(monkeypatch)
