"""An ``aggregate`` of the user's own: what changes between calls is seen."""
from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
import torch_geometric
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import MeanAggregation
from torch_geometric.utils import scatter

import gnnaccel
from tests.pyg import aggregating_layers, graphs
from tests.pyg.aggregating_layers import BySuper, ByModule, Extremes, Pair, Quotient, Scattered
from tests.pyg.generated_calls import routes
from tests.pyg.generated_layers import Message
from tests.pyg.graphs import N
from tests.pyg.judge import close, compare
from tests.pyg.test_aggregates import given
from tests.pyg.test_generated_changes import each_seen, hooked


def test_numbers_and_modules_of_the_layer(kernels):
    layer = BySuper()

    def write():
        with torch.no_grad():
            layer.scale.mul_(0.3)
            layer.lin.weight.mul_(2.0)

    each_seen(kernels, layer, *given(BySuper), changes=(
        lambda: setattr(layer, "slope", 0.5), layer.eval, write, layer.train, write,
        lambda: setattr(layer, "scale", nn.Parameter(torch.randn_like(layer.scale))),
        lambda: setattr(layer, "lin", nn.Linear(12, 12, False).to(kernels.device)),
        lambda: setattr(layer, "aggr_module", MeanAggregation()),
        lambda: setattr(layer, "aggr_module", torch_geometric.nn.aggr.MinAggregation())))


SEEN = []


def noted(results, seen=[], *, options={"scale": 2.0}):  # noqa: B006 - as users write it
    seen.append(1)
    return results * options["scale"] * len(seen)


def scaled(x, options={"scale": 2.0}):  # noqa: B006 - as users write it
    return x * options["scale"]


class Scaled(Scattered):
    def message(self, x_i, x_j):
        return scaled(torch.tanh(x_i * x_j))


class ToHelper(Scattered):
    """Adds to a list that a function has as long as it lives."""

    def aggregate(self, inputs, index, dim_size):
        return noted(scatter(inputs, index, 0, dim_size))


class ToLayer(Scattered):
    def __init__(self):
        super().__init__()
        self.seen = []

    def aggregate(self, inputs, index, dim_size):
        self.seen.append(1)
        return scatter(inputs, index, 0, dim_size) * len(self.seen)


class ToModule(Scattered):
    def aggregate(self, inputs, index, dim_size):
        SEEN.append(1)
        return scatter(inputs, index, 0, dim_size) * len(SEEN)


def test_what_a_function_has_by_default(kernels, monkeypatch):
    """A dictionary may have other things in each call."""
    layer = Scaled().to(kernels.device)
    args = [one.to(kernels.device) for one in given(Scaled)]
    for scale in (2.0, 3.0, 2.0):
        monkeypatch.setitem(scaled.__defaults__[0], "scale", scale)
        expected = layer(*args)
        with kernels.on(on_fallback="native"):
            assert close(layer(*args), expected)


@pytest.mark.parametrize("form", [ToHelper, ToLayer, ToModule])
def test_lists_that_outlive_a_call(kernels, form):
    """Only lists of the function itself may be added to: each call adds to the others once."""
    def calls(block):
        for one in (SEEN, noted.__defaults__[0]):
            one.clear()
        layer = form().to(kernels.device)
        args = [one.to(kernels.device) for one in given(form)]
        with block:
            return [layer(*args) for _ in range(3)]

    torch.manual_seed(0)
    expected = calls(gnnaccel.disabled())
    torch.manual_seed(0)
    assert all(map(close, calls(kernels.on(on_fallback="native")), expected))


def test_the_reduction(kernels):
    layer = Scattered()
    each_seen(kernels, layer, *given(Scattered), changes=(
        lambda: setattr(layer, "reduce", "max"), lambda: setattr(layer, "reduce", "mean"),
        lambda: setattr(layer, "reduce", "mul")), taken="native")


