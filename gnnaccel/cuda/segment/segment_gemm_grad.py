"""Gradients of the segments' matrices (``src/segment_gemm_grad.cu``)."""
from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import Kernels, pointer
from gnnaccel.cuda.segment.segment_checks import check_pair, expect
from gnnaccel.cuda.segment.segment_plan import (GradPlan, Segments, as_defines, grad_plan,
                                                grid_blocks, precision_of, shared_limit)

__all__ = ["MERGES", "prepare", "weight_grad", "weight_grad_and_sums"]

MERGES = "merge", "merge_wide"  #: the kernels of ``src/segment_merge.cuh``

_MERGE_THREADS, _MERGE_COLUMNS, _MERGE_WIDE = 256, 32, 1024  # as in segment_merge.cuh
_MERGE_SHARED = 4 * (2 * _MERGE_THREADS + _MERGE_THREADS // 32)
# parts of a segment, on average, from which on threads share the parts of a column
_MANY_PARTS = 16
_MERGE_BLOCKS = 132 * 8  # blocks that run at once
_WORTH = 64  # tiles for which a partial sum more is worth it
_MAX_GRID_Y = 65535


@functools.lru_cache(maxsize=256)
def kernels(plan: GradPlan, k: int, n: int, blocks: int, row: torch.dtype, precision: str,
            copy_x: int, copy_y: int, sums: bool = False) -> Kernels:
    """The kernels of this family for one way of summing. copy_x, copy_y: bytes of one copy; sums:
    columns of dy as well."""
    return Kernels("segment_gemm_grad", as_defines(
        dict(K=k, N=n, BLOCKS=blocks, COPY_X=copy_x, COPY_Y=copy_y, SUMS=int(sums)), plan.defines(),
        plan.tile.defines(plan.shared, precision, row)))


def weight_grad(segments: Segments, x: Tensor, dy: Tensor, *, index: Tensor | None = None,
                dy_index: Tensor | None = None, blocks: int = 1, scale: Tensor | None = None,
                precision: str = "fp32", out: Tensor | None = None) -> Tensor:
    """``out[s] = sum over the rows i of segment s of scale[i] * outer(x[index[i]],
    dy[dy_index[i]])``: [S, blocks, K, N] fp32.

    x: [n, blocks * K], dy: [m, blocks * N], of one dtype (fp32, fp16 or bf16), contiguous; index,
    dy_index: int32 [rows]; scale: fp32 [rows] (with half types, scaled rows of dy are rounded to
    half). Block b takes columns b * K .. of x and b * N .. of dy. ``precision`` as for
    `segment_gemm.multiply`. Segments without rows get zeros.

    Sums have a fixed order: bits repeat for equal sizes and segments. Raises ValueError for what
    does not fit.
    """
    call = segments.prepared(_make, (blocks, precision, False), (x, dy, index, dy_index, scale))
    shape = (segments.count, blocks, call.k, call.n)
    if out is None:
        out = _new(segments, shape, x.device)
    else:
        expect("out", out, torch.float32, shape, x.device)
        out.zero_()
    _run(call, x, dy, index, dy_index, scale, out)
    return out


def weight_grad_and_sums(segments: Segments, x: Tensor, dy: Tensor, *, index: Tensor | None = None,
                         dy_index: Tensor | None = None, blocks: int = 1,
                         scale: Tensor | None = None,
                         precision: str = "fp32") -> tuple[Tensor, Tensor]:
    """`weight_grad`, and the gradient of a bias per segment, summed in passing: ``sum over the rows
    i of segment s of scale[i] * dy[dy_index[i]]``, [S, blocks * N] fp32. Both are views of one
    memory."""
    call = segments.prepared(_make, (blocks, precision, True), (x, dy, index, dy_index, scale))
    matrices = blocks * call.k * call.n
    out = _new(segments, (segments.count, call.weight), x.device)
    _run(call, x, dy, index, dy_index, scale, out)
    return out[:, :matrices].unflatten(1, (blocks, call.k, call.n)), out[:, matrices:]


def _new(segments: Segments, shape: tuple, device: torch.device) -> Tensor:
    """Memory for the results: zeros where a segment may be without rows, for which no kernel
    writes."""
    full = segments.count == 1 and segments.rows > 0
    return (torch.empty if full else torch.zeros)(shape, dtype=torch.float32, device=device)


class _Made(NamedTuple):
    """Prepared call, for all tensors of the same form and the same options. ``weight``: values of
    a segment; ``across``: blocks over the tiles of rows; ``merge``: the kernel that adds up parts;
    ``compiled``: None where there is nothing to do."""

    k: int
    n: int
    weight: int
    compiled: Kernels | None = None
    grid: tuple[int, int] = (0, 0)
    threads: int = 0
    shared: int = 0
    graph: tuple = ()
    across: np.int32 = np.int32(0)
    merge: str = ""
    merge_grid: tuple[int, int] = (0, 0)


def _make(segments: Segments, options: tuple, tensors: tuple) -> _Made:
    """Checks a call and prepares it with its kernels."""
    (blocks, precision, sums), (x, dy, index, dy_index, scale) = options, tensors
    k, n = check_pair(segments, x, dy, index, dy_index, blocks)
    if scale is not None:
        expect("scale", scale, torch.float32, (segments.rows,), x.device)
    precision, weight, size = (precision_of(precision, x.dtype),
                               blocks * (k * n + (n if sums else 0)), x.element_size())
    if not segments.rows:
        return _Made(k, n, weight)
    plan = grad_plan(k, n, x.dtype, shared_limit(x.device))
    compiled = kernels(plan, k, n, blocks, x.dtype, precision, math.gcd(16, k * size, x.data_ptr()),
                       math.gcd(16, n * size, dy.data_ptr()), sums)
    columns = blocks * -(-k // plan.tile.rows) * -(-n // plan.tile.columns)
    if columns > _MAX_GRID_Y:
        raise ValueError(f"{columns} tiles of the gradient: a grid has at most {_MAX_GRID_Y}")
    across = grid_blocks(segments.tile_bound(plan.lines), columns,
                         plan.tile.blocks_per_sm(plan.shared), _WORTH)
    return _Made(k, n, weight, compiled, (across, columns), plan.tile.threads, plan.shared,
                 segments.tiled(plan.lines), np.int32(across),
                 *merge_of(weight, segments.count, across))


def prepare(k: int, n: int, blocks: int, dtype: torch.dtype, precision: str, device: torch.device,
            sums: bool = False) -> None:
    """Compile the kernels that `weight_grad` launches, or with ``sums`` `weight_grad_and_sums`, for
    such sizes and well aligned tensors. Raises CompileError."""
    size = dtype.itemsize
    compiled = kernels(grad_plan(k, n, dtype, shared_limit(device)), k, n, blocks, dtype,
                       precision_of(precision, dtype), math.gcd(16, k * size),
                       math.gcd(16, n * size), sums)
    for entry in ("weight_grad", *MERGES):
        compiled(entry)


def _run(made: _Made, x: Tensor, dy: Tensor, index: Tensor | None, dy_index: Tensor | None,
         scale: Tensor | None, out: Tensor) -> None:
    """out: [S, values of a segment], as `_new` makes it."""
    if made.compiled is None:
        return
    across = made.grid[0]
    partial = (torch.empty((2 * across, made.weight), dtype=torch.float32, device=x.device)
               if across > 1 else None)
    made.compiled("weight_grad")(made.grid, made.threads, made.shared, made.graph + (
        x.data_ptr(), pointer(index), dy.data_ptr(), pointer(dy_index), pointer(scale),
        out.data_ptr(), 0 if partial is None else partial.data_ptr()))
    if partial is not None:  # else no segment is divided
        add_parts(made, partial, out)


def merge_of(weight: int, count: int, across: int) -> tuple[str, tuple[int, int]]:
    """The kernel of ``src/segment_merge.cuh`` that adds up parts of ``count`` segments by
    ``across`` blocks, and its grid."""
    divided = min(count, across)
    wide = across <= _MANY_PARTS * divided
    pieces = -(-weight // (_MERGE_WIDE if wide else _MERGE_COLUMNS)) * divided
    return MERGES[wide], (min(pieces, _MERGE_BLOCKS), 1)


def add_parts(made: Any, partial: Tensor, out: Tensor) -> None:
    """Launches `merge_of`'s kernel. made: a `_Made` of this family or another with such kernels."""
    made.compiled(made.merge)(made.merge_grid, _MERGE_THREADS, _MERGE_SHARED, made.graph[1:] + (
        made.across, partial.data_ptr(), out.data_ptr()))
