"""A call with gnnaccel held against the same call without."""
from __future__ import annotations

import torch
from torch import Tensor

import gnnaccel


def tensors_of(value):
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for one in value for t in tensors_of(one)]
    return []


def results(layer, args, kwargs, grad=True):
    """Outputs, and gradients of all floating arguments and parameters."""
    wants = [t for t in (*tensors_of(args), *tensors_of(list(kwargs.values())),
                         *layer.parameters()) if t.is_floating_point() and t.requires_grad]
    out = tensors_of(layer(*args, **kwargs))
    if not grad or not wants or not any(t.requires_grad for t in out):
        return out
    torch.manual_seed(1)
    loss = sum((t * torch.randn_like(t)).sum() for t in out if t.requires_grad)
    return out + list(torch.autograd.grad(loss, wants, allow_unused=True))


def same(layer, *args, grad=True, seed=0, limit=2e-4, **kwargs):
    """Assert that results and gradients are those of the module as it is written; whether it ran
    by kernels."""
    torch.manual_seed(seed)
    with gnnaccel.disabled():
        expected = results(layer, args, kwargs, grad)
    gnnaccel.reset_stats()
    torch.manual_seed(seed)
    found = results(layer, args, kwargs, grad)
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype and one.shape == other.shape
            assert one.requires_grad == other.requires_grad
            scale = other.abs().max().clamp(min=1) if other.numel() else 1
            assert ((one - other).abs() <= limit * scale).all()
    routes = gnnaccel.stats().get(type(layer).__name__, {}).get("routes", {})
    return routes.get("cuda", 0) > 0


def codes(layer):
    """Why calls of the module's class were native."""
    return set(gnnaccel.stats()[type(layer).__name__]["reasons"])
