"""`torch.set_default_device` and `torch.set_default_dtype` say of what a script makes, nothing of what
gnnaccel makes."""
from __future__ import annotations

import pytest
import torch
from torch_geometric.nn.conv import gcn_conv
from torch_geometric.nn.models import LabelPropagation

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


@pytest.mark.long
def test_what_is_kept_is_of_the_default_dtype(route):
    """GCN's normalisation of edges alone is of the default dtype where no other is given: PyG's
    `LabelPropagation` gives none."""
    edge_index = torch.randint(7, (2, 30)).to(route.device)
    label, model = torch.arange(7, device=route.device) % 3, LabelPropagation(3, 0.8)
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            expected = gcn_conv.gcn_norm(edge_index, None, 7)[1], model(label, edge_index)
            with gnnaccel.enabled(backend=route.backend):
                for _ in range(3):  # kept from the second on
                    found = gcn_conv.gcn_norm(edge_index, None, 7)[1], model(label, edge_index)
                    for one, two in zip(found, expected):
                        assert one.dtype is two.dtype and torch.allclose(one, two, atol=1e-6)
        finally:
            torch.set_default_dtype(torch.float32)
