"""Arguments and dtypes of a host's call."""
from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.dispatch.run.attention_maps import Mapped

_MISSING = object()


def bind(args: tuple, kwargs: dict, required: tuple[str, ...],
         optional: tuple[str, ...]) -> list[Any] | None:
    """Arguments in the order of the names, None for optional ones not given; None when they do not
    fit the signature, which the host's own function will then say."""
    names = required + optional
    if not kwargs and len(required) <= len(args) <= len(names):
        return [*args, *(None,) * (len(names) - len(args))]
    if len(args) > len(names):
        return None
    values = list(args) + [_MISSING] * (len(names) - len(args))
    for name, value in kwargs.items():
        if name not in names or values[names.index(name)] is not _MISSING:
            return None
        values[names.index(name)] = value
    if any(v is _MISSING for v in values[:len(required)]):
        return None
    return [None if v is _MISSING else v for v in values]


#: `bind` of a call that repeats another one, and so fits
bound: Callable[..., list[Any]] = bind  # type: ignore[assignment]  # None only where it does not fit


def dtypes(x: Tensor, *parameters: Tensor | None,
           mapped: bool = True) -> tuple[torch.dtype, torch.dtype]:
    """(dtype of the rows, dtype of the host's result). ``parameters``: those that the host
    multiplies rows or scores with; ``mapped``: the rows come from a linear map, which autocast runs
    in its own dtype (but never in place of float64).

    On CUDA autocast also makes sums, so the host's result, fp32; on the CPU it has no such rule.
    """
    device, row = x.device.type, x.dtype
    autocast = row != torch.float64 and torch.is_autocast_enabled(device)
    if autocast and mapped:
        row = torch.get_autocast_dtype(device)
    out = torch.promote_types(row, torch.float32) if autocast and device == "cuda" else row
    for p in parameters:
        if p is not None and p.dtype is not out:
            out = torch.promote_types(out, p.dtype)
    return row, out


def mapped(x: Tensor) -> torch.dtype:
    """The dtype of rows ``x`` times weights: autocast multiplies in its own, but float64 as it
    is."""
    device = x.device.type
    autocast = x.dtype != torch.float64 and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else x.dtype


def rows(module: Any, x: Tensor, heads: int, width: int, plain: bool = True) -> Tensor | Mapped:
    """The result of ``module``, a linear map to heads * width channels, of x [N, F], as attention
    takes it: [N, heads, width], or the map yet to be applied. ``plain``: the module is a linear map
    and nothing else. Autocast, and weights that are no ordinary tensors, are left to the module."""
    if plain and x.dim() == 2 and not torch.is_autocast_enabled(x.device.type):
        parameters, rows = module._parameters, (heads * width,)
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if (type(weight) in _ORDINARY and weight.dtype is x.dtype
            and weight.shape[:1] == rows and (bias is None or bias.shape == rows)):
            return Mapped(x, weight, bias)
    return module(x).view(x.shape[0], heads, width)


_NOTHING = contextlib.nullcontext()


def without_autocast(device: str) -> contextlib.AbstractContextManager:
    """A block in which autocast is off; making torch's own costs as much as a launch."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NOTHING


_ORDINARY = (torch.nn.Parameter, Tensor)


def ordinary_weight(module: Any, x: Tensor) -> bool:
    """Whether the module's weight is an ordinary tensor of x's dtype."""
    weight = module._parameters.get("weight")
    return type(weight) in _ORDINARY and weight.dtype is x.dtype
