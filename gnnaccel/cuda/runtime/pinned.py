"""Pinned memory of the host, of exactly the bytes that are asked for. torch's allocator takes the
next power of two: 64 GiB for rows of 57 GB."""
from __future__ import annotations

import collections
import ctypes
import functools
import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: gives pinned memory of so many bytes: an object with the address as ``ptr``, which frees the
#: memory when it goes
Allocate = Callable[[int], Any]


def lasting(shape: Any, dtype: torch.dtype, allocate: Allocate | None = None) -> Tensor:
    """A tensor of at least one byte, whose memory is freed with it."""
    return _tensor((allocate or _by_cupy)(_bytes(shape, dtype)), shape, dtype, None)


class Blocks:
    """Memory that tensors of the same size take one after the other, as pinning takes seconds.
    What no tensor has is kept while it takes no more bytes than tensors had at once."""

    def __init__(self, allocate: Allocate | None = None):
        self._allocate = allocate or _by_cupy
        self._back: collections.deque[Any] = collections.deque()  # of tensors that are gone
        self._kept: list[Any] = []  # the longest kept first
        self._lent = self._most = 0  # bytes that tensors have, and that they had at once
        self._lock = threading.Lock()

    def empty(self, shape: Any, dtype: torch.dtype) -> Tensor:
        """A tensor of at least one byte. Its memory is given on, or freed, when all copies are
        done that were under way when it went."""
        size = _bytes(shape, dtype)
        with self._lock:
            memory = self._taken(size)
        return _tensor(memory, shape, dtype, functools.partial(self._back.append, (size, memory)))

    def _taken(self, size: int) -> Any:
        while self._back:
            self._kept.append(self._back.popleft())
            self._lent -= self._kept[-1][0]
        self._lent += size
        self._most = max(self._most, self._lent)
        if self._kept:
            _wait()
        at = next((at for at, (has, _) in enumerate(self._kept) if has == size), None)
        memory = None if at is None else self._kept.pop(at)[1]
        while self._kept and sum(has for has, _ in self._kept) > self._most:
            self._kept.pop(0)
        return self._allocate(size) if memory is None else memory


@functools.cache
def blocks() -> Blocks:
    """Those of this process."""
    return Blocks()


def _wait() -> None:
    """Wait for all devices that torch has used."""
    for device in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(device):
            torch.cuda.synchronize(device)


def _tensor(memory: Any, shape: Any, dtype: torch.dtype, then: Callable[[], None] | None) -> Tensor:
    """A tensor over ``memory``, which lives as long as it. Then ``then`` is called."""
    kind: Any = type("Owner", (ctypes.c_char * _bytes(shape, dtype),), {})  # has weak references
    owner = kind.from_address(memory.ptr)
    weakref.finalize(owner, _gone, memory, then).atexit = False
    return torch.frombuffer(owner, dtype=dtype).view(shape)


def _gone(memory: Any, then: Callable[[], None] | None) -> None:
    if then is not None:
        then()


def _bytes(shape: Any, dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _by_cupy(size: int) -> Any:
    from cupy import cuda

    return cuda.PinnedMemory(size)
