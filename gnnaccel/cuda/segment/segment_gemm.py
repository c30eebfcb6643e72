"""Products of rows, sorted by segment, with their segment's matrix (``src/segment_gemm.cu``;
``src/segment_direct.cu`` where the matrices are small).

Relation-specific and type-specific linear layers: one launch for all segments, with nothing asked
of the device. Rows may be gathered on the way in and scattered on the way out, so neither copy of
them is ever made.
"""
from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import TYPES, Kernels
from gnnaccel.cuda.segment import segment_direct
from gnnaccel.cuda.segment.segment_checks import (ACTIVATIONS, check_apart, check_epilogue,
                                                  check_out, check_rest, check_rows, check_weights,
                                                  heads_of, per_segment)
from gnnaccel.cuda.segment.segment_direct import DirectPlan, direct_plan
from gnnaccel.cuda.segment.segment_plan import (ProductPlan, Segments, as_defines, grid_blocks,
                                                precision_of, product_plan, shared_limit, tile_rows)
from gnnaccel.cuda.traverse.activation import Activation

__all__ = ["Product", "Segments", "multiply", "prepare", "product"]

_MAX_GRID_Y = 65535
_WORTH = 8  # tiles for which a block's start is worth it
_NEW = 64  # bytes at whose multiples every allocator of torch's begins


@functools.lru_cache(maxsize=256)
def kernels(plan: ProductPlan, k: int, n: int, blocks: int, row: torch.dtype, out: torch.dtype,
            precision: str, transposed: bool, copy_x: int, copy_w: int, store: int, write: str,
            heads: tuple[int, int] | None) -> Kernels:
    """The kernel for one way of computing the product. copy_x, copy_w: bytes of one copy; store:
    elements of one store; write: WRITE of segment_epilogue.cuh."""
    h, d = heads or (1, 1)
    return Kernels("segment_gemm", as_defines(
        dict(K=k, N=n, BLOCKS=blocks, OUT_T=TYPES[out], TRANSPOSED=int(transposed), COPY_X=copy_x,
             COPY_W=copy_w, STORE=store, WRITE=write, DOTS=int(heads is not None), H=h, D=d),
        plan.defines(), plan.tile.defines(plan.shared, precision, row)))


