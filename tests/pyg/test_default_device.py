"""`torch.set_default_device` and `torch.set_default_dtype` say of what a script makes, nothing of what
gnnaccel makes."""
from __future__ import annotations

import pytest
import torch

import gnnaccel
from gnnaccel.dispatch.graph import cache
from tests.pyg.every import CALLS, leaves, made, moved


def results(layer, inputs) -> list[torch.Tensor]:
    """Two calls over the graph, the second with gradients."""
    with torch.no_grad():
        first = leaves(layer(*inputs))
    given = [t for value in inputs for t in leaves(value) if t.is_floating_point()]
    wanted = [t.requires_grad_() for t in (*layer.parameters(), *given)]
    out = leaves(layer(*inputs))
    grads = torch.autograd.grad(sum(t.sum() for t in out), wanted, allow_unused=True)
    return [*first, *out, *grads]


@pytest.mark.parametrize("name", list(CALLS))
def test_layers(route, name):
    """The meta device computes nothing, so whatever landed there would fail or come out without
    numbers."""
    layer, inputs = made(name)
    layer, inputs = layer.to(route.device), tuple(moved(value, route.device) for value in inputs)
    with route.on(on_fallback="native"):
        expected = results(layer, inputs)
        routes = gnnaccel.stats()
        gnnaccel.reset_stats()
        cache.clear()
        with torch.device("meta"):
            got = results(layer, inputs)
        assert gnnaccel.stats() == routes
    for a, b in zip(got, expected):
        assert (a is None) is (b is None) and (a is None
                                               or torch.allclose(a, b, rtol=1e-4, atol=1e-6))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", list(CALLS))
def test_layers_under_another_default_dtype(route, name, dtype):
    """`torch.set_default_dtype` says of which dtype the layers are that a script makes afterwards,
    nothing of these."""
    layer, inputs = made(name)
    layer, inputs = layer.to(route.device), tuple(moved(value, route.device) for value in inputs)
    torch.set_default_dtype(dtype)
    try:
        expected = results(layer, inputs)
        with route.on(on_fallback="native"):
            got = results(layer, inputs)
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(got, expected):
        assert (a is None) is (b is None)
        assert a is None or a.dtype == b.dtype
        assert a is None or torch.allclose(a, b, rtol=1e-4, atol=1e-5)
