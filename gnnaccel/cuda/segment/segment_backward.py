"""Both gradients of a product by segment from one reading of the output's gradient
(``src/segment_backward.cu``).

Otherwise, a product (`segment_gemm.multiply`) and a sum (`segment_gemm_grad.weight_grad`) each read
it: four passes over rows in memory, of which this leaves three.
"""
from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import TYPES, Kernels
from gnnaccel.cuda.segment import segment_direct, segment_gemm, segment_gemm_grad
from gnnaccel.cuda.segment.segment_checks import (check_apart, check_out, check_pair, check_rest,
                                                  check_weights)
from gnnaccel.cuda.segment.segment_gemm_grad import (MERGES, add_parts, merge_of, weight_grad,
                                                     weight_grad_and_sums)
from gnnaccel.cuda.segment.segment_plan import (Segments, as_defines, grid_blocks, precision_of,
                                                shared_limit, side_stride, up)
from gnnaccel.cuda.traverse import activation
from gnnaccel.cuda.traverse.activation import Activation

__all__ = ["Gradients", "backward", "gradients", "plans", "prepare", "prepared", "serves"]

_SM_SHARED = 227 * 1024
_SMALL, _MOST = 64, 128  # columns
_WORTH = 64  # tiles for which a partial sum more is worth it
_MAX_GRID_Y = 65535
_NEW = 64  # bytes at whose multiples every allocator of torch's begins


