"""Repeated calls of attention that users write: they take a short way, and whatever changes between
two calls is seen."""
from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import MaxAggregation

import gnnaccel
from gnnaccel.adapters.pyg.propagate import attention
from gnnaccel.dispatch.graph import cache
from tests.pyg import graphs
from tests.pyg.graphs import E, F, N
from tests.pyg.own_attention import Apart, Inner, InnerOfEdges, Linear, Scored, Summed, Tutorial
from tests.routes import opened
from tests.staleness import as_native

LAYERS = {one.__name__: one for one in (Tutorial, Scored, Summed, Inner, Linear, Apart,
                                        InnerOfEdges)}
each = pytest.mark.parametrize("name", LAYERS)


class Updated(Tutorial):
    """With rows of the caller's in ``update``, and a scale that `CHANGES` sets."""

    scale = 1.0

    def update(self, inputs):
        return inputs * self.scale


@pytest.fixture
def stated(monkeypatch) -> list:
    """The layers whose calls were stated."""
    found, own = [], attention.OwnAttention.state
    monkeypatch.setattr(attention.OwnAttention, "state", lambda self, layer, *args: (
        found.append(layer) or own(self, layer, *args)))
    return found


def warmed(layer, *more, requires_grad: bool = True) -> tuple:
    """The layer's arguments, after calls that leave whatever a repeated call reuses."""
    args = graphs.features().requires_grad_(requires_grad), graphs.square(), *more
    for _ in range(3):
        layer(*args)
        with torch.no_grad():
            layer(*args)
    return args


def made(name: str) -> tuple:
    layer = LAYERS[name](F, 8)
    more = name in ("Apart", "InnerOfEdges")
    return layer, warmed(layer, *[graphs.edge_features(E, 3).requires_grad_()] * more)


@each
def test_it_is_stated_once(emulated, stated, name):
    with emulated.on():
        layer, args = made(name)
        assert len(stated) == 2  # with gradients, and without
        as_native(layer, args)
        with torch.no_grad():
            as_native(layer, args)
            as_native(layer, (torch.randn_like(args[0]), *args[1:]))
    assert len(stated) == 2
    assert gnnaccel.stats()[name]["routes"] == {"cuda": 12}


@pytest.mark.long
@each
def test_what_has_to_be_stated_anew(emulated, stated, name):
    with emulated.on(on_fallback="native"):
        layer, (x, edge_index, *more) = made(name)
        del stated[:]
        for args in ((x, edge_index.clone(), *more), (x, edge_index.flip(1), *more)):
            as_native(layer, args)
            assert stated.pop() is layer
        edge_index[0, :3] = edge_index[0, 3]
        as_native(layer, (x, edge_index, *more))
        assert stated.pop() is layer
        cache.clear()
        gc.collect()
        as_native(layer, (x, edge_index, *more))
        assert stated.pop() is layer
        layer.double()
        more = [t.detach().double() for t in more]
        as_native(layer, (x.detach().double(), edge_index, *more))
        assert stated.pop() is layer


def twice(self, x_i, x_j, index, ptr, size_i):
    return 2 * x_j


