"""Devices that users' functions name while these are traced: to move rows to where they are already
changes nothing. Whether they are there is looked at in each call."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.tracing.noted import note_device
from gnnaccel.adapters.tracing.rows.specials import DEVICE
from gnnaccel.adapters.tracing.rows.standins import rows

#: operations that may move a tensor to another device
MOVES = ("to", "cpu", "cuda", "type_as")


def named(device: Any) -> bool:
    """Whether it is a device, which is noted as one where the rows have to be."""
    if device is DEVICE:
        return True
    if not isinstance(device, (torch.device, str)):
        return False
    note_device(torch.device(device))
    return True


def still(name: str, args: tuple, kwargs: dict) -> tuple[str, Callable, tuple, dict]:
    """An operation of `MOVES` without the device to which it moves its first argument; of name ""
    where nothing is left of it."""
    if name in ("cpu", "cuda") and not args[1:] and "device" not in kwargs:
        args = (args[0], name)
    first = [_dtype(one) for one in args[1:] if not named(one)]
    rest = {key: one for key, one in kwargs.items()
            if not (key == "device" and named(one) or key == "non_blocking" and type(one) is bool)}
    return ("to" if first or rest else ""), Tensor.to, (args[0], *first), rest


def _dtype(like: Any) -> Any:
    """The dtype of a stand-in that is to be followed, which has to be where the rows are, too."""
    if not hasattr(like, "meta"):
        return like
    named(like.device)
    return like.meta.dtype


def here(devices: tuple[Any, ...], kwargs: dict, ends: tuple[tuple[str, str], ...],
         edges: tuple[str, ...]) -> bool:
    """Whether each of these, a device or what gives a tensor on it of the arguments of a call, is
    where the rows are: those of ``ends`` and ``edges``, as of a `Trace`."""
    tensors = [*(rows(kwargs, *end) for end in ends), *(kwargs[name] for name in edges)]
    if not tensors:
        return False
    place = tensors[0].device
    return all(one.device == place for one in tensors) and all(
        _is(one if isinstance(one, torch.device) else one(kwargs).device, place) for one in devices)


def _is(device: torch.device, place: torch.device) -> bool:
    """Whether a device that may have no number is the one of a tensor."""
    if device.type != place.type:
        return False
    if device.index is None and device.type == "cuda":
        return place.index == torch.cuda.current_device()
    return device.index is None or device.index == place.index
