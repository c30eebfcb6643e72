"""Arguments and dtypes of a host's call."""
from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.guards import declared
from gnnaccel.dispatch.policy.reasons import Reason, reason
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


def dtypes(x: Tensor, *parameters: Tensor, mapped: bool = True) -> tuple[torch.dtype, torch.dtype]:
    """(of the rows, of the host's result). ``parameters``: those that the host multiplies rows or
    scores with; ``mapped``: the rows come from a linear map, which autocast runs in its own dtype
    (but never in place of float64).

    On CUDA autocast also makes sums, so the host's result, fp32; on the CPU it has no such rule.
    """
    device, row = x.device.type, x.dtype
    autocast = row != torch.float64 and torch.is_autocast_enabled(device)
    if autocast and mapped:
        row = torch.get_autocast_dtype(device)
    out = torch.promote_types(row, torch.float32) if autocast and device == "cuda" else row
    for p in parameters:
        if p.dtype is not out:
            out = torch.promote_types(out, p.dtype)
    return row, out


def rows(module: Any, x: Tensor, heads: int, width: int, plain: bool = True) -> Tensor | Mapped:
    """What ``module``, a linear map to heads * width channels, makes of x [N, F], as attention
    takes it: [N, heads, width], or the map yet to be applied. ``plain``: the module is a linear map
    and nothing else. Autocast, and weights that are no ordinary tensors, are left to the module."""
    if plain and x.dim() == 2 and not torch.is_autocast_enabled(x.device.type):
        parameters, rows = module._parameters, (heads * width,)
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if (type(weight) in _ORDINARY and weight.dtype is x.dtype
            and weight.shape[:1] == rows and (bias is None or bias.shape == rows)):
            return Mapped(x, weight, bias)
    return module(x).view(x.shape[0], heads, width)


def weights_reason(layer: Any, heads: int, width: int, maps: tuple[str, ...],
                   vectors: tuple[str, ...], plain: Callable[[Any], bool]) -> Reason | None:
    """Why an attention layer's weights do not fit its heads and channels, as after an assignment to
    one of these, or are not there: kernels would read beyond their ends, where the host raises or
    broadcasts.

    ``maps``: modules whose rows are heads * channels, of which only the host's linear maps, for
    which ``plain`` holds, say how wide they are, and `rows` asks others; ``vectors``: parameters
    [1, heads, channels].
    """
    modules, rows = layer._modules, (heads * width,)
    for name in maps:
        module = modules.get(name)
        if module is None or not plain(module):
            continue
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        if weight is not None and (weight.dim() != 2 or weight.shape[:1] != rows):
            return reason("GA206", f"the weight of {name} is {list(weight.shape)}, for {heads} "
                          f"heads of {width}")
        if bias is not None and bias.shape != rows:
            return reason("GA206", f"the bias of {name} is {list(bias.shape)}, for {heads} heads "
                          f"of {width}")
    for name in vectors:
        found = declared(layer, name)
        if found is None or found.shape != (1, heads, width):
            seen = found if found is None else list(found.shape)
            return reason("GA206", f"{name} is {seen}, for {heads} heads of {width}")
    return None


def number_reason(layer: Any, name: str, axes: int) -> Reason | None:
    """Why a parameter with which scores are multiplied is not one number of at most so many
    ``axes``: multiplied with rows, as kernels have it, another comes to something else."""
    found = declared(layer, name)
    if found is not None and found.numel() == 1 and found.dim() <= axes:
        return None
    seen = found if found is None else list(found.shape)
    return reason("GA206", f"{name} is {seen}, not one number")


_NOTHING = contextlib.nullcontext()


def without_autocast(device: str) -> contextlib.AbstractContextManager:
    """A block in which autocast is off; making torch's own costs as much as a launch."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NOTHING


_ORDINARY = (torch.nn.Parameter, Tensor)


def ordinary_weight(module: Any, x: Tensor) -> bool:
    """Whether the module's weight is an ordinary tensor of x's dtype."""
    weight = module._parameters.get("weight")
    return type(weight) in _ORDINARY and weight.dtype is x.dtype
