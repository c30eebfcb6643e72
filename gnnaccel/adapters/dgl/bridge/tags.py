"""Tags: which device DGL's host objects count as being on, and the two ways between host and
device.

A tag lies in the ``__dict__`` of index objects, arrays, containers and functions of DGL; the bare
base classes of its Cython module have none, and are never tagged.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_KEY = "_gnnaccel_device"
_CPU, _GPU = 1, 2  # device_type of a DGLContext


def is_bridged(device: torch.device) -> bool:
    """Whether tensors on this device have to go to the host for DGL's C functions."""
    return device.type == "cuda"


def host(tensor: Tensor) -> Tensor:
    """The tensor on the host."""
    return tensor.cpu()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a bridged device."""
    return tensor.to(device)


def device_of(thing: Any) -> torch.device | None:
    """The device that a DGL object counts as being on; None: the host, where it is."""
    return thing.__dict__.get(_KEY)


def tag(thing: Any, device: torch.device | None) -> None:
    """Make ``thing`` count as being on ``device``; None: on the host."""
    if device is not None:
        thing.__dict__[_KEY] = device
    else:
        thing.__dict__.pop(_KEY, None)


def of_context(context: Any) -> torch.device | None:
    """The bridged device of a ``DGLContext``; None for the host."""
    return torch.device("cuda", context.device_id) if context.device_type == _GPU else None


def to_context(device: torch.device) -> Any:
    """The ``DGLContext`` of a bridged device."""
    from dgl._ffi.runtime_ctypes import DGLContext

    return DGLContext(_GPU, device.index)


def on_host() -> Any:
    """The host's ``DGLContext``."""
    from dgl._ffi.runtime_ctypes import DGLContext

    return DGLContext(_CPU, 0)


def context(native: property) -> property:
    """``ctx`` of a class of DGL's: the device's, of tagged objects."""
    place: Any = native.fget

    def ctx(self: Any) -> Any:
        device = device_of(self)
        return place(self) if device is None else to_context(device)

    return property(ctx, doc=native.__doc__)
