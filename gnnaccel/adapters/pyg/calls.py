"""Small steps that the layers' adapters share."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_MISSING = object()


def bind(args: tuple, kwargs: dict, required: tuple[str, ...], optional: tuple[str, ...]) -> list[Any] | None:
    """Arguments in the order of the names, None for optional ones not given; None when they do not fit the signature,
    which the host's own function will then say."""
    names = required + optional
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


def dtypes(x: Tensor, *parameters: Tensor, mapped: bool = True) -> tuple[torch.dtype, torch.dtype]:
    """(of the rows, of the host's result). ``parameters``: those that the host multiplies rows or scores with;
    ``mapped``: the rows come from a linear map, which autocast runs in its own dtype (but never in place of float64).

    On CUDA autocast also makes sums, so the host's result, fp32; on the CPU it has no such rule.
    """
    device, row = x.device.type, x.dtype
    autocast = row != torch.float64 and torch.is_autocast_enabled(device)
    if autocast and mapped:
        row = torch.get_autocast_dtype(device)
    out = torch.promote_types(row, torch.float32) if autocast and device == "cuda" else row
    for p in parameters:
        out = torch.promote_types(out, p.dtype)
    return row, out


def bias_inside(layer: Any) -> bool:
    """Whether the bias goes into the Program: heads lie side by side and no residual comes in between."""
    return bool(layer.concat) and layer.bias is not None and layer._modules.get("res") is None


def finish(layer: Any, out: Tensor, residual: Tensor | None, biased: bool = False) -> Tensor:
    """Heads side by side or averaged, then residual and bias: [N, H, C] -> [N, H * C] or [N, C]."""
    n, h, c = out.shape
    out = out.reshape(n, h * c) if layer.concat else out.mean(dim=1)
    if residual is not None:
        out = out + residual
    return out if biased or layer.bias is None else out + layer.bias


def parameter(layer: Any, name: str) -> Tensor | None:
    """``layer.name``, past ``Module.__getattr__`` where it is a plain parameter (it may be computed, by a parametrization)."""
    found = layer._parameters.get(name)
    return getattr(layer, name) if found is None else found


def exposed(layer: Any) -> bool:
    """Whether the kernel's own result is what the user gets to see."""
    return bool(layer.concat) and layer._modules.get("res") is None
