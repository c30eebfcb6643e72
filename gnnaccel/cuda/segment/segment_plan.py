"""Plans of the segment products: tiles, warps, stages, shared memory, blocks. The numbers behind
``src/segment_gemm.cu`` and ``src/segment_gemm_grad.cu``, all from sizes that the host knows."""
from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import TYPES
from gnnaccel.cuda.structures.tile_ptr import tile_ptr

# multiprocessors of an H100 or H200; a constant, so that weight gradients have the same bits on
# every GPU
_SMS = 132
_SM_SHARED, _SM_REGISTERS, _SM_THREADS = 227 * 1024, 65536, 2048
# shared memory of a block, so that two fit on a multiprocessor of the larger GPUs
_BUDGET = 112 * 1024
_MAX_TILE = 128  # rows or columns
_FEW = 8
_MOST_MADE = 64  # calls, of which a layer has some six
_LINE = 128  # bytes of a row of x that one step takes
# KiB of shared memory that a block may ask for, by compute capability
_OPTIN_SHARED = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227,
                 120: 99, 121: 99}

#: the compute capability that kernels on a CPU stand for
EMULATED = 90

PRECISIONS = {"fma": "FMA", "fp32": "FP32", "tf32": "TF32"}


class Segments:
    """Rows sorted by segment: those of segment s are ``ptr[s]`` to ``ptr[s + 1] - 1``. To be made
    once per graph, and kept.

    ptr: int32 [S + 1], ascending, from 0 to ``rows``, on the device (contents are not checked,
    which would need the device). ValueError for another dtype or shape.
    """

    __slots__ = ("ptr", "rows", "count", "made", "_tiles")

    def __init__(self, ptr: Tensor, rows: int):
        if ptr.dtype != torch.int32 or ptr.dim() != 1 or len(ptr) < 1 or not ptr.is_contiguous():
            raise ValueError(f"ptr is {ptr.dtype} of shape {tuple(ptr.shape)}: it has to be int32, "
                             "contiguous, with one number more than segments")
        if not 0 <= rows < 2**31 - _MAX_TILE or (rows and len(ptr) == 1):
            raise ValueError(f"{rows} rows in {len(ptr) - 1} segments: rows are counted in int32, "
                             "and each belongs to a segment")
        self.ptr, self.rows, self.count = ptr, rows, len(ptr) - 1
        # prepared calls of launchers, by their keys
        self.made: dict[tuple, Any] = {}
        self._tiles: list[dict[int, Tensor]] = []  # the first counts

    def keep(self, key: tuple, found: Any) -> Any:
        """``found``, kept in `made`."""
        if len(self.made) >= _MOST_MADE:
            self.made.clear()
        self.made[key] = found
        return found

    def prepared(self, make: Callable[..., Any], options: tuple, tensors: tuple) -> Any:
        """``make(self, options, tensors)``, kept for equal options and tensors of the same form."""
        key = (make, *options, *[None if t is None else (t.dtype, t.shape, t.stride(), t.device,
                                                         t.data_ptr() & 15) for t in tensors])
        found = self.made.get(key)
        return self.keep(key, make(self, options, tensors)) if found is None else found

    @property
    def has_tiles(self) -> bool:
        """Whether `tile_ptr` was asked for before, so that it launches nothing."""
        return bool(self._tiles)

    def tile_ptr(self, height: int) -> Tensor:
        """int32 [S + 1]: number of tiles of ``height`` rows, of `tile_ptr.HEIGHTS`, before each
        segment. Memoised: of two threads that make them at once, both get the first's, whose
        addresses prepared calls hold."""
        if not self._tiles:
            self._tiles += [tile_ptr(self.ptr)]
        return self._tiles[0][height]

    def tiled(self, height: int) -> tuple:
        """Kernel arguments: where segments begin, their tiles of ``height`` rows, the number of
        segments."""
        return self.ptr.data_ptr(), self.tile_ptr(height).data_ptr(), np.int32(self.count)

    def tile_bound(self, height: int) -> int:
        """Upper bound of the number of tiles: each segment with rows has at most one that is not
        full."""
        return self.rows // height + min(self.count, self.rows)