CHANGES = {
    "message of the class": lambda layer, patch: patch.setattr(
        Updated, "message", twice),
    "message of the layer": lambda layer, patch: patch.setattr(
        layer, "__class__", type("Other", (Updated,), {"message": twice})),
    "update": lambda layer, patch: patch.setattr(
        Updated, "update", lambda self, inputs: inputs + 1),
    "what update reads": lambda layer, patch: setattr(layer, "scale", 3.0),
    "what message reads": lambda layer, patch: setattr(layer, "slope", 0.6),
    "a parameter": lambda layer, patch: setattr(
        layer, "att", nn.Parameter(torch.randn_like(layer.att))),
    "a parameter without a gradient": lambda layer, patch: layer.att.requires_grad_(False),
    "all parameters": lambda layer, patch: layer.requires_grad_(False),
    "aggregation": lambda layer, patch: setattr(layer, "aggr_module", MaxAggregation()),
    "hook of messages": lambda layer, patch: layer.register_message_forward_hook(
        lambda module, given, out: 2 * out),
    "hook of the aggregation": lambda layer, patch: layer.aggr_module.register_forward_hook(
        lambda module, given, out: 2 * out),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed(emulated, monkeypatch, change, grad):
    layer = Updated(F, 8)
    with emulated.on(on_fallback="native"), torch.set_grad_enabled(grad):
        args = warmed(layer)
        CHANGES[change](layer, monkeypatch)
        with gnnaccel.disabled():
            expected = layer(*args)
        got = layer(*args)
        assert got.requires_grad == expected.requires_grad
        assert torch.allclose(got, expected, atol=1e-5, rtol=1e-4)
        if grad and change != "all parameters":
            as_native(layer, args)


def test_features_yet_to_be_negated(emulated):
    layer, ei, x = Tutorial(F, 8), graphs.square(), torch.randn(N, 2, 8)
    with emulated.on(on_fallback="native"), torch.no_grad():
        for _ in range(3):
            layer.propagate(ei, x=x)
        expected = layer.propagate(ei, x=-x)
        assert torch.allclose(layer.propagate(ei, x=torch._neg_view(x)), expected, atol=1e-5)


def test_under_autocast(emulated):
    layer, ei, x = Inner(F, 8), graphs.square(), torch.randn(N, 2, 8)
    with emulated.on(on_fallback="native"), torch.no_grad():
        for _ in range(3):
            layer.propagate(ei, q=x, k=x, v=x)
        before = gnnaccel.stats()["Inner"]["routes"]["cuda"]
        with torch.autocast("cpu", torch.bfloat16):
            layer.propagate(ei, q=x, k=x, v=x)
        assert gnnaccel.stats()["Inner"]["routes"] == {"cuda": before, "native": 1}


def test_modes(emulated):
    layer = Tutorial(F, 8, dropout=0.0)
    with emulated.on(on_fallback="native"):
        args = warmed(layer)
        before = layer(*args)
        layer.dropout = 1.0
        assert not layer(*args).any()
        assert torch.equal(layer.eval()(*args), before)
        layer.train().dropout = 0.0
        for reentrant in (False, True):
            out = checkpoint(layer, *args, use_reentrant=reentrant)
            assert torch.allclose(out, before, atol=1e-6)
            out.sum().backward()
        seen = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
            layer(*args)
        assert seen


def test_nodes_that_no_edge_reads(emulated):
    """What is infinite there reaches no gradient, whoever asks for one: features or a weight."""
    layer = Tutorial(F, 8)
    x = torch.randn(N, 2, 8)
    x[-1] = float("inf")
    ei = graphs.square() % (N - 1)

    def gradients():
        layer.zero_grad()
        layer.propagate(ei, x=x).square().sum().backward()
        return layer.att.grad.clone()

    with gnnaccel.disabled():
        expected = gradients()
    with emulated.on():
        for _ in range(3):
            assert torch.allclose(gradients(), expected, atol=1e-4, rtol=1e-3)


def test_results_may_be_changed_in_place(emulated):
    layer = Tutorial(F, 8)
    with emulated.on(), torch.no_grad():
        args = warmed(layer)
        out = layer.propagate(args[1], x=layer.lin(args[0]).view(-1, 2, 8))
        assert not out._is_view()


def test_nothing_of_a_call_is_kept_alive(emulated):
    with emulated.on():
        layer, args = made("Apart")
        kept = [weakref.ref(t) for t in args]
        del args
        gc.collect()
    assert all(ref() is None for ref in kept)


@pytest.mark.long
def test_a_call_that_was_native_runs_by_kernels_where_there_are_some(stated):
    layer, args = Tutorial(F, 8), (graphs.features(), graphs.square(edges=3000))
    expected = layer(*args)
    for _ in range(2):
        gnnaccel.reset_stats()
        with gnnaccel.enabled(backend="cuda"):
            for _ in range(20):
                layer(*args)
            del stated[:]
            assert torch.allclose(layer(*args), expected, atol=1e-5) and not stated
            x = torch.randn_like(args[0])
            assert layer(x, args[1].clone()).shape == expected.shape
        assert gnnaccel.stats()["Tutorial"]["routes"] == {"native": 22}
        with opened("emulated") as route, route.on():
            for _ in range(3):
                assert torch.allclose(layer(*args), expected, atol=1e-5)
            assert gnnaccel.stats()["Tutorial"]["routes"]["cuda"] == 3
