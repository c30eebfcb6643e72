"""Small pinned memory in which kernels report to the host, without it ever waiting."""
from __future__ import annotations

import itertools
import threading

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.runtime import capture

_SLOT = 48  # int32 words per report; the layout stands in report.cuh, above `Report`
_SLOTS = 1024  # per slab


class Reports:
    """Small pinned memory that kernels write and the host reads without ever waiting.

    Slots are lent and taken back. A kernel may still be running when its slot is lent again, so
    each loan has a tag, which the kernel writes last: a report with another tag belongs to another
    loan. A captured CUDA graph reports at each replay, long after its loan would have ended: it
    writes to a slot that is never lent and that nobody reads.
    """

    def __init__(self, pinned: bool):
        self._pinned = pinned
        self._slabs: list[Tensor] = []
        self.free: list[tuple[int, np.ndarray]] = []  # slots that are not lent
        self._unread: int | None = None
        self._tags = itertools.count(1)
        self._lock = threading.Lock()

    def take(self) -> Report | Unread:
        captured = capture.capturing()
        with self._lock:
            if captured and self._unread is not None:
                return Unread(self._unread)
            if not self.free:
                slab = torch.zeros(_SLOTS, _SLOT, dtype=torch.int32, device="cpu",
                                   pin_memory=self._pinned)
                self._slabs.append(slab)
                self.free += [(slab.data_ptr() + i * _SLOT * 4, slab.numpy()[i])
                              for i in range(_SLOTS)]
            address, words = self.free.pop()
            if self._unread is None:
                self._unread = address
                address, words = self.free.pop()
            if captured:
                return Unread(self._unread)
        return Report(self, address, words, next(self._tags) % 0x7FFFFFFF + 1)


class Report:
    """Report of the device on one built index array; ``words`` once it is in, None before."""

    __slots__ = ("_owner", "address", "_slot", "tag", "_words", "__weakref__")

    def __init__(self, owner: Reports, address: int, slot: np.ndarray, tag: int):
        self._owner, self.address, self._slot, self.tag, self._words = (owner, address, slot, tag,
                                                                        None)

    @property
    def words(self) -> np.ndarray | None:
        if self._words is None and self._slot[0] == self.tag:
            words = self._slot.copy()
            # another tag: a late kernel of the slot's earlier borrower is writing
            if self._slot[0] == self.tag:
                self._words = words
        return self._words

    def __del__(self) -> None:
        self._owner.free.append((self.address, self._slot))


class Unread:
    """The report of a captured CUDA graph; each replay has other edges, so the host reads none."""

    __slots__ = ("address",)
    words, tag = None, 1

    def __init__(self, address: int):
        self.address = address


_reports: dict[bool, Reports] = {}
_reports_lock = threading.Lock()


def reports(device: torch.device) -> Reports:
    pinned = device.type == "cuda"
    pool = _reports.get(pinned)
    if pool is None:
        with _reports_lock:
            pool = _reports.setdefault(pinned, Reports(pinned))
    return pool
