"""Rows that many bands need, kept on the device during a call, while they fit; and those that stay
there from one call to the next."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.dispatch.offload import pipeline
from gnnaccel.dispatch.offload.memory import Memory
from gnnaccel.dispatch.offload.plan import Bands


class Near:
    """Rows on the device. ``room``: bytes that they may take there; ``beside``: more, for rows that
    an earlier call left there, and for those that this one leaves, ``most`` bytes at most."""

    def __init__(self, memory: Memory, bands: Bands, room: int, beside: int = 0,
                 most: int | None = None):
        self._memory, self._room = memory, room if bands.again() else 0
        self._left, self._beside = self._room, beside
        self._most = beside if most is None else most
        self._held: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of the tensor on the host

    def of(self, far: Tensor) -> Tensor:
        """``far``, a tensor of the host, or all of it on the device, fetched once."""
        if id(far) not in self._held:
            ahead = self._ahead(far.shape, far.dtype, self._left)
            if (self._take(far.shape, far.dtype, ahead)
                    and self._memory.has(_bytes(far.shape, far.dtype, ahead))):
                self._held[id(far)] = far, self._memory.near(far.detach(), ahead)
        return self.known(far)

    def behind(self, far: Tensor, free: int) -> Tensor | None:
        """[free + all rows]: all rows of ``far``, behind ``free`` rows to write to. None where they
        are not on the device, or have no such rows in front of them. The memory is the same for
        all bands."""
        close = self.of(far)
        before = free * close.stride(0)
        if id(far) not in self._held or close.storage_offset() < before:
            return None
        return close.as_strided((free + len(close), *close.shape[1:]), close.stride(),
                                close.storage_offset() - before)

    def adopt(self, far: Tensor, close: Tensor) -> None:
        """Use ``close``, which an earlier call left on the device, as all of ``far``, if it fits.
        Of ``beside`` it leaves room for a result as large, which goes first: where rows have to
        come, they come while results go."""
        size = _bytes(close.shape, close.dtype)
        if self._take(close.shape, close.dtype) or (
                2 * size <= self._beside and self._take(close.shape, close.dtype, 0, "_beside")):
            self._held[id(far)] = far, close
            self._memory.stayed += size

    def known(self, far: Tensor) -> Tensor:
        """``far``, or all of it on the device, if it is there."""
        return self._held.get(id(far), (far, far))[1].detach()

    def leaves(self, shape: Any, dtype: torch.dtype) -> Tensor | None:
        """Memory of the device for a result that stays after the call, if it fits."""
        size = _bytes(shape, dtype)
        ahead = self._ahead(shape, dtype, min(self._most, self._beside))
        if size > self._most or not self._take(shape, dtype, ahead, "_beside"):
            return None
        with pipeline.lasting(self._memory.device):
            if not self._memory.has(_bytes(shape, dtype, ahead)):
                return None
            return self._memory.room(shape, dtype, ahead)

    def empty(self, shape: Any, dtype: torch.dtype) -> Tensor:
        """Memory for rows, of the device where they fit, else of the host."""
        ahead = self._ahead(shape, dtype, self._left)
        if not self._take(shape, dtype, ahead):
            return self._memory.empty(shape, dtype)
        rows = self._memory.room(shape, dtype, ahead)
        self._held[id(rows)] = rows, rows
        return rows

    def forget(self) -> None:
        """Keep nothing, at the end of a call."""
        self._held.clear()
        self._left = self._room

    def _ahead(self, shape: Any, dtype: torch.dtype, left: int) -> int:
        """How many free rows to have in front of such rows: none where both would not fit."""
        ahead = self._memory.ahead
        return ahead if _bytes(shape, dtype, ahead) <= left else 0

    def _take(self, shape: Any, dtype: torch.dtype, ahead: int = 0, of: str = "_left") -> bool:
        size, room = _bytes(shape, dtype, ahead), getattr(self, of)
        if size > room:
            return False
        setattr(self, of, room - size)
        return True


def _bytes(shape: Any, dtype: torch.dtype, ahead: int = 0) -> int:
    return torch.Size((ahead + shape[0], *shape[1:])).numel() * dtype.itemsize
