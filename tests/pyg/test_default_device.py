"""`torch.set_default_device` moves what a script makes, nothing of what gnnaccel makes."""
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
    out = leaves(layer(*inputs))
    wanted = [p for p in layer.parameters() if p.requires_grad]
    grads = (torch.autograd.grad(sum(t.sum() for t in out), wanted, allow_unused=True)
             if wanted else ())
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
