"""Conversion of tensors for DGL's C functions: copied to the host and tagged on their way in,
copied to the tag's device on their way out.

An array that a C function writes into is copied back to its tensor after the call. So all DGL code
that is not replaced computes on the host, correctly and slowly.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.dgl.bridge.limits import refuse
from gnnaccel.adapters.dgl.bridge.tags import (context, device_of, host, is_bridged, of_context,
                                               on_host, tag, to_device)
from gnnaccel.adapters.patching import PatchSet

# each imports the names of the next
_MODULES = ("dgl.backend", "dgl.backend.pytorch", "dgl.backend.pytorch.tensor")
#: why methods that pin memory are replaced
PINNED = "Raises an error that says that memory cannot be pinned."
_SOURCE, _WRITTEN = "_gnnaccel_source", "_gnnaccel_written"

#: C function -> positions of arguments that it writes although they are not marked as written
_WRITES = {"_CAPI_FarthestPointSampler": (3, 5)}


def install(patches: PatchSet) -> None:
    """Replace the conversions between tensors and DGL's arrays, and the arrays' ``ctx``."""
    from dgl import ndarray
    from dgl._ffi import ndarray as base

    loaded = [sys.modules[name] for name in _MODULES]
    for make in (zerocopy_to_dgl_ndarray, zerocopy_to_dgl_ndarray_for_write,
                 zerocopy_from_dgl_ndarray):
        native = getattr(loaded[-1], make.__name__)
        new = make(native)
        for module in loaded:
            if getattr(module, make.__name__, None) is native:
                patches.set(module, make.__name__, new,
                            "Copies tensors on the GPU to the host on their way into DGL's C "
                            "code, and back on their way out.")
    new = empty(base.empty)
    for module in (base, ndarray):
        patches.set(module, "empty", new,
                    "Makes arrays that are to be on the GPU on the host, marked with the GPU.")
    patches.set(base.NDArrayBase, "ctx", context(base.NDArrayBase.ctx),
                "Says of a marked array that it is on the GPU.")
    patches.set(base.NDArrayBase, "pin_memory_", lambda self: refuse("uva"), PINNED)


def zerocopy_to_dgl_ndarray(native: Callable) -> Callable:
    """Conversion for reading: a tensor on the device becomes a tagged copy."""

    def to_ndarray(data: Tensor) -> Any:
        device = data.device
        if not is_bridged(device):
            return native(data)
        array = native(host(data))
        tag(array, device)
        array.__dict__[_SOURCE] = data
        return array

    return to_ndarray


def zerocopy_to_dgl_ndarray_for_write(native: Callable) -> Callable:
    """Conversion for writing: as for reading (which the native function calls, after its checks),
    and marked as written."""

    def to_ndarray(data: Tensor) -> Any:
        array = native(data)
        if _SOURCE in array.__dict__:
            array.__dict__[_WRITTEN] = True
        return array

    return to_ndarray


def zerocopy_from_dgl_ndarray(native: Callable) -> Callable:
    """Conversion back: a tagged array becomes a copy on the device."""

    def from_ndarray(data: Any) -> Tensor:
        device = device_of(data)
        return native(data) if device is None else to_device(native(data), device)

    return from_ndarray


def empty(native: Callable) -> Callable:
    """New arrays asked for on the device: on the host, tagged."""
    host_context = on_host()

    def empty(shape: Any, dtype: Any = "float32", ctx: Any = host_context) -> Any:
        device = of_context(ctx)
        if device is None:
            return native(shape, dtype, ctx)
        array = native(shape, dtype, host_context)
        tag(array, device)
        return array

    return empty


@torch.no_grad()
def write_back(name: str | None, args: Iterable[Any]) -> None:
    """Copy the results of a call of the C function ``name`` back to the tensors that its arguments
    were made of."""
    written: tuple[int, ...] = () if name is None else _WRITES.get(name, ())
    for position, arg in enumerate(args):
        if type(arg) in (list, tuple):
            write_back(None, arg)
            continue
        attributes = getattr(arg, "__dict__", {})
        if ((_WRITTEN in attributes or (position in written and _SOURCE in attributes))
            and attributes[_SOURCE].numel()):
            attributes[_SOURCE].copy_(torch.from_dlpack(arg.to_dlpack()))
