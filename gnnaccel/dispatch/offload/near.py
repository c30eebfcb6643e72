"""Rows that many bands need, kept on the device during a call, while they fit."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.dispatch.offload.memory import Memory
from gnnaccel.dispatch.offload.plan import Bands


class Near:
    """``room``: the bytes of the device that may be taken."""

    def __init__(self, memory: Memory, bands: Bands, room: int):
        self._memory, self._room = memory, room if bands.again() else 0
        self._left = self._room
        self._held: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of the tensor on the host

    def of(self, far: Tensor) -> Tensor:
        """``far``, a tensor of the host, or all of it on the device, fetched once."""
        if id(far) not in self._held and self._take(far.shape, far.dtype):
            self._held[id(far)] = far, self._memory.near(far.detach())
        return self._held.get(id(far), (far, far))[1].detach()

    def empty(self, shape: Any, dtype: torch.dtype) -> Tensor:
        """Memory for rows, of the device where they fit, else of the host."""
        if not self._take(shape, dtype):
            return self._memory.empty(shape, dtype)
        found = torch.empty(shape, dtype=dtype, device=self._memory.device)
        self._held[id(found)] = found, found
        return found

    def forget(self) -> None:
        """At the end of a call: nothing is kept."""
        self._held.clear()
        self._left = self._room

    def _take(self, shape: Any, dtype: torch.dtype) -> bool:
        size = torch.Size(shape).numel() * dtype.itemsize
        if size > self._left:
            return False
        self._left -= size
        return True
