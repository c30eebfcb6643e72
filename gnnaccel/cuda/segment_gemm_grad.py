"""Gradients of the segments' matrices (``src/segment_gemm_grad.cu``)."""
from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.launch import Kernels, pointer
from gnnaccel.cuda.segment_checks import check_pair, check_rows, expect
from gnnaccel.cuda.segment_plan import GradPlan, Segments, as_defines, grad_plan, grid_blocks, precision_of, shared_limit

__all__ = ["weight_grad", "weight_grad_and_sums"]

_MERGE_THREADS, _MERGE_COLUMNS, _MERGE_WIDE = 256, 32, 1024  # as in segment_gemm_grad.cu
_MERGE_SHARED = 4 * (2 * _MERGE_THREADS + _MERGE_THREADS // 32)
_MANY_PARTS = 16  # parts of a segment, on average, from which on threads share the parts of a column
_MERGE_BLOCKS = 132 * 8  # as many as run at once
_WORTH = 64  # tiles for which a partial sum more is worth it
_MAX_GRID_Y = 65535


@functools.lru_cache(maxsize=256)
def kernels(plan: GradPlan, k: int, n: int, blocks: int, row: torch.dtype, precision: str, copy_x: int, copy_y: int,
            sums: bool = False) -> Kernels:
    """The kernels of this family for one way of summing. copy_x, copy_y: bytes of one copy; sums: columns of dy as well."""
    return Kernels("segment_gemm_grad", as_defines(
        dict(K=k, N=n, BLOCKS=blocks, COPY_X=copy_x, COPY_Y=copy_y, SUMS=int(sums)), plan.defines(),
        plan.tile.defines(plan.shared, precision, row)))


def weight_grad(segments: Segments, x: Tensor, dy: Tensor, *, index: Tensor | None = None, dy_index: Tensor | None = None,
                blocks: int = 1, scale: Tensor | None = None, precision: str = "fp32", out: Tensor | None = None) -> Tensor:
    """``out[s] = sum over the rows i of segment s of scale[i] * outer(x[index[i]], dy[dy_index[i]])``: [S, blocks, K, N] fp32.

    x: [n, blocks * K], dy: [m, blocks * N], of one dtype (fp32, fp16 or bf16), contiguous; index, dy_index: int32 [rows];
    scale: fp32 [rows] (with half types, scaled rows of dy are rounded to half). Block b takes columns b * K .. of x and
    b * N .. of dy. ``precision`` as for `segment_gemm.multiply`. Segments without rows get zeros.

    Sums have a fixed order: bits repeat for equal sizes and segments. Raises ValueError for what does not fit.
    """
    k, n = _check(segments, x, dy, index, dy_index, blocks, scale)
    shape = (segments.count, blocks, k, n)
    if out is None:
        out = torch.zeros(shape, device=x.device)
    else:
        expect("out", out, torch.float32, shape, x.device)
        out.zero_()
    _run(segments, x, dy, index, dy_index, blocks, scale, precision, out.view(segments.count, blocks * k * n), False)
    return out


def weight_grad_and_sums(segments: Segments, x: Tensor, dy: Tensor, *, index: Tensor | None = None,
                         dy_index: Tensor | None = None, blocks: int = 1, scale: Tensor | None = None,
                         precision: str = "fp32") -> tuple[Tensor, Tensor]:
    """`weight_grad`, and what it sums in passing: ``sum over the rows i of segment s of scale[i] * dy[dy_index[i]]``,
    [S, blocks * N] fp32. That is the gradient of a bias per segment. Both are views of one memory."""
    k, n = _check(segments, x, dy, index, dy_index, blocks, scale)
    matrices = blocks * k * n
    out = torch.zeros((segments.count, matrices + blocks * n), device=x.device)
    _run(segments, x, dy, index, dy_index, blocks, scale, precision, out, True)
    return out[:, :matrices].unflatten(1, (blocks, k, n)), out[:, matrices:]


def _check(segments: Segments, x: Tensor, dy: Tensor, index: Tensor | None, dy_index: Tensor | None, blocks: int,
           scale: Tensor | None) -> tuple[int, int]:
    """K and N."""
    k, n = check_pair(x, dy, blocks)
    check_rows(segments, x, index, blocks * k)
    check_rows(segments, dy, dy_index, blocks * n, "dy")
    if scale is not None:
        expect("scale", scale, torch.float32, (segments.rows,), x.device)
    return k, n


def _run(segments: Segments, x: Tensor, dy: Tensor, index: Tensor | None, dy_index: Tensor | None, blocks: int,
         scale: Tensor | None, precision: str, out: Tensor, sums: bool) -> None:
    """out: [S, values of a segment], zeros."""
    precision = precision_of(precision, x.dtype)
    if not segments.rows:
        return
    k, n, size = x.shape[1] // blocks, dy.shape[1] // blocks, x.element_size()
    plan = grad_plan(k, n, x.dtype, shared_limit(x.device))
    compiled = kernels(plan, k, n, blocks, x.dtype, precision, math.gcd(16, k * size, x.data_ptr()),
                       math.gcd(16, n * size, dy.data_ptr()), sums)
    columns = blocks * -(-k // plan.tile.rows) * -(-n // plan.tile.columns)
    _launch(compiled, plan, columns, segments, out, (x.data_ptr(), pointer(index), dy.data_ptr(), pointer(dy_index),
                                                     pointer(scale)))


def _launch(compiled: Kernels, plan: GradPlan, columns: int, segments: Segments, out: Tensor, args: tuple) -> None:
    tile, weight, lines = plan.tile, out.shape[1], plan.lines
    if columns > _MAX_GRID_Y:
        raise ValueError(f"{columns} tiles of the gradient: a grid has at most {_MAX_GRID_Y}")
    across = grid_blocks(segments.tile_bound(lines), columns, tile.blocks_per_sm(plan.shared), _WORTH)
    partial = torch.empty((2 * across, weight), device=out.device) if across > 1 else None
    tiles, count = segments.tile_ptr(lines).data_ptr(), np.int32(segments.count)
    compiled("weight_grad")((across, columns), tile.threads, plan.shared, (
        segments.ptr.data_ptr(), tiles, count) + args + (out.data_ptr(), pointer(partial)))
    if partial is not None:  # else no segment is divided
        divided = min(segments.count, across)
        wide = across <= _MANY_PARTS * divided
        pieces = -(-weight // (_MERGE_WIDE if wide else _MERGE_COLUMNS)) * divided
        compiled("merge_wide" if wide else "merge")((min(pieces, _MERGE_BLOCKS), 1), _MERGE_THREADS, _MERGE_SHARED, (
            tiles, count, np.int32(across), partial.data_ptr(), out.data_ptr()))
