"""Inner products of node rows with attention vectors (``src/head_dot.cu``)."""
from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda import driver
from gnnaccel.cuda.launch import THREADS, pointer
from gnnaccel.cuda.layout import TYPES, WARPS, grid, layout_for

_GRAD_BLOCKS = 512


@functools.lru_cache(maxsize=256)
def _defines(heads: int, width: int, dtype: torch.dtype) -> tuple:
    return layout_for(heads, width).defines() + (("ROW_T", TYPES[dtype]),)


def dot(x: Tensor, att0: Tensor, att1: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """``<x[n, h], att[h]>`` for one or two vectors: x [N, H, D] contiguous, att [H, D] fp32 -> [N, H] fp32 each."""
    rows, heads, width = x.shape
    layout = layout_for(heads, width)
    a0 = torch.empty(rows, heads, device=x.device)
    a1 = torch.empty(rows, heads, device=x.device) if att1 is not None else None
    driver.current().kernel("head_dot", "dot", _defines(heads, width, x.dtype))(
        grid(rows, layout, layout.slots), THREADS, 0,
        (np.int32(rows), x.data_ptr(), att0.data_ptr(), pointer(att1), a0.data_ptr(), pointer(a1)))
    return a0, a1


def dot_grad(x: Tensor, d0: Tensor, d1: Tensor | None = None) -> Tensor:
    """Gradients of the vectors: [2, H, D] fp32, summed in a fixed order; the second is zero without ``d1``."""
    rows, heads, width = x.shape
    layout = layout_for(heads, width)
    blocks = max(1, min(_GRAD_BLOCKS, grid(rows, layout, layout.slots)[0]))
    partial = torch.empty(blocks, 2, heads, width, device=x.device)
    shared = WARPS * 2 * layout.tile_heads * width * 4
    driver.current().kernel("head_dot", "grad", _defines(heads, width, x.dtype))(
        (blocks, layout.tiles), THREADS, shared, (np.int32(rows), x.data_ptr(), d0.data_ptr(), pointer(d1), partial.data_ptr()))
    return partial.sum(0)
