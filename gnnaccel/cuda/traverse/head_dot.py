"""Inner products of node rows with attention vectors (``src/head_dot.cu``)."""
from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import (THREADS, TYPES, WARPS, Kernels, Layout, grid, layout_for,
                                          pointer)

_GRAD_BLOCKS = 512
_SUM_COLUMNS = 32  # columns of one block of `sum_blocks`, as in head_dot.cu


@functools.lru_cache(maxsize=256)
def kernels(heads: int, width: int, dtype: torch.dtype) -> Kernels:
    """The kernels of this family for rows of this kind."""
    return Kernels("head_dot", layout_for(heads, width).defines() + (("ROW_T", TYPES[dtype]),))


def dot(x: Tensor, att0: Tensor, att1: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """``<x[n, h], att[h]>`` for one or two vectors: x [N, H, D] contiguous, att [H, D] fp32 -> [N,
    H] fp32 each."""
    rows, heads, width = x.shape
    layout = layout_for(heads, width)
    a0 = torch.empty((rows, heads), dtype=torch.float32, device=x.device)
    a1 = (torch.empty((rows, heads), dtype=torch.float32, device=x.device)
          if att1 is not None else None)
    kernels(heads, width, x.dtype)("dot")(
        grid(rows, layout, layout.slots), THREADS, 0,
        (np.int32(rows), x.data_ptr(), att0.data_ptr(), 0 if att1 is None else att1.data_ptr(),
         layout.step, a0.data_ptr(), 0 if a1 is None else a1.data_ptr()))
    return a0, a1


def dot_grad(x: Tensor, d0: Tensor, d1: Tensor | None = None) -> Tensor:
    """Gradients of the vectors: [2, H, D] fp32, summed in a fixed order; the second is zero without
    ``d1``."""
    rows, heads, width = x.shape
    layout = layout_for(heads, width)
    blocks = grad_blocks(rows, layout)
    partial = torch.empty((blocks, 2, heads, width), dtype=torch.float32, device=x.device)
    total = torch.empty((2, heads, width), dtype=torch.float32, device=x.device)
    first = total.data_ptr()
    launch_grad(kernels(heads, width, x.dtype), layout, heads, width, blocks, np.int32(rows),
                x.data_ptr(), d0.data_ptr(), pointer(d1), partial.data_ptr(),
                (first, first + 4 * heads * width, layout.step))
    return total


def grad_blocks(rows: int, layout: Layout) -> int:
    """Number of partial sums of [2, H, D] that `launch_grad` makes."""
    return max(1, min(_GRAD_BLOCKS, grid(rows, layout, layout.slots)[0]))


def launch_grad(compiled: Kernels, layout: Layout, heads: int, width: int, blocks: int,
                rows: np.int32, x: int, d0: int, d1: int, partial: int,
                out: tuple[int, int, np.int32]) -> None:
    """`dot_grad` by addresses. ``out``: of the first and the second gradient, and how many numbers
    are from one head to the next."""
    columns = 2 * heads * width
    compiled("grad")((blocks, layout.tiles), THREADS, WARPS * 2 * layout.tile_heads * width * 4,
                     (rows, x, d0, d1, partial))
    compiled("sum_blocks")((-(-columns // _SUM_COLUMNS), 1), 256, 1024,
                           (np.int32(blocks), np.int32(columns), partial, *out))