@dataclass(frozen=True)
class Plan:
    """One way to make both gradients. k, n: columns of a diagonal block of dy and of x."""

    k: int
    n: int
    lines: int  # rows of a tile
    stages: int
    warps: tuple[int, int]  # warps that share a tile of dx
    # warps that share dw, a divisor of those: if there are more, groups share a tile's lines
    grad_warps: tuple[int, int]
    per_sm: int  # blocks of a multiprocessor
    group: int = 2  # groups of eight columns whose products are interleaved

    @functools.cached_property
    def threads(self) -> int:
        return 32 * self.warps[0] * self.warps[1]

    @functools.cached_property
    def strip(self) -> int:
        """Columns of dx that a warp has."""
        return self.n // self.warps[1]

    @functools.cached_property
    def grad(self) -> tuple[int, int]:
        """Rows and columns of a warp's part of dw as [n, k]."""
        return up(-(-self.n // self.grad_warps[0]), 16), up(-(-self.k // self.grad_warps[1]), 8)

    def fits(self, dtype: torch.dtype, precision: str, limit: int) -> bool:
        """Whether sizes divide, and blocks have their shared memory."""
        if self.n % (8 * self.warps[1]) or self.threads < self.k:
            return False
        shared = self.shared(dtype, precision, True)
        return shared <= limit and self.per_sm * (shared + 1024) <= _SM_SHARED

    def shared(self, dtype: torch.dtype, precision: str, sums: bool) -> int:
        """Bytes of a block: the matrix or partial sums of groups of warps, a flag, sums of columns,
        stages, numbers of rows."""
        rows, columns = (part * warps for part, warps in zip(self.grad, self.grad_warps))
        groups = self.threads // 32 // (self.grad_warps[0] * self.grad_warps[1])
        matrix = self.k * self.n * dtype.itemsize * (2 if precision == "FP32" else 1)
        stage = self.lines * (side_stride(rows) + side_stride(columns)) * dtype.itemsize
        return (max(matrix, 4 * (groups - 1) * rows * columns) + 16
                + (4 * self.threads if sums else 0) + self.stages * stage
                + 4 * 3 * (self.stages + 1) * self.lines)

    def defines(self, precision: str, dtype: torch.dtype) -> dict:
        return dict(K=self.k, N=self.n, TR=self.lines, STAGES=self.stages,
                    WM=self.lines // self.warps[0], WN=self.strip, WARPS_M=self.warps[0],
                    WARPS_N=self.warps[1], GRAD_M=self.grad[0], GRAD_N=self.grad[1],
                    GRAD_WARPS_M=self.grad_warps[0], GRAD_WARPS_N=self.grad_warps[1],
                    GROUP=self.group, BLOCKS_PER_SM=self.per_sm, PRECISION=precision,
                    ROW_T=TYPES[dtype])


#: Lines, stages, warps of dx, warps of dw, blocks of a multiprocessor: the fastest of eight to
#: thirteen on an H200 (docs/notes/ relational.md), then those for widths that it does not divide.
_PLANS = ((64, 2, (4, 1), (2, 2), 2), (32, 2, (2, 2), (2, 2), 3), (32, 2, (2, 4), (2, 4), 1))
_OF_HALVES = (128, 2, (8, 1), (2, 2), 2)  # up to 64 x 64


@functools.cache
def plans(k: int, n: int, dtype: torch.dtype, precision: str, limit: int) -> tuple[Plan, ...]:
    """Plans in blocks of at most ``limit`` bytes of shared memory, the best first; none where the
    matrix does not fit, or is no multiple of a warp's reads and products. precision: as
    `precision_of` has it."""
    if precision == "FMA" or max(k, n) > _MOST or k * dtype.itemsize % 32 or n % 8:
        return ()
    first = (_OF_HALVES,) if precision == "HALF" and max(k, n) <= _SMALL else ()
    candidates = (Plan(k, n, *sizes) for sizes in first + _PLANS)
    return tuple(plan for plan in candidates if plan.fits(dtype, precision, limit))


def serves(k: int, n: int, precision: str) -> bool:
    """Whether `gradients` of dy with k columns and x with n are made by one kernel, where there is
    a plan for it: as measured, it is slower than two for fp32 and TF32 with a side of 128, and
    registers do not hold two such sides."""
    return max(k, n) <= _SMALL or precision == "HALF" and min(k, n) <= _SMALL


def as_one(k: int, n: int, dtype: torch.dtype) -> bool:
    """Whether `gradients` for x with k columns of a block and dy with n come from one kernel, on a
    GPU as large as an H100."""
    return _plan(n, k, dtype, precision_of("fp32", dtype, n), _SM_SHARED) is not None


@functools.cache
def _plan(k: int, n: int, dtype: torch.dtype, precision: str, limit: int) -> Plan | None:
    candidates = plans(k, n, dtype, precision, limit) if serves(k, n, precision) else ()
    return candidates[0] if candidates else None


def gradients(segments: Segments, x: Tensor, dy: Tensor, w: Tensor, *, index: Tensor | None = None,
              dy_index: Tensor | None = None, transposed: bool = False, blocks: int = 1,
              sums: bool = False, out: Tensor | None = None, out_index: Tensor | None = None,
              accumulate: bool = False, gelu_grad: Tensor | None = None, precision: str = "fp32",
              of_x: Activation | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of ``y[i] = x[index[i]] @ w[segment of i]``, ``dy[dy_index[i]]`` being that of
    y[i]: of each row's x, of w, and with ``sums`` of a bias per segment. By one kernel where
    `serves` says so, else by two.

    x: [n, blocks * K], dy: [m, blocks * N] and w: [S, K, N] or [S, blocks, K, N] as for
    `segment_gemm.multiply`; with ``transposed`` w is [S, (blocks,) N, K] and its transpose was
    used. index, dy_index, out_index: int32 [rows]. Returned are

    - the rows' gradients, as `segment_gemm.multiply` writes them to ``out`` (with ``out_index``,
      without repeats; ``accumulate``: added to it, which is fp32; ``gelu_grad``: times the
      derivative of GELU there), or a new [rows, blocks * K] of dy's dtype;
    - [S, blocks, K, N] (or N, K) fp32, zeros for segments without rows;
    - [S, blocks * N] fp32, or None.

    of_x: y is a product of this activation of fp32 rows x, of which the gradients are, where one
    kernel makes them (`as_one`).

    Sums have a fixed order: bits repeat for equal sizes and segments. Raises ValueError for what
    does not fit.
    """
    return backward(segments, None, x, dy, w, index, dy_index, transposed, blocks, sums, out,
                    out_index, accumulate, gelu_grad, precision, of_x)


def _apart(segments: Segments, x: Tensor, dy: Tensor, w: Tensor, index: Tensor | None,
           dy_index: Tensor | None, transposed: bool, blocks: int, sums: bool, out: Tensor | None,
           out_index: Tensor | None, accumulate: bool, gelu_grad: Tensor | None,
           precision: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """`gradients` by two kernels."""
    dx = segment_gemm.multiply(segments, dy, w, index=dy_index, out_index=out_index, out=out,
                               transposed=not transposed, blocks=blocks, precision=precision,
                               accumulate=accumulate, distinct=True, gelu_grad=gelu_grad)
    assert isinstance(dx, Tensor)  # two only with ``dots``
    form: Any = dict(blocks=blocks, precision=precision)
    if sums:
        dw, columns = weight_grad_and_sums(segments, x, dy, index=index, dy_index=dy_index, **form)
        return dx, dw.transpose(2, 3).contiguous() if transposed else dw, columns
    if transposed:
        return dx, weight_grad(segments, dy, x, index=dy_index, dy_index=index, **form), None
    return dx, weight_grad(segments, x, dy, index=index, dy_index=dy_index, **form), None


# ---- one kernel ----

def backward(segments: Segments, plan: Plan | None, x: Tensor, dy: Tensor, w: Tensor,
             index: Tensor | None = None, dy_index: Tensor | None = None, transposed: bool = False,
             blocks: int = 1, sums: bool = False, out: Tensor | None = None,
             out_index: Tensor | None = None, accumulate: bool = False,
             gelu_grad: Tensor | None = None, precision: str = "fp32",
             of_x: Activation | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """`gradients` in the way of ``plan``, one of `plans`; None: the best that serves, or two
    kernels."""
    call = segments.prepared(
        _make, (plan, transposed, blocks, sums, accumulate, precision, of_x),
        (x, dy, w, index, dy_index, out, out_index, gelu_grad))
    if call.weight == 0:
        return _apart(segments, x, dy, w, index, dy_index, transposed, blocks, sums, out,
                      out_index, accumulate, gelu_grad, precision)
    if out is None:
        out = torch.empty(call.shape, dtype=call.dtype, device=x.device)
    elif gelu_grad is not None:
        check_apart(None, gelu_grad, out)
    dw = call.launch(x, dy, w, out, index, dy_index, out_index, gelu_grad)
    if not sums:
        return out, dw.view(call.matrices), None
    count = math.prod(call.matrices[1:])
    return out, dw[:, :count].unflatten(1, call.matrices[1:]), dw[:, count:]


def prepared(segments: Segments, x: Tensor, dy: Tensor, w: Tensor, *, transposed: bool = False,
             sums: bool = False, precision: str = "fp32",
             of_x: Activation | None = None) -> Gradients | None:
    """The prepared call of `gradients` for tensors of this form, in new memory; None where it takes
    two kernels."""
    call = _make(segments, (None, transposed, 1, sums, False, precision, of_x),
                 (x, dy, w, *[None] * 5))
    return call if call.weight else None


class Gradients(NamedTuple):
    """Prepared call, for all tensors of the same form and the same options. ``weight``: values of
    a segment, 0 where two kernels are to make them; ``shape``, ``dtype``: of a new dx;
    ``matrices``: the shape of dw; ``across``, ``merge``, ``merge_grid``: as for
    `segment_gemm_grad.add_parts`; ``compiled``: None where there is nothing to do."""

    weight: int
    shape: tuple[int, int] = (0, 0)
    dtype: torch.dtype = torch.float32
    matrices: tuple[int, ...] = ()
    compiled: Kernels | None = None
    grid: tuple[int, int] = (0, 0)
    threads: int = 0
    shared: int = 0
    graph: tuple = ()
    steps_w: tuple = ()
    across: np.int32 = np.int32(0)
    merge: str = ""
    merge_grid: tuple[int, int] = (0, 0)

    def launch(self, x: Tensor, dy: Tensor, w: Tensor, out: Tensor, index: Tensor | None = None,
               dy_index: Tensor | None = None, out_index: Tensor | None = None,
               gelu_grad: Tensor | None = None) -> Tensor:
        """Launches the kernels on tensors of the form that this was made for. Gives the gradients
        of matrices, and of biases behind them: fp32 [S, values of a segment]."""
        if self.compiled is None:
            return torch.zeros((self.matrices[0], self.weight), dtype=torch.float32,
                               device=x.device)
        dw = torch.empty((self.matrices[0], self.weight), dtype=torch.float32, device=x.device)
        across = self.grid[0]
        partial = (torch.empty((2 * across, self.weight), dtype=torch.float32, device=x.device)
                   if across > 1 else None)
        self.compiled("backward")(self.grid, self.threads, self.shared, (
            *self.graph, x.data_ptr(), 0 if index is None else index.data_ptr(), dy.data_ptr(),
            0 if dy_index is None else dy_index.data_ptr(), w.data_ptr(), *self.steps_w,
            0 if out_index is None else out_index.data_ptr(), out.data_ptr(),
            0 if gelu_grad is None else gelu_grad.data_ptr(), dw.data_ptr(),
            0 if partial is None else partial.data_ptr()))
        if partial is not None:  # else no segment is divided
            add_parts(self, partial, dw)
        return dw


def _make(segments: Segments, options: tuple, tensors: tuple) -> Gradients:
    """Checks a call of `backward` and prepares it with its kernels."""
    plan, transposed, blocks, sums, accumulate, precision, of_x = options
    x, dy, w, index, dy_index, out, out_index, gelu_grad = tensors
    k, n = check_pair(segments, x, dy, index, dy_index, blocks)
    plan = plan or _plan(n, k, x.dtype, precision_of(precision, x.dtype, n), shared_limit(x.device))
    if of_x is not None and (plan is None or x.dtype is not torch.float32):
        raise ValueError(f"of_x: the gradients of an activation are of fp32 rows where one kernel "
                         f"makes them, not of {x.dtype} with {k} and {n} columns")
    if plan is None:
        return Gradients(0)
    w = check_weights(segments, x, w, blocks)
    if tuple(w.shape[2:]) != ((n, k) if transposed else (k, n)) or (plan.k, plan.n) != (n, k):
        raise ValueError(f"w has shape {tuple(w.shape)} and the plan is for {plan.n} and {plan.k} "
                         f"columns: x and dy have {k} and {n} columns of a block, and "
                         f"transposed={transposed}")
    shape, dtype = check_out(segments, dy, out, out_index, accumulate, None, blocks * k)
    if gelu_grad is not None:
        check_rest(segments, shape, dtype, None, gelu_grad, accumulate, x.device)
    weight = blocks * (k * n + (n if sums else 0))
    if blocks > _MAX_GRID_Y:
        raise ValueError(f"{blocks} blocks: a grid has at most {_MAX_GRID_Y}")
    if not segments.rows:
        return Gradients(weight, shape, dtype, tuple(w.shape))
    precision, size = precision_of(precision, x.dtype, n), x.element_size()
    write = "GELU_GRAD" if gelu_grad is not None else "BLEND" if accumulate else "PLAIN"
    at_out = math.gcd(_NEW if out is None else out.data_ptr(),
                      0 if gelu_grad is None else gelu_grad.data_ptr())
    compiled = kernels(plan, blocks, x.dtype, dtype, precision, not transposed,
                       math.gcd(16, k * size, x.data_ptr()), math.gcd(16, n * size, dy.data_ptr()),
                       math.gcd(16, (k if transposed else n) * size, w.data_ptr(),
                                w.stride(0) * size, w.stride(1) * size),
                       segment_direct.store_width(plan.strip, dtype, at_out), write, sums, of_x)
    across = grid_blocks(segments.tile_bound(plan.lines), blocks, plan.per_sm, _WORTH)
    return Gradients(weight, shape, dtype, tuple(w.shape), compiled, (across, blocks), plan.threads,
                 plan.shared(x.dtype, precision, sums), segments.tiled(plan.lines),
                 (np.int64(w.stride(0)), np.int64(w.stride(1))), np.int32(across),
                 *merge_of(weight, segments.count, across))


@functools.lru_cache(maxsize=256)
def kernels(plan: Plan, blocks: int, row: torch.dtype, out: torch.dtype, precision: str,
            transposed: bool, copy_x: int, copy_y: int, load_w: int, store: int, write: str,
            sums: bool, of_x: Activation | None = None) -> Kernels:
    """The kernels of this family for one plan. transposed: of the product that makes dx.
    copy_x, copy_y, load_w: bytes of one copy or load; store: elements of one store; write: WRITE of
    segment_epilogue.cuh; of_x: what is done to rows of x."""
    return Kernels(activation.family("segment_backward", of_x), as_defines(
        dict(BLOCKS=blocks, OUT_T=TYPES[out], TRANSPOSED=int(transposed), COPY_X=copy_x,
             COPY_Y=copy_y, LOAD_W=load_w, STORE=store, SIDE=max(1, store // 2), WRITE=write,
             SUMS=int(sums)),
        plan.defines(precision, row)))


def prepare(k: int, n: int, blocks: int, dtype: torch.dtype, rows: int, segments: int,
            transposed: bool, precision: str, device: torch.device, sums: bool = False,
            write: str = "PLAIN", of_x: Activation | None = None) -> None:
    """Compile the kernels that `gradients` launches, for x with k columns of a block, dy with n,
    and well aligned tensors; ``write`` as for `kernels`. Raises CompileError."""
    name = precision_of(precision, dtype, n)
    plan, size = _plan(n, k, dtype, name, shared_limit(device)), dtype.itemsize
    if plan is None:
        segment_gemm.prepare(n, k, blocks, dtype, rows, segments, not transposed, precision,
                             device, write)
        sides = (n, k) if transposed and not sums else (k, n)  # as `_apart` has them
        return segment_gemm_grad.prepare(*sides, blocks, dtype, precision, device, sums)
    compiled = kernels(plan, blocks, dtype, dtype, name, not transposed, math.gcd(16, k * size),
                       math.gcd(16, n * size), math.gcd(16, (k if transposed else n) * size),
                       segment_direct.store_width(plan.strip, dtype, _NEW), write, sums, of_x)
    for entry in ("backward", *MERGES):
        compiled(entry)
