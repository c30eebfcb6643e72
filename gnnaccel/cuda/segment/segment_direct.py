"""Products of rows with their segment's matrix where the matrix fits in shared memory whole
(``src/segment_direct.cu``)."""
from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from gnnaccel.cuda.runtime.launch import TYPES, Kernels
from gnnaccel.cuda.segment.segment_plan import Tile, as_defines
from gnnaccel.cuda.traverse import activation
from gnnaccel.cuda.traverse.activation import Activation

__all__ = ["DirectPlan", "direct_plan", "grid", "kernels"]

_SMS = 132  # multiprocessors of an H100 or H200
_SM_SHARED = 227 * 1024
_WARPS = 16  # warps of a multiprocessor, so that each lane has 128 registers
_MOST = 128  # rows or columns of a matrix
_HIDDEN = 64  # of two whose products a warp makes one after another
# bytes of a block; sm_75 has less, and none of the tensor core operations that this is made for
_LEAST_SHARED = 96 * 1024


@dataclass(frozen=True)
class DirectPlan:
    """One way to compute the product with all of W in shared memory."""

    rows: int  # rows of a warp's tile
    columns: int
    warps: int  # warps of a block
    depth: int  # chunks of k that are loaded ahead
    group: int  # groups of eight columns whose products are interleaved
    per_sm: int  # blocks of a multiprocessor
    shared: int  # bytes

    @property
    def tile(self) -> Tile:
        return Tile(self.rows * self.warps, self.columns, self.warps, 1)

    def defines(self, precision: str, dtype: torch.dtype) -> dict:
        return dict(TR=self.rows, TN=self.columns, WM=self.rows, WN=self.columns,
                    WARPS_M=self.warps, WARPS_N=1, DEPTH=self.depth, GROUP=self.group,
                    BLOCKS_PER_SM=self.per_sm, PRECISION=precision, ROW_T=TYPES[dtype])


def shared_bytes(k: int, n: int, dtype: torch.dtype, precision: str, dots: bool, warps: int) -> int:
    """Bytes of W, in two parts for three-fold products, a flag, and inner products' memory."""
    scratch = warps * 16 * (n + 1) * 4 if dots else 0
    return k * n * dtype.itemsize * (2 if precision == "FP32" else 1) + 16 + scratch


def depth_of(k: int, dtype: torch.dtype, most: int) -> int:
    """Chunks ahead, a divisor of their number; ``CHUNKS`` of segment_fragments.cuh."""
    size = k * dtype.itemsize
    chunks = size // 64 if size % 64 == 0 else size // 32
    return max(depth for depth in range(1, most + 1) if chunks % depth == 0)


#: Plans for matrices of about 128 x 128, by precision: rows, warps of a block, chunks ahead, blocks
#: of a multiprocessor. The fastest of six on an H200; docs/notes/relational.md has them all.
_WIDE = 96 * 128
_WIDE_PLANS = {"FP32": (32, 8, 2, 1), "TF32": (16, 4, 4, 3), "HALF": (16, 8, 4, 1)}


#: The same by (k, n, precision), measured on mag's pairs: registers for two chunks of rows, split,
#: beat warps (1.70 -> 1.50 ms); four warps with four chunks ahead, three blocks of them, beat eight
#: with two (2.03 -> 1.97).
_OWN_PLANS = {(128, 64, "FP32"): (16, 4, 2, 2), (64, 128, "FP32"): (16, 4, 4, 3)}


def _measured_plan(k: int, n: int, dtype: torch.dtype, precision: str, dots: bool,
                   limit: int) -> DirectPlan | None:
    sizes = (_OWN_PLANS.get((k, n, precision))
             or (_WIDE_PLANS[precision] if k * n >= _WIDE else None))
    if sizes is None:
        return None
    rows, warps, depth, per_sm = sizes
    shared = shared_bytes(k, n, dtype, precision, dots, warps)
    fits = shared <= limit and per_sm * (shared + 1024) <= _SM_SHARED
    return (DirectPlan(rows, n, warps, depth_of(k, dtype, depth), 2, per_sm, shared) if fits
            else None)


@functools.cache
def direct_plan(k: int, n: int, dtype: torch.dtype, precision: str, dots: bool,
                limit: int) -> DirectPlan | None:
    """The plan, or None where W does not fit, or is no multiple of a warp's reads and products."""
    if (precision == "FMA" or max(k, n) > _MOST or k * dtype.itemsize % 32 or n % 8
        or limit < _LEAST_SHARED):
        return None
    best = _measured_plan(k, n, dtype, precision, dots, limit)
    if best is not None:
        return best
    for warps in (4, 8, 16):  # the fewest in a block with which most fit
        shared = shared_bytes(k, n, dtype, precision, dots, warps)
        per_sm = min(_WARPS // warps, _SM_SHARED // (shared + 1024))
        if shared <= limit and (best is None or warps * per_sm > best.warps * best.per_sm):
            best = DirectPlan(16, n, warps, depth_of(k, dtype, 4 if n <= 64 else 2), 2, per_sm,
                              shared)
    return best


@functools.cache
def plan_of_two(first: int, k: int, n: int, precision: str, limit: int) -> DirectPlan | None:
    """The plan for two products of fp32 rows, [first, k] and [k, n]; None where there is none."""
    if (precision == "FMA" or max(k, n) > _HIDDEN or first > _HIDDEN or first % 16 or k % 16
        or n % 16 or limit < _LEAST_SHARED):
        return None
    shared = (first + n) * k * 4 * (2 if precision == "FP32" else 1) + 16
    per_sm = min(3, _SM_SHARED // (shared + 1024))
    return DirectPlan(16, n, 4, depth_of(first, torch.float32, 2), 2, per_sm, shared)


@functools.lru_cache(maxsize=256)
def kernels(plan: DirectPlan, k: int, n: int, blocks: int, row: torch.dtype, out: torch.dtype,
            precision: str, transposed: bool, load_x: int, load_w: int, store: int, write: str,
            heads: tuple[int, int] | None, of_x: Activation | None = None,
            first: int = 0, shared_x: bool = False) -> Kernels:
    """The kernels for a plan. load_x, load_w: bytes of one load; store: elements of one store;
    write: as for `segment_gemm.kernels`; of_x: what is done to rows as they are read; first:
    columns of rows in memory that a first product maps to x, 0 without one; shared_x: all blocks
    take the same rows of K columns."""
    h, d = heads or (1, 1)
    return Kernels(activation.family("segment_direct", of_x), as_defines(
        dict(K=k, N=n, BLOCKS=blocks, OUT_T=TYPES[out], TRANSPOSED=int(transposed), LOAD_X=load_x,
             LOAD_W=load_w, STORE=store, SIDE=max(1, store // 2), WRITE=write,
             DOTS=int(heads is not None), H=h, D=d),
        plan.defines(precision, row), {"FIRST": first} if first else {},
        {"X_BLOCKS": 1} if shared_x else {}))


def store_width(n: int, out: torch.dtype, alignment: int) -> int:
    """Elements of one store of rows that begin at multiples of ``alignment`` bytes: as many as a
    lane can have side by side."""
    return max(1, math.gcd(n // 4, 16 // out.itemsize, alignment // out.itemsize))


def grid(plan: DirectPlan, tiles: int, blocks: int) -> int:
    """Blocks for ``tiles`` tiles of each of ``blocks`` diagonal blocks: no more than run at once,
    and as few as do it in the same number of turns of their warps."""
    warps = max(1, _SMS * plan.per_sm // blocks) * plan.warps
    turns = -(-tiles // warps)
    return -(-tiles // (turns * plan.warps))
