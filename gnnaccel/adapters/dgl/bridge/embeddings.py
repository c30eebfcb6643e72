"""DGL's sparse embeddings next to a GPU that DGL cannot reach.

For an embedding on the GPU, DGL finds out in C code for GPUs which process has which row; here
torch operations do it. For an embedding on the host, `SparseAdam` pins its state in the first step
if gradients come from the GPU; here gradients go to the host first. Without the pinning, DGL's own
code would read what it copies to the host before the copy is done.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.dgl.bridge.limits import refuse
from gnnaccel.adapters.dgl.bridge.tags import host, is_bridged
from gnnaccel.adapters.patching import PatchSet

_RANGES = "_gnnaccel_ranges"


def install(patches: PatchSet) -> None:
    """Replace the functions that need a CUDA build of DGL."""
    from dgl.optim import SparseAdam
    from dgl.partition import NDArrayPartition

    patches.set(NDArrayPartition, "__init__", _made(NDArrayPartition.__init__),
                "Takes ranges that are on the GPU.")
    patches.set(NDArrayPartition, "local_size", _local_size(NDArrayPartition.local_size),
                "Answers for ranges that are on the GPU.")
    for answer in (map_to_local, map_to_global, generate_permutation):
        patches.set(NDArrayPartition, answer.__name__,
                    _on_the_device(getattr(NDArrayPartition, answer.__name__), answer),
                    "Finds the process that holds each row of an embedding on the GPU, by torch "
                    "operations.")
    patches.set(SparseAdam, "_setup_uva", lambda self, name, mem, power: refuse("adam"),
                "Raises an error that says that memory cannot be pinned.")
    patches.set(SparseAdam, "update", _where_the_state_is(SparseAdam.update),
                "Moves gradients to the host first where the optimizer's state is there.")


# --- ids divided among processes: id i goes to process i % n, or by ranges -----------------------

def _made(native: Callable) -> Callable:
    """Ranges on the device stay there. DGL has no object for them on the host."""

    @functools.wraps(native)
    def __init__(self: Any, array_size: int, num_parts: int, mode: str = "remainder",
                 part_ranges: Any = None) -> None:
        if (mode != "range" or not isinstance(part_ranges, Tensor)
            or not is_bridged(part_ranges.device)):
            native(self, array_size, num_parts, mode, part_ranges)
            return
        self._partition, self._array_size, self._num_parts = None, array_size, num_parts
        setattr(self, _RANGES, part_ranges)

    return __init__


def _local_size(native: Callable) -> Callable:
    @functools.wraps(native)
    def local_size(self: Any, part: int) -> int:
        ranges = getattr(self, _RANGES, None)
        return native(self, part) if ranges is None else int(ranges[part + 1] - ranges[part])

    return local_size


def _on_the_device(native: Callable, answer: Callable) -> Callable:
    @functools.wraps(native)
    def method(self: Any, idxs: Tensor, *part_id: int) -> Any:
        if not is_bridged(idxs.device):
            return native(self, idxs, *part_id)
        ranges = getattr(self, _RANGES, None)
        return answer(self.num_parts(), None if ranges is None else ranges.to(idxs), idxs, *part_id)

    return method


def map_to_local(parts: int, ranges: Tensor | None, ids: Tensor) -> Tensor:
    """Ids of the whole as ids within the parts that they belong to."""
    return ids // parts if ranges is None else ids - ranges[_parts(parts, ranges, ids)]


def map_to_global(parts: int, ranges: Tensor | None, ids: Tensor, part: int) -> Tensor:
    """Ids within one part as ids of the whole."""
    return ids * parts + part if ranges is None else ids + ranges[part]


def generate_permutation(parts: int, ranges: Tensor | None, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The order that puts ids of the same part together, and how many belong to each part."""
    owners = _parts(parts, ranges, ids)
    return owners.argsort(stable=True).to(ids.dtype), torch.bincount(owners, minlength=parts)


def _parts(parts: int, ranges: Tensor | None, ids: Tensor) -> Tensor:
    return ((ids % parts).long() if ranges is None
            else torch.searchsorted(ranges, ids, right=True) - 1)


# --- SparseAdam ----------------------------------------------------------------------------------

def _where_the_state_is(native: Callable) -> Callable:
    """``update`` with the gradients on the host, if the optimizer's state is there."""

    @functools.wraps(native)
    def update(self: Any, idx: Tensor, grad: Tensor, emb: Any) -> None:
        if is_bridged(grad.device) and not is_bridged(emb.optm_state[0].device):
            idx, grad = host(idx), host(grad)
        native(self, idx, grad, emb)

    return update