def multiply(segments: Segments, x: Tensor, w: Tensor, *, index: Tensor | None = None,
             out_index: Tensor | None = None, out: Tensor | None = None, transposed: bool = False,
             blocks: int = 1, bias: Tensor | None = None, scale: Tensor | None = None,
             activation: str = "none", slope: float = 0.0, precision: str = "fp32",
             out_dtype: torch.dtype | None = None, accumulate: bool = False,
             distinct: bool = False, blend: tuple[Tensor, Tensor] | None = None,
             gelu_grad: Tensor | None = None, dots: Tensor | None = None,
             of_x: Activation | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """``out[out_index[i]] = activation((x[index[i]] @ w[segment of i] + bias[segment of i]) *
    scale[i])`` for every row i.

    x: [n, blocks * K] fp32, fp16 or bf16, contiguous, or [n, K], which all blocks take, where the
    matrix of one fits in shared memory whole. w: [S, K, N], or [S, blocks, K, N] for
    block-diagonal matrices, of x's dtype; any strides but in the last two dimensions, which are
    contiguous. With ``transposed`` it is [S, (blocks,) N, K] and its transpose is used, read in
    place. index, out_index: int32 [rows]; out_index without repeats, and rows of ``out`` that it
    does not name stay as they are. ``out``: [any, blocks * N] contiguous, needed with out_index;
    else a new [rows, blocks * N] of ``out_dtype`` (x's by default). bias: [blocks * N] or [S,
    blocks * N]; scale: fp32 [rows].

    precision, for fp32: "fp32" (tensor cores, three tf32 products for one; errors like fp32's),
    "tf32" (one), "fma" (no tensor cores). Half types accumulate in fp32. Inf and NaN come out as
    with fp32, in their own rows. accumulate: add to ``out``, which is fp32, instead; out_index may
    repeat, and bits then vary from run to run, unless ``distinct`` promises that it does not.
    blend: (share fp32 [S], rest) instead: out is ``share * product + (1 - share) * rest`` of the
    segment's share. ``rest`` has rows of its own for those of ``out``, of its dtype, and is other
    memory. gelu_grad: instead, times the derivative of GELU (by the error function) at its rows,
    which are as ``rest``. dots: attention vectors [H, D] or [S, H, D] with H * D = blocks * N.
    Returns ``(out, a)``, a [rows, H] fp32 being the inner products of row i's heads, not rounded to
    the output's dtype, with them. of_x: the product is that of this activation of x, which is made
    of fp32 rows as they are read, where the matrix fits in shared memory whole.

    ValueError for shapes, dtypes or options that do not fit. Indices are not checked.
    """
    if blend is not None and gelu_grad is not None:
        raise ValueError("blend and gelu_grad: the result is either blended with other rows, or "
                         "multiplied by a derivative")
    share, rest = (None, gelu_grad) if blend is None else blend
    options = (transposed, blocks, activation, slope, precision, out_dtype, accumulate, distinct,
               of_x)
    tensors = x, w, index, out_index, out, bias, scale, share, rest, dots
    # `Segments.prepared`, without its call
    key = (_make, *options, *[None if t is None else (t.dtype, t.shape, t.stride(), t.device,
                                                      t.data_ptr() & 15) for t in tensors])
    call = segments.made.get(key)
    if call is None:
        call = segments.keep(key, _make(segments, options, tensors))
    if out is None:
        out = torch.empty(call.shape, dtype=call.dtype, device=x.device)
    elif rest is not None:
        check_apart(share, rest, out)
    a = None if call.planes is None else (torch.empty if call.planes[0] == 1 else torch.zeros)(
        call.planes, dtype=torch.float32, device=x.device)
    call.launch(x, w, out, bias, index, scale, out_index, dots, a, share, rest)
    return out if a is None else (out, a[0] if len(a) == 1 else a.sum(0))


def product(segments: Segments, x: Tensor, w: Tensor, bias: Tensor | None = None, *,
            transposed: bool = False, precision: str = "fp32", blocks: int = 1,
            of_x: Activation | None = None) -> Product:
    """The prepared call of `multiply` for tensors of this form, in new memory."""
    return _make(segments, (transposed, blocks, "none", 0.0, precision, None, False, False, of_x),
                 (x, w, None, None, None, bias, *[None] * 4))


class Product(NamedTuple):
    """Prepared call, for all tensors of the same form and the same options. ``shape``, ``dtype``:
    of a new result; ``planes``: of the inner products' memory; ``compiled``: None where there is
    nothing to do; the others: arguments of the launch and of the kernel."""

    shape: tuple[int, int]
    dtype: torch.dtype
    compiled: Kernels | None
    grid: tuple[int, int]
    threads: int
    shared: int
    graph: tuple
    steps_w: tuple = (np.int64(0), np.int64(0))
    step_bias: np.int64 = np.int64(0)
    activation: tuple = (np.int32(0), np.float32(0))
    planes: tuple[int, int, int] | None = None
    step_dots: np.int64 = np.int64(0)
    plane: np.int64 = np.int64(0)

    def launch(self, x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None = None,
               index: Tensor | None = None, scale: Tensor | None = None,
               out_index: Tensor | None = None, dots: Tensor | None = None,
               products: Tensor | None = None, share: Tensor | None = None,
               rest: Tensor | None = None, more: tuple = ()) -> None:
        """Launches the kernel on tensors of the form that this was made for. ``more``: arguments
        behind those that every kernel has."""
        if self.compiled is None:
            return
        bias = bias if bias is None or bias.dtype is torch.float32 else bias.float()
        dots = dots if dots is None or dots.dtype is torch.float32 else dots.float()
        self.compiled("multiply")(self.grid, self.threads, self.shared, (
            *self.graph, x.data_ptr(), 0 if index is None else index.data_ptr(), w.data_ptr(),
            *self.steps_w, 0 if bias is None else bias.data_ptr(), self.step_bias,
            0 if scale is None else scale.data_ptr(), *self.activation,
            0 if out_index is None else out_index.data_ptr(), out.data_ptr(),
            0 if dots is None else dots.data_ptr(), self.step_dots,
            0 if products is None else products.data_ptr(), self.plane,
            0 if share is None else share.data_ptr(), 0 if rest is None else rest.data_ptr(),
            *more))


def _make(segments: Segments, options: tuple, tensors: tuple) -> Product:
    """Checks a call of `multiply` and prepares it with its kernel."""
    transposed, blocks, activation, slope, precision, out_dtype, accumulate, distinct = options[:-1]
    of_x, (x, w, index, out_index, out, bias, scale, share, rest, dots) = options[-1], tensors
    w = check_weights(segments, x, w, blocks)
    k, n = (w.shape[3], w.shape[2]) if transposed else (w.shape[2], w.shape[3])
    shared_x = blocks > 1 and x.dim() == 2 and x.shape[1] == k
    check_rows(segments, x, index, k if shared_x else blocks * k)
    shape, dtype = check_out(segments, x, out, out_index, accumulate, out_dtype, blocks * n)
    bias_step = per_segment("bias", bias, segments, (blocks * n,), x.device)
    heads = heads_of(dots, blocks * n)
    att_step = per_segment("dots", dots, segments, heads, x.device)
    check_epilogue(segments, scale, activation, x.device)
    if rest is not None:
        check_rest(segments, shape, dtype, share, rest, accumulate, x.device)
    plan = _plan(k, n, x.dtype, segments.rows, segments.count, transposed, precision,
                 heads is not None, x.device)
    if of_x is not None and not (isinstance(plan, DirectPlan) and x.dtype is torch.float32):
        raise ValueError(f"of_x: an activation is of fp32 rows by a matrix that fits in shared "
                         f"memory whole, not of {x.dtype} by {k} x {n}")
    if shared_x and not isinstance(plan, DirectPlan):
        raise ValueError(f"x has {k} columns for {blocks} blocks: that takes matrices that fit in "
                         f"shared memory whole, not {k} x {n} in {x.dtype}")
    write = "PLAIN"
    if rest is not None and share is None:
        write = "GELU_GRAD"
    elif share is not None or accumulate:
        write = "BLEND" if share is not None or distinct or out_index is None else "ATOMIC"
    at_out = math.gcd(_NEW if out is None else out.data_ptr(),
                      0 if rest is None else rest.data_ptr())
    planes = None if heads is None else (_planes(plan, n, *heads), segments.rows, heads[0])
    compiled = (_select(plan, x, w, dtype, at_out, k, n, transposed, precision, write, heads, of_x,
                        shared_x) if segments.rows else None)
    across, threads, shared, args = (_launch(plan, segments, blocks, n) if segments.rows
                                     else ((0, 0), 0, 0, ()))
    return Product(shape, dtype, compiled, across, threads, shared, args,
                   (np.int64(w.stride(0)), np.int64(w.stride(1))), np.int64(bias_step),
                   (np.int32(ACTIVATIONS[activation]), np.float32(slope)), planes,
                   np.int64(att_step), np.int64(0 if planes is None else planes[1] * planes[2]))


def prepare(k: int, n: int, blocks: int, dtype: torch.dtype, rows: int, segments: int,
            transposed: bool, precision: str, device: torch.device, write: str = "PLAIN",
            of_x: Activation | None = None, shared_x: bool = False) -> None:
    """Compile the kernel that `multiply` launches for such sizes and well aligned tensors;
    ``write`` as for `kernels`; shared_x: all blocks take the same x. Raises CompileError."""
    plan = _plan(k, n, dtype, rows, segments, transposed, precision, False, device)
    _compiled(plan, k, n, blocks, dtype, dtype, transposed, precision, 0, 0, 0, write,
              None, of_x, shared_x)("multiply")


def _plan(k: int, n: int, dtype: torch.dtype, rows: int, segments: int, transposed: bool,
          precision: str, dots: bool, device: torch.device) -> ProductPlan | DirectPlan:
    limit = shared_limit(device)
    plan = direct_plan(k, n, dtype, precision_of(precision, dtype, k), dots, limit)
    return plan or product_plan(k, n, dtype, tile_rows(rows, segments), transposed, dots, limit)


def _select(plan: ProductPlan | DirectPlan, x: Tensor, w: Tensor, out: torch.dtype, at_out: int,
            k: int, n: int, transposed: bool, precision: str, write: str,
            heads: tuple[int, int] | None, of_x: Activation | None, shared_x: bool) -> Kernels:
    """The kernel for these tensors."""
    size = x.element_size()
    at_w = math.gcd(w.data_ptr(), w.stride(0) * size, w.stride(1) * size)
    return _compiled(plan, k, n, w.shape[1], x.dtype, out, transposed, precision, x.data_ptr(),
                     at_w, at_out, write, heads, of_x, shared_x)


def _compiled(plan: ProductPlan | DirectPlan, k: int, n: int, blocks: int, row: torch.dtype,
              out: torch.dtype, transposed: bool, precision: str, at_x: int, at_w: int,
              at_out: int, write: str, heads: tuple[int, int] | None,
              of_x: Activation | None, shared_x: bool) -> Kernels:
    """The kernel for tensors at multiples of these addresses: loads and stores as wide as those and
    the sizes allow."""
    size = row.itemsize
    from_x, from_w = (math.gcd(16, k * size, at_x),
                      math.gcd(16, (k if transposed else n) * size, at_w))
    precision = precision_of(precision, row, k)
    if isinstance(plan, DirectPlan):
        return segment_direct.kernels(plan, k, n, blocks, row, out, precision, transposed, from_x,
                                      from_w, segment_direct.store_width(n, out, at_out), write,
                                      heads, of_x, shared_x=shared_x)
    # four elements at once need pairs of groups of eight columns
    pairs = plan.tile.columns // plan.tile.warps_n % 16 == 0
    store = math.gcd(n, 4 if pairs else 2, at_out // out.itemsize)
    return kernels(plan, k, n, blocks, row, out, precision, transposed, from_x, from_w, store,
                   write, heads)


def _launch(plan: ProductPlan | DirectPlan, segments: Segments, blocks: int,
            n: int) -> tuple[tuple[int, int], int, int, tuple]:
    """Grid, threads, shared memory, and the kernel's arguments of the segments."""
    if isinstance(plan, DirectPlan):
        height, columns = plan.rows, blocks
        across = segment_direct.grid(plan, segments.tile_bound(height), blocks)
    else:
        height, columns = plan.tile.rows, blocks * -(-n // plan.tile.columns)
        across = grid_blocks(segments.tile_bound(height), columns,
                             plan.tile.blocks_per_sm(plan.shared), _WORTH)
    if columns > _MAX_GRID_Y:
        raise ValueError(f"{columns} column tiles: a grid has at most {_MAX_GRID_Y}")
    return (across, columns), plan.tile.threads, plan.shared, segments.tiled(height)


@functools.lru_cache(maxsize=256)
def _planes(plan: ProductPlan | DirectPlan, n: int, heads: int, width: int) -> int:
    """Number of strips of a warp's columns in which one head may lie; ``strip_of`` of
    segment_epilogue.cuh."""
    tile, tiles = plan.tile, -(-n // plan.tile.columns)

    def strip(column: int) -> int:
        block, inner = divmod(column, n)
        return (block * tiles + inner // tile.columns) * tile.warps_n + inner % tile.columns // (
            tile.columns // tile.warps_n)

    return max(strip((h + 1) * width - 1) - strip(h * width) + 1 for h in range(heads))
