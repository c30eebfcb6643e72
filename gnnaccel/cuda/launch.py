"""Small pieces that every launcher needs. They run at every call, so each does as little as it can."""
from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.cuda import driver
from gnnaccel.cuda.layout import WARPS

THREADS = 32 * WARPS
_NONE = (0, 0, 0)


class Kernels:
    """The kernels of one family with one set of definitions, looked up once per driver."""

    __slots__ = ("family", "defines", "_found")

    def __init__(self, family: str, defines: tuple):
        self.family, self.defines = family, defines
        self._found: tuple = (None, {})  # (driver, entry -> kernel), replaced as one: threads see both or neither

    def __call__(self, entry: str):
        current = driver.current()
        placed, found = self._found
        if placed is not current:
            found = {}
            self._found = current, found
        kernel = found.get(entry)
        if kernel is None:
            kernel = found[entry] = current.kernel(self.family, entry, self.defines)
        return kernel


def pointer(t: Tensor | None) -> int:
    """A tensor's address, the null pointer for None."""
    return 0 if t is None else t.data_ptr()


def workspace(chunks: int, sizes: tuple[int, int, int], device: torch.device) -> tuple[Tensor | None, tuple[int, int, int]]:
    """fp32 memory for up to three arrays [chunks, size], and their addresses; null where there is nothing to hold."""
    if not chunks:
        return None, _NONE
    first, second, third = (chunks * size for size in sizes)
    memory = torch.empty(first + second + third, device=device)
    base = memory.data_ptr()
    return memory, (base, base + 4 * first if second else 0, base + 4 * (first + second) if third else 0)
