"""Rows of the host's memory as a device fetches, writes and adds to them."""
from __future__ import annotations

import math
import weakref
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gnnaccel.cuda.runtime import driver, pinned
from gnnaccel.cuda.traverse import host_rows

#: places of rows: a range, or numbers, int32 on the host, none twice where rows are written
Where: TypeAlias = "slice | Tensor"

# Bytes of the host from which on exactly so many are pinned. torch takes a power of two, and gives
# it to the next tensor of any size: for results of many sizes that is faster.
_LARGE = 1 << 30
_LASTING = 1 << 20


def count(where: Where) -> int:
    """How many rows ``where`` has."""
    return where.stop - where.start if isinstance(where, slice) else len(where)


class Memory:
    """The host's memory, seen from ``device``. ``fetched``, ``stored``: bytes that were moved to it
    and back; ``stayed``: bytes of rows that did not have to come, as they were still there;
    ``kept``: the last result; ``ahead``: how many free rows are in front of all rows that stay, so
    that a band's own rows find room there (`behind`).

    Moves to and from a GPU are work of the current stream, and rows by number are copied by the GPU
    itself where they are pinned (`cuda.traverse.host_rows`), else collected by the host.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.fetched = self.stored = self.stayed = 0
        self.kept = Kept()
        self.ahead = 0
        self._on_gpu = device.type == "cuda"

    def has(self, size: int) -> bool:
        """Whether the device can give ``size`` bytes in one piece to the current stream. Where it
        could not otherwise, torch's allocator returns its unused memory to the device."""
        if not self._on_gpu or size <= torch.cuda.mem_get_info(self.device)[0]:
            return True
        stream = torch.cuda.current_stream(self.device)
        if any(block["size"] >= size and block["state"] == "inactive"
               for segment in torch.cuda.memory_snapshot()
               if segment["device"] == stream.device.index
               and segment["stream"] == stream.cuda_stream
               for block in segment["blocks"]):
            return True
        torch.cuda.empty_cache()
        return size <= torch.cuda.mem_get_info(self.device)[0]

    def empty(self, shape: Any, dtype: torch.dtype) -> Tensor:
        """Memory of the host, pinned where the device is a GPU."""
        if self._exact(shape, dtype, _LARGE):
            return pinned.blocks().empty(shape, dtype)
        return self._staging(shape, dtype)

    def keep(self, t: Tensor) -> Tensor:
        """``t``, wherever it is, in memory of the host."""
        return self.empty(t.shape, t.dtype).copy_(t)

    def lasting(self, t: Tensor) -> Tensor:
        """As `keep`, for as long as the graph is there."""
        exact = self._exact(t.shape, t.dtype, _LASTING)
        return (pinned.lasting if exact else self.empty)(t.shape, t.dtype).copy_(t)

    def _exact(self, shape: Any, dtype: torch.dtype, least: int) -> bool:
        return (self._on_gpu and math.prod(shape) * dtype.itemsize >= least
                and driver.available()[0])

    def _staging(self, shape: Any, dtype: torch.dtype) -> Tensor:
        """The same, of torch's allocator, which is fast for what goes soon."""
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self._on_gpu)

    def near(self, far: Tensor, ahead: int = 0) -> Tensor:
        """A copy of all of a tensor of the host, on the device, behind ``ahead`` free rows."""
        self.fetched += far.numel() * far.element_size()
        return self.room(far.shape, far.dtype, ahead).copy_(far, non_blocking=True)

    def room(self, shape: Any, dtype: torch.dtype, ahead: int) -> Tensor:
        """Memory of the device for rows, behind ``ahead`` free ones."""
        return torch.empty((ahead + shape[0], *shape[1:]), dtype=dtype, device=self.device)[ahead:]

    def fetch(self, far: Tensor, *wheres: Where, free: int = 0) -> Tensor:
        """The rows at ``wheres``, one behind the other, behind ``free`` rows of anything. ``far``
        is on the host, or on the device."""
        close = torch.empty((free + sum(map(count, wheres)), *far.shape[1:]), dtype=far.dtype,
                            device=self.device)
        at = free
        for where in wheres:
            end = at + count(where)
            self._fetch(far, where, close[at:end])
            at = end
        if self._crosses(far):
            self.fetched += close[free:].numel() * close.element_size()
        return close

    def _fetch(self, far: Tensor, where: Where, close: Tensor) -> None:
        if isinstance(where, slice):
            close.copy_(far[where], non_blocking=True)
        elif far.device == self.device:
            torch.index_select(far, 0, self._numbers(where), out=close)
        elif self._by_kernel(far):
            host_rows.fetch(far, self._numbers(where), close)
        else:
            staged = self._staging(close.shape, far.dtype)
            close.copy_(torch.index_select(far, 0, where, out=staged), non_blocking=True)

    def put(self, close: Tensor, where: Where, far: Tensor, also: Tensor | None = None) -> None:
        """Write rows of the device to ``where`` in ``far``, which may be on the device itself, and
        in ``also``, which is."""
        if self._crosses(far):
            self.stored += close.numel() * close.element_size()
        self._put(close, where, far)
        if also is not None:
            self._put(close, where, also)

    def _put(self, close: Tensor, where: Where, far: Tensor) -> None:
        if isinstance(where, slice):
            far[where].copy_(close, non_blocking=True)
        elif far.device == self.device:
            far.index_copy_(0, self._numbers(where).long(), close)
        elif self._by_kernel(far):
            host_rows.put(close.contiguous(), self._numbers(where), far)
        else:
            far.index_copy_(0, where.long(), close.cpu())

    def add(self, close: Tensor, where: Where, far: Tensor) -> None:
        """Add rows of the device to those at ``where`` in ``far``."""
        self.put(self.fetch(far, where).add_(close), where, far)

    def _numbers(self, where: Tensor) -> Tensor:
        return where.to(self.device, non_blocking=True)

    def _crosses(self, far: Tensor) -> bool:
        """Whether rows of ``far`` come over the link. Without a GPU all are counted."""
        return not self._on_gpu or far.device != self.device

    def _by_kernel(self, far: Tensor) -> bool:
        return far.is_pinned() and far.is_contiguous() and driver.available()[0]


class Kept:
    """The last result of a call in bands: all ``rows`` on the host, and a copy that stays on the
    device for the call after it. Code that sees something happen to results between two calls lets
    go of it (`drop`)."""

    def __init__(self) -> None:
        self._held: tuple[weakref.ref[Tensor], int, Tensor] | None = None

    def __bool__(self) -> bool:
        return self._held is not None

    def put(self, rows: Tensor, close: Tensor) -> None:
        """Hold a result instead of the one before, until it is no longer used."""
        self._held = weakref.ref(rows, lambda gone: self.drop()), rows._version, close

    def take(self, among: list[Tensor]) -> tuple[Tensor, Tensor] | None:
        """The result and its copy on the device, if it is one of these, and unwritten. Nothing is
        held after that."""
        held, self._held = self._held, None
        if held is None:
            return None
        ref, version, close = held
        rows = next((t for t in among if t is ref()), None)
        return (rows, close) if rows is not None and rows._version == version else None

    def drop(self) -> None:
        """Hold nothing."""
        self._held = None