@functools.cache
def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that one block may have."""
    major, minor = (torch.cuda.get_device_capability(device) if device.type == "cuda"
                    else divmod(EMULATED, 10))
    return shared_of(10 * major + minor)


def shared_of(arch: int) -> int:
    """`shared_limit` of a compute capability, as 90."""
    return 1024 * _OPTIN_SHARED.get(arch, 64)


def up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def side_stride(width: int) -> int:
    """``SIDE_STRIDE`` of segment_rows.cuh."""
    return width + 8 if width % 16 == 0 else width


def _columns(n: int, most: int) -> int:
    """Columns of a tile: at most ``most``, as even as can be."""
    return 8 if n <= 8 else up(-(-n // -(-n // most)), 16)


@dataclass(frozen=True)
class Tile:
    """rows x columns of a block's result, in warps_m x warps_n parts."""

    rows: int
    columns: int
    warps_m: int
    warps_n: int

    @functools.cached_property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    def blocks_per_sm(self, shared: int) -> int:
        values = self.rows * self.columns // self.threads  # accumulators of a thread
        registers = self.threads * (168 if values > 32 else 128 if values > 8 else 80)
        return max(1, min(16, _SM_SHARED // (shared + 1024), _SM_REGISTERS // registers,
                          _SM_THREADS // self.threads))

    def defines(self, shared: int, precision: str, dtype: torch.dtype) -> dict:
        return dict(WM=self.rows // self.warps_m, WN=self.columns // self.warps_n,
                    WARPS_M=self.warps_m, WARPS_N=self.warps_n,
                    BLOCKS_PER_SM=self.blocks_per_sm(shared), PRECISION=precision,
                    ROW_T=TYPES[dtype])


def _tile(rows: int, columns: int) -> Tile:
    """Warps of 32 x 64 in large tiles, of less in small ones; 16 x 8 is the least."""
    warps = 8 if rows * columns > 64 * 128 else 4
    warps_m = max(1, rows // 32)
    warps_n = next(w for w in range(max(1, warps // warps_m), 0, -1) if columns % (8 * w) == 0)
    return Tile(rows, columns, warps_m, warps_n)


def tile_rows(rows: int, segments: int) -> int:
    """Rows of a tile of the product: fewer where segments are short or rows few."""
    height = _MAX_TILE
    while height > 16 and (2 * height * segments > rows or rows < 4 * _SMS * height):
        height //= 2
    return height


def precision_of(precision: str, dtype: torch.dtype, terms: int = _FEW + 1) -> str:
    """The kernels' name for sums of ``terms`` products. ValueError for an unknown one.

    Short sums are made by fp32 multiply-adds: they would show the tensor cores' rounding, and
    memory takes their time anyway.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision is one of {sorted(PRECISIONS)}, not {precision!r}")
    if precision == "fp32" and dtype == torch.float32 and terms <= _FEW:
        return "FMA"
    return PRECISIONS[precision] if dtype == torch.float32 or precision == "fma" else "HALF"


@dataclass(frozen=True)
class ProductPlan:
    """One way to compute the product: W's columns ``resident`` in shared memory or in pieces along
    with X."""

    tile: Tile
    depth: int  # values of k in a step
    chunks: int
    resident: bool
    stages: int
    shared: int  # bytes

    def defines(self) -> dict:
        return dict(TR=self.tile.rows, TN=self.tile.columns, TK=self.depth, CHUNKS=self.chunks,
                    RESIDENT=int(self.resident), STAGES=self.stages)


def _product_shared(tile: Tile, depth: int, chunks: int, size: int, transposed: bool, dots: bool,
                    resident: bool, stages: int) -> int:
    pad, w_depth = 16 // size, depth * chunks if resident else depth
    w = tile.columns * (w_depth + pad) if transposed else w_depth * side_stride(tile.columns)
    elements = stages * tile.rows * (depth + pad) + (1 if resident else stages) * w
    scratch = tile.threads // 32 * 16 * (tile.columns // tile.warps_n + 1) if dots else 0
    return elements * size + 4 * (2 * tile.rows + scratch)


@functools.cache
def product_plan(k: int, n: int, dtype: torch.dtype, rows: int, transposed: bool, dots: bool,
                 limit: int) -> ProductPlan:
    """The first plan that fits: wide tiles, W resident, three stages are best. Tiles have ``rows``
    rows, fewer where they are wide."""
    size = dtype.itemsize
    step, chunks = 32 // size, -(-k * size // _LINE)
    depth = up(-(-k // chunks), step)
    for most in (_MAX_TILE, 64, 32, 16):
        columns = _columns(n, most)
        # two blocks of four warps do better than one of eight
        tile = _tile(rows if columns <= 64 else min(rows, 64), columns)
        for resident, stages in ((True, 3), (True, 2), (False, 3), (False, 2)):
            shared = _product_shared(tile, depth, chunks, size, transposed, dots, resident, stages)
            if shared <= min(limit, _BUDGET):
                return ProductPlan(tile, depth, chunks, resident, stages, shared)
    # 2 stages of 128 rows and 16 columns: 52 KiB
    raise AssertionError("the smallest tile fits every GPU")


@dataclass(frozen=True)
class GradPlan:
    """A tile of dW (rows: of K), and how many stages of tiles of ``lines`` rows are in flight."""

    tile: Tile
    lines: int
    stages: int
    shared: int

    def defines(self) -> dict:
        return dict(TR=self.lines, TA=self.tile.rows, TN=self.tile.columns, STAGES=self.stages)


def _grad_tile(height: int, columns: int) -> Tile:
    """Tile of a weight gradient. The fewer warps share a line of X, the less often it is split:
    measured for tiles of 64 lines."""
    if height == 64 and columns == 64:
        return Tile(64, 64, 1, 2)
    return (Tile(64, columns, 1, 4) if height == 64 and columns > 64 and columns % 32 == 0
            else _tile(height, columns))


def _of_few(n: int) -> tuple[Tile, int, int]:
    """Tile, lines and stages where rows of x have at most 16 fp32 numbers: the fastest of sixteen
    on an H200 (docs/notes/relational.md)."""
    return (Tile(16, 64, 1, 4), 64, 2) if n == 64 else (Tile(16, 64, 1, 2), 16, 4)


def _grad_shared(tile: Tile, lines: int, stages: int, size: int) -> int:
    """Bytes of a block: stages of both sides' rows, and numbers of rows."""
    elements = stages * lines * (side_stride(tile.rows) + side_stride(tile.columns))
    return elements * size + 4 * 3 * (stages + 1) * lines


@functools.cache
def grad_plan(k: int, n: int, dtype: torch.dtype, limit: int) -> GradPlan:
    """The first plan that fits. Large tiles are best; of half types, and of wide tiles, two stages
    of 64 lines, else three of 32."""
    size = dtype.itemsize
    if k <= 16 and n % 64 == 0 and size == 4:
        tile, lines, stages = _of_few(n)
        return GradPlan(tile, lines, stages, _grad_shared(tile, lines, stages, size))
    for most in (_MAX_TILE, 64, 32):
        height = min(64, next(h for h in (16, 32, 64, 128) if h >= -(-k // -(-k // most))))
        tile = _grad_tile(height, _columns(n, most))
        long = tile.threads >= 64 and (size == 2 or tile.columns > 64)
        for lines, stages in (((64, 2),) if long else ()) + ((32, 3), (32, 2)):
            shared = _grad_shared(tile, lines, stages, size)
            if shared <= min(limit, _BUDGET):
                return GradPlan(tile, lines, stages, shared)
    raise AssertionError("the smallest tile fits every GPU")  # 2 stages of 32 x (40 + 40): 22 KiB


def grid_blocks(tiles: int, columns: int, per_sm: int, worth: int) -> int:
    """Blocks for at most ``tiles`` tiles in each of ``columns`` columns of the grid.

    The number is as many as run at once, and up to four times that as long as each still gets
    ``worth`` tiles: later blocks even out the unequal times of earlier ones.
    """
    concurrent = max(1, _SMS * per_sm // columns)
    return min(tiles, concurrent * max(1, min(4, tiles // (worth * concurrent))))


def as_defines(*parts: dict) -> tuple:
    """``-D`` definitions as drivers take them."""
    return tuple((name, str(value)) for part in parts for name, value in part.items())