def test_an_aggregation_within_another(kernels):
    """It is not seen when one within is replaced."""
    layer = BySuper(["mean"]).to(kernels.device)
    args = [t.to(kernels.device) for t in given(BySuper)]
    expected = layer(*args)
    with kernels.on(on_fallback="native"):
        assert close(layer(*args), expected)
    assert routes(layer) == {"native": 1}


def test_a_sum_by_torch_operations(route):
    layer = Scattered()
    each = [lambda: None, lambda: setattr(layer, "reduce", "mean"),
            lambda: setattr(layer, "node_dim", 0)]
    layer, args = layer.to(route.device), [t.to(route.device) for t in given(Scattered)]
    with route.on():
        for change in each:
            change()
            with gnnaccel.disabled():
                expected = layer(*args)
            assert close(layer(*args), expected)


def test_a_global_number(kernels, monkeypatch):
    layer = Quotient()
    each_seen(kernels, layer, *given(Quotient), changes=(
        lambda: monkeypatch.setattr(aggregating_layers, "SMALL", 3.0),))


@pytest.mark.long
def test_functions_that_are_replaced(kernels, monkeypatch):
    def other(inputs, index, dim=0, dim_size=None, reduce="sum"):
        return inputs.new_full((dim_size, inputs.shape[1]), 7.0)

    for cls, place, name, value in (
        (Quotient, aggregating_layers, "scatter", other), (Extremes, aggregating_layers, "scatter",
                                                           other),
        (BySuper, F, "leaky_relu", lambda x, slope: x * slope),
        (BySuper, MessagePassing, "aggregate", lambda self, inputs, index, ptr, dim_size:
         other(inputs, index, 0, dim_size)),
        (BySuper, Message, "aggregate", lambda self, inputs, index, ptr, dim_size:
         other(inputs, index, 0, dim_size)),
        (Scattered, Scattered, "aggregate", lambda self, inputs, index, dim_size:
         other(inputs, index, 0, dim_size))):
        with monkeypatch.context() as change:
            each_seen(kernels, cls(), *given(cls), changes=(
                lambda: change.setattr(place, name, value, raising=False),), taken="native")


def test_a_function_of_a_module_that_is_replaced(kernels):
    layer, before = aggregating_layers.Statistics(), torch_geometric.utils.scatter
    try:
        each_seen(kernels, layer, *given(type(layer)), changes=(lambda: setattr(
            torch_geometric.utils, "scatter",
            lambda inputs, index, dim, reduce: inputs.new_ones(N, 12)),),
            taken="native")
    finally:  # not what it was while gnnaccel was enabled, as monkeypatch would
        torch_geometric.utils.scatter = before


@pytest.mark.long
@pytest.mark.parametrize("cls", [ByModule, BySuper])
def test_hooks(kernels, cls):
    """On the aggregation, and on the aggregate."""
    layer = cls()
    each_seen(kernels, layer, *given(cls), changes=(hooked(layer.aggr_module),), taken="native")
    layer = cls()
    each_seen(kernels, layer, *given(cls), changes=(
        lambda: layer.register_aggregate_forward_hook(lambda module, args, out: out * 2),),
        taken="native")
    layer = cls()
    each_seen(kernels, layer, *given(cls), changes=(
        lambda: setattr(layer, "aggregate", lambda inputs, index, ptr, dim_size: inputs.new_ones(
            N, 12)),), taken="native")


@pytest.mark.long
def test_other_graphs_and_edges_in_place(kernels):
    for cls in (Scattered, Quotient, Pair):
        layer, (x, ei, edge) = cls().to(kernels.device), (t.to(kernels.device) for t in given(cls))
        with kernels.on():
            for change in (lambda: None, lambda: ei[1].fill_(4), lambda: ei.copy_(other)):
                other = graphs.square().to(kernels.device)
                change()
                for edges in (ei, other, ei[:, :50]):
                    with gnnaccel.disabled():
                        expected = layer(x, edges, edge[:edges.shape[1]])
                    assert close(layer(x, edges, edge[:edges.shape[1]]), expected)


