"""Offsets of the tiles of each segment, for every height of tiles at once
(``src/tile_ptr.cuh``)."""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.runtime import driver
from gnnaccel.cuda.runtime.launch import Kernels

#: rows of a tile, for the products by segment
HEIGHTS = (16, 32, 64, 128)
_THREADS = 256
_MOST = 1 << 16  # segments; a thread walks 256 of them

kernels = Kernels("pairs", ())  # the text that has the kernel


def prepare() -> None:
    """Compile the kernel. Raises CompileError."""
    kernels("tile_ptr")


def tile_ptr(ptr: Tensor) -> dict[int, Tensor]:
    """For each of `HEIGHTS`, int32 [S + 1]: number of tiles of so many rows before each segment.
    ``ptr`` [S + 1] int32, contiguous: where segments begin. Made without asking the device."""
    segments = ptr.shape[0] - 1
    # without a kernel's device there is nothing to launch on
    if segments > _MOST or not (ptr.is_cuda or driver.placed()):
        return {height: _by_torch(ptr, height) for height in HEIGHTS}
    starts = torch.empty((len(HEIGHTS), segments + 1), dtype=torch.int32, device=ptr.device)
    kernels("tile_ptr")((1, len(HEIGHTS)), _THREADS, 4 * _THREADS,
                        (ptr.data_ptr(), np.int32(segments), starts.data_ptr()))
    return dict(zip(HEIGHTS, starts.unbind(0)))


def _by_torch(ptr: Tensor, height: int) -> Tensor:
    tiles = torch.zeros_like(ptr)
    torch.cumsum((ptr.diff() + (height - 1)) // height, 0, dtype=torch.int32, out=tiles[1:])
    return tiles
