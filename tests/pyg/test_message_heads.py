"""Messages that go through a list of modules: comprehensions, loops, and sums of what these make."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.utils import softmax

from tests.pyg import graphs
from tests.pyg.generated_calls import both, routes
from tests.pyg.generated_layers import WIDTH, Message
from tests.pyg.judge import compare
from tests.pyg.test_generated_changes import each_seen, hooked

SCALE = 0.7


def bent(rows):
    return torch.tanh(rows) * SCALE


class Heads(Message):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 5) for _ in range(3))
        self.scores = nn.ModuleList(nn.Linear(10, 1) for _ in range(3))
        self.slope = 0.2

    def message(self, x_i, x_j):
        return torch.cat([self.gated(bent(f(x_j)) * f(x_i)) for f in self.heads], -1)

    def gated(self, rows):
        return F.leaky_relu(rows, self.slope)


class Copied(Heads):
    def message(self, x_j):
        return torch.cat([f(x_j) for f in self.heads], dim=1)


class Summed(Heads):
    def message(self, x_i, x_j):
        return sum(torch.tanh(f(x_j * x_i)) for f in self.heads) / len(self.heads)


class Stacked(Heads):
    def message(self, x_i, x_j):
        return torch.stack([f(x_j).relu() * f(x_i) for f in self.heads], 0).mean(0)


class StackedBetween(Heads):
    def message(self, x_i, x_j):
        return torch.stack([f(x_j).relu() * f(x_i) for f in self.heads], dim=-2).sum(dim=1)


class Looped(Heads):
    def message(self, x_i, x_j):
        out = []
        for f in self.heads:
            out.append(torch.sigmoid(f(x_j) - f(x_i)))
        return torch.cat(out, -1)


class Some(Heads):
    def message(self, x_i, x_j):
        return torch.cat([torch.tanh(f(x_j) * f(x_i)) for k, f in enumerate(self.heads)
                          if k != 1], -1)


class Attending(Heads):
    def message(self, x_i, x_j, index, size_i):
        return torch.cat([
            f(x_j) * softmax(F.leaky_relu(a(torch.cat([f(x_i), f(x_j)], -1)), self.slope), index,
                             num_nodes=size_i)
            for f, a in zip(self.heads, self.scores)], -1)


def given() -> list[torch.Tensor]:
    return [graphs.features(), graphs.square()]


class Like(Heads):
    """Views in the shape of other rows, and weights that a convolution makes of heads."""

    def __init__(self):
        super().__init__()
        self.mixed = nn.Conv1d(8, 4, 1)

    def message(self, x_i, x_j, index):
        key = x_j.view(x_j.size(0), 4, 3)
        query = x_i.view_as(key)
        weights = torch.softmax(self.mixed(torch.cat([query, key], dim=1)), dim=1)
        scores = softmax((query * key).sum(-1).mean(-1), index)
        return weights.reshape_as(x_j) * torch.relu(x_i.reshape_as(x_j)) * scores.view(-1, 1)


class Inner(Heads):
    """A function in the message."""

    def message(self, x_i, x_j):
        def one(f):
            return f(x_j) * f(x_i)

        return torch.cat([one(f) for f in self.heads], -1)


@pytest.mark.long
@pytest.mark.parametrize("cls", [Heads, Copied, Summed, Stacked, StackedBetween, Looped, Some,
                                 Like, Attending, Inner])
def test_values_and_gradients(kernels, cls):
    compare(kernels, cls(), *given())


def test_what_changes_between_calls(kernels):
    layer, device = Heads(), kernels.device

    def other():
        layer.heads[1] = nn.Linear(WIDTH, 5, bias=False).to(device)

    each_seen(kernels, layer, *given(), changes=(
        lambda: setattr(layer, "slope", 0.5), other,
        lambda: layer.heads.append(nn.Linear(WIDTH, 5).to(device)),
        lambda: layer.heads.__delitem__(0),
        lambda: layer.heads.__setitem__(0, nn.Sequential(nn.Linear(WIDTH, 5), nn.ReLU()).to(
            device)),
        lambda: hooked(layer.heads[1])()), taken="native")


@pytest.mark.long
def test_globals_of_a_comprehension(kernels, monkeypatch):
    import tests.pyg.test_message_heads as here

    each_seen(kernels, Heads(), *given(), changes=(
        lambda: monkeypatch.setattr(here, "SCALE", 3.0),
        lambda: monkeypatch.setattr(here, "bent", lambda rows: rows.sigmoid())))
    each_seen(kernels, Summed(), *given(), changes=(
        lambda: monkeypatch.setattr(torch, "tanh", lambda rows: rows * 2),), taken="native")


class Asking(Heads):
    def message(self, x_i, x_j, size_i):
        return torch.cat([f(x_j * x_i) if size_i is None else f(x_j * x_i).relu()
                          for f in self.heads], -1)


class OverRows(Heads):
    """The sum over all edges."""

    def message(self, x_i, x_j):
        return sum(x_j) * torch.tanh(x_i)


class Keeping(Heads):
    """A generator that outlives the call."""

    def message(self, x_i, x_j):
        self.kept = (f(x_j) for f in self.heads)
        return torch.tanh(x_i * x_j)


class KeepingList(Heads):
    def message(self, x_i, x_j):
        self.kept = []
        self.kept.append(torch.tanh(x_i * x_j))
        return self.kept[0]


class OtherDimension(Heads):
    def message(self, x_i, x_j):
        return torch.stack([f(x_j).relu() * f(x_i) for f in self.heads], 1).mean(-1)


@pytest.mark.parametrize("cls", [Asking, OtherDimension])
def test_other_ways_to_read_heads(kernels, cls):
    layer = cls()
    both(kernels, layer, *given())
    assert routes(layer) == {"cuda": 1}


@pytest.mark.parametrize("cls", [OverRows, Keeping, KeepingList])
def test_native(kernels, cls):
    layer = cls()
    both(kernels, layer, *given(), on_fallback="native")
    assert routes(layer) == {"native": 1}
    if hasattr(layer, "kept"):
        assert len(list(layer.kept)) in (1, 3)
