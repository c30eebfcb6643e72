"""Messages that call functions of which some arguments are given before, or that define some."""
from __future__ import annotations

import functools
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

from tests.pyg import graphs
from tests.pyg.generated_calls import both, routes
from tests.pyg.generated_layers import Message
from tests.pyg.graphs import F as WIDTH
from tests.pyg.judge import close, compare
from tests.pyg.test_generated_changes import each_seen

HERE = sys.modules[__name__]


def gate(a, b, power=1, *, by=1.0):
    return torch.sigmoid((a + b) / by) ** power * b


halved = functools.partial(gate, by=2.0)


class Conv(MessagePassing):
    def __init__(self, act=None):
        super().__init__(aggr="add")
        self.act = act

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return self.act(x_j - x_i)


class Global(Conv):
    def message(self, x_i, x_j):
        return halved(x_i, x_j, power=2)


class Listed(Conv):
    def __init__(self):
        super().__init__([functools.partial(F.elu, alpha=0.7), functools.partial(gate, by=3.0)])

    def message(self, x_i, x_j):
        return self.act[1](self.act[0](x_i), x_j)


CASES = [lambda: Conv(functools.partial(F.leaky_relu, negative_slope=0.3)), Global, Listed,
         lambda: Conv(functools.partial(torch.mul, nn.Parameter(torch.randn(WIDTH)))),
         lambda: Conv(functools.partial(gate, 0.5, power=2))]


@pytest.mark.parametrize("make", CASES)
def test_values_and_gradients(kernels, make):
    with kernels.device:  # what a partial holds is moved by nobody
        layer = make()
    compare(kernels, layer, graphs.features(), graphs.square())


@pytest.mark.parametrize("act, route", [
    (functools.partial(torch.dropout, p=0.5, train=True), "cuda"),  # the host's random numbers
    (functools.partial(torch.alpha_dropout, p=0.5, train=True), "native"),
    (functools.partial(nn.Tanh().forward), "native")])
def test_routes(emulated, act, route):
    layer, x, ei = Conv(act), graphs.features(), graphs.square()
    torch.manual_seed(0)
    expected = layer(x, ei)
    torch.manual_seed(0)
    with emulated.on(on_fallback="native"):
        assert close(layer(x, ei), expected)
    assert routes(layer) == {route: 1}


def new_keyword(layer, patch):
    layer.act.keywords["by"] = 5.0


def another(layer, patch):
    layer.act = functools.partial(gate, 0.7)


def another_code(layer, patch):
    patch.setattr(gate, "__code__", (lambda a, b, power=1, *, by=1.0: a * b).__code__)


@pytest.mark.parametrize("change", [new_keyword, another, another_code])
def test_functions_that_change(emulated, monkeypatch, change):
    layer, x, ei = Conv(functools.partial(gate, 0.5, by=2.0)), graphs.features(), graphs.square()
    for _ in range(2):
        expected = layer(x, ei)
        with emulated.on():
            for _ in range(2):
                assert close(layer(x, ei), expected)
        change(layer, monkeypatch)


def test_a_global_function_that_changes(emulated, monkeypatch):
    layer, x, ei = Global(), graphs.features(), graphs.square()
    for by in (2.0, 3.0):
        monkeypatch.setattr(HERE, "halved", functools.partial(gate, by=by))
        expected = layer(x, ei)
        with emulated.on():
            assert close(layer(x, ei), expected)


def pairs_added(*args):
    return tuple(map(sum, zip(*args)))


class Inside(Message):
    """A function that the message defines, with a variable around it; `map`, `max` and `abs`."""

    def __init__(self):
        super().__init__()
        self.heads, self.shift = 3, -0.5

    def message(self, x_i, x_j, index):
        width = max(x_j.size(-1) // self.heads, 1)

        def apart(x):
            x = x.view(-1, self.heads, width)
            return x, x.abs().sum(-1, keepdim=True)

        rows, norms = pairs_added(apart(x_i), apart(x_j))
        weight = (lambda t: torch.tanh(t + abs(self.shift)))(norms)
        return (softmax(weight, index) * rows).flatten(1)


class AsksInside(Message):
    """One that asks what a stand-in cannot tell: whether edges are sorted."""

    def message(self, x_j, index, ptr):
        def told(one):
            return one is None

        return softmax(x_j, index, ptr) * (1.0 if told(ptr) else 2.0)


class CatchesInside(Message):
    def message(self, x_j):
        def half(x):
            try:
                return x.storage_offset() + 0.5 * x
            except Exception:
                return 7.0 * x

        return half(x_j)


def counting():
    count = 0

    class Counts(Message):
        def message(self, x_j):
            def seen():
                nonlocal count
                count += 1
                return count

            return x_j * seen()

    return Counts(), lambda: count


def counting_itself():
    count = 0

    class CountsItself(Message):
        def message(self, x_j):
            nonlocal count
            count += 1
            return x_j * count

    return CountsItself(), lambda: count


@pytest.mark.parametrize("make", [counting, counting_itself])
def test_variables_around_are_written_once_a_call(emulated, make):
    layer, count = make()
    x, ei = graphs.features(), graphs.square()
    once = torch.zeros_like(x).index_add(0, ei[1], x[ei[0]])
    with emulated.on(on_fallback="native"):
        for calls in range(1, 4):
            assert close(layer(x, ei), calls * once) and count() == calls


@pytest.mark.long
def test_functions_that_a_message_defines(kernels):
    layer, given = Inside(), (graphs.features(), graphs.square())
    compare(kernels, layer, *given)
    each_seen(kernels, layer, *given, changes=(lambda: setattr(layer, "shift", 0.25),
                                               lambda: setattr(layer, "heads", 2)))
    for one in (AsksInside(), CatchesInside()):
        both(kernels, one, *given, on_fallback="native")
        assert routes(one) == {"native": 1}