def test_small_calls_are_not_read(kernels, monkeypatch):
    from gnnaccel.adapters.pyg.propagate import aggregates

    monkeypatch.setattr(aggregates, "read", None)
    layer, args = Quotient().to(kernels.device), [t.to(kernels.device) for t in given(Quotient)]
    expected = layer(*args)
    with gnnaccel.enabled(backend="cuda"):
        assert torch.allclose(layer(*args), expected, 1e-5, 1e-5)
    assert routes(layer) == {"native": 1}


@pytest.mark.long
def test_nothing_holds_a_layer(kernels):
    for cls in (BySuper, Quotient, ByModule):
        layer, args = cls().to(kernels.device), [t.to(kernels.device) for t in given(cls)]
        with kernels.on():
            layer(*args)
        gone = weakref.ref(layer)
        del layer
        gc.collect()
        assert gone() is None


def test_explained_and_compared(kernels):
    layer, args = Quotient().to(kernels.device), [t.to(kernels.device) for t in given(Quotient)]
    with kernels.on():
        words = str(gnnaccel.explain(layer, *args)).split()  # lines end where the terminal does
    assert {"generated", "message", "sigmoid(((i0"} <= set(words)
    with kernels.on():
        found = str(gnnaccel.compare(layer, *args))
    assert "same" in found


class Bounded(MessagePassing):
    """Names functions of torch and of `math`."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j * math.sqrt(2.0)

    def aggregate(self, inputs, index, dim_size=None):
        return F.relu(scatter(inputs, index, 0, dim_size, "mean")) * math.sqrt(3.0)


@pytest.mark.parametrize(("place", "name", "other"), [
    (F, "relu", F.elu), (math, "sqrt", lambda number: number)])
def test_a_function_that_is_replaced_between_calls(route, monkeypatch, place, name, other):
    layer = Bounded()
    args = graphs.features().to(route.device), graphs.square().to(route.device)
    expected = layer(*args)
    with route.on(on_fallback="native"):
        assert close(layer(*args), expected)
        monkeypatch.setattr(place, name, other)
        got = layer(*args)
        with gnnaccel.disabled():
            changed = layer(*args)
    assert not close(changed, expected) and close(got, changed)


class ChangesInMessage(Message):
    """PyG gives the aggregate the very rows that the message got."""

    def __init__(self, view: bool):
        super().__init__()
        self.act, self.view = nn.LeakyReLU(0.3, inplace=True), view

    def message(self, x_j):
        self.act(x_j.view(-1, 4, 3) if self.view else x_j)
        return 2.0 * torch.ones_like(x_j[:, :1])

    def aggregate(self, inputs, index, dim_size, x_j):
        return scatter(inputs / (1.0 + x_j.abs()), index, 0, dim_size)


@pytest.mark.parametrize("view", [False, True])
def test_what_the_message_changed_in_place(kernels, view):
    layer, (x, ei, _) = ChangesInMessage(view).to(kernels.device), given(Scattered)
    x, ei = x.to(kernels.device), ei.to(kernels.device)
    expected = layer(x, ei)
    with kernels.on(on_fallback="native"):
        assert close(layer(x, ei), expected)


class Viewed(Message):
    """A value per node of which there is a view when it is written over: not followed."""

    def message(self, x_j):
        return x_j

    def aggregate(self, inputs, index, dim_size):
        out = scatter(inputs, index, 0, dim_size)
        flat = out.view(-1, 3, 4)
        out[out < 0.0] = 0.25
        return flat


class Gathered(Message):
    """One that goes back to the edges before it is written over."""

    def message(self, x_j, index, dim_size):
        deg = torch_geometric.utils.degree(index, dim_size, dtype=x_j.dtype)
        before = deg[index]
        deg[deg > 1] = 0.5
        return (before + 2.0 * deg[index]).view(-1, 1) * x_j


def test_what_is_written_over_later(kernels):
    compare(kernels, Gathered(), *given(Gathered))
    layer = Viewed()
    args = [one.to(kernels.device) for one in given(Viewed)]
    expected = layer(*args)
    with kernels.on(on_fallback="native"):
        assert close(layer(*args), expected)
