"""Tensors that a ``message`` makes of numbers alone, such as the centres of a radial basis: made
anew in each call, as by the host, where the rows are."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.tracing.attention.traced import Param
from gnnaccel.adapters.tracing.expressed import Once
from gnnaccel.adapters.tracing.layer import devices
from gnnaccel.adapters.tracing.noted import default_dtype
from gnnaccel.adapters.tracing.rows.specials import DEVICE
from gnnaccel.adapters.tracing.rows.standins import NUMBERS, Unseen

_PLAIN = (*NUMBERS, torch.dtype)


class Constant(Param):
    """Stand-in for such a tensor."""

    device = DEVICE  # which has no tensor to be asked for it


def constant(function: Callable, args: tuple, kwargs: dict, device: Any = None) -> Constant:
    """The result of a function of torch that makes a tensor of numbers. Without a ``device`` it is
    the default one, and then it may be moved to the rows."""
    kwargs = {key: one for key, one in kwargs.items() if one is not None}
    if not (device is None or devices.named(device)) or not all(
        map(_is_plain, (*args, *kwargs.values()))):
        raise Unseen
    if "dtype" not in kwargs:
        default_dtype()  # which it may have

    def made(given: Any) -> Tensor:
        return function(*args, **kwargs, device=given.graph.edge_index.device)

    make = Once(made)
    return Constant(make, function(*args, **kwargs, device="meta"), (make,))


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def making(function: Callable) -> Callable[..., Constant]:
    """What stands for such a function."""
    def made(*args: Any, device: Any = None, **kwargs: Any) -> Constant:
        return constant(function, args, kwargs, device)

    return made


#: functions of torch's, with what stands for them
FUNCTIONS = {one: making(one) for one in (torch.linspace, torch.tensor, torch.eye,
                                          torch.full, torch.logspace)}
