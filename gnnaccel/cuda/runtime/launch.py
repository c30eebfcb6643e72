"""Small functions that every launcher needs, each of which runs at every call, so does as little as
it can; and the layout of a warp over the features of one node, the numbers behind
``src/layout.cuh``."""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.runtime import driver

WARPS = 4  # per block, as in layout.cuh
MAX_WIDTH = 512  # channels per head that fit a warp's registers
_REGISTERS = 16  # fp32 values of one row that a lane may hold

TYPES = {torch.float32: "float", torch.float16: "f16", torch.bfloat16: "bf16"}
#: types of rows that are gathered: int8 with a scale per row (`quantize.Int8Rows`) as well
ROW_TYPES = {**TYPES, torch.int8: "q8"}
THREADS = 32 * WARPS
_NONE = (0, 0, 0)
NOTHING = None, _NONE  # a `workspace` of no chunks, for callers who look at the chunks first


class Kernels:
    """The kernels of one family with one set of definitions, looked up once per driver."""

    __slots__ = ("family", "defines", "_found")

    def __init__(self, family: str, defines: tuple):
        self.family, self.defines = family, defines
        # (driver, entry -> kernel), replaced as one: threads see both or neither
        self._found: tuple = (None, {})

    def __call__(self, entry: str):
        # `driver.current`, without its call; slices, since another thread may take the last one out
        last = driver.in_place[-1:] or driver.process
        current = last[0] if last else driver.current()
        owner, kernels = self._found
        if owner is not current:
            kernels = {}
            self._found = current, kernels
        kernel = kernels.get(entry)
        if kernel is None:
            kernel = kernels[entry] = current.kernel(self.family, entry, self.defines)
        return kernel


def grid(items: int, layout: Layout, per_warp: int = 1) -> tuple[int, int]:
    """Blocks for ``items`` warps' worth of work, and the tiles of heads."""
    per_block = WARPS * per_warp
    return -(-items // per_block), layout.tiles


def pointer(t: Tensor | None) -> int:
    """A tensor's address, the null pointer for None."""
    return 0 if t is None else t.data_ptr()


def dense(t: Tensor) -> Tensor:
    """The tensor contiguous, and aligned for the widest load."""
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


def fp32(t: Tensor | None) -> Tensor | None:
    """The tensor contiguous, in fp32; None stays None."""
    return None if t is None else t.float().contiguous()


def sent(words: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[words] on the device. The copy is from pinned memory, so that nobody waits; torch's
    allocator lends that memory to nobody else before the copy is done."""
    table = torch.empty(len(words), dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    table.numpy()[:] = words
    return table.to(device, non_blocking=True)


def rows_like(t: Tensor) -> Tensor:
    """Memory for numbers of ``t``'s shape and type, with the strides of a new tensor.

    Strides of ``t`` may be any where a size is 1, and a product that adds to a tensor with such
    strides fails on a GPU (cuBLAS, INVALID_VALUE).
    """
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def workspace(chunks: int, sizes: tuple[int, int, int],
              device: torch.device) -> tuple[Tensor | None, tuple[int, int, int]]:
    """fp32 memory for up to three arrays [chunks, size], and their addresses; null where there is
    nothing to hold."""
    if not chunks:
        return None, _NONE
    first, second, third = sizes
    first, second, third = chunks * first, chunks * second, chunks * third
    memory = torch.empty(first + second + third, dtype=torch.float32, device=device)
    base = memory.data_ptr()
    return memory, (base, base + 4 * first if second else 0,
                    base + 4 * (first + second) if third else 0)


def over_rows(graph: Any, layout: Layout, compiled: Kernels, entry: str, inputs: tuple,
              sizes: tuple[int, ...], finish: str, results: tuple, before: tuple = (),
              arrays: int = 0) -> None:
    """Launches ``entry`` over the rows and chunks of a graph (`structure.Rows`), with ``inputs``
    and addresses of fp32 [chunks, size] for each of the ``sizes``; then ``finish`` over the rows
    that are split, if any, with the first ``arrays`` of the graph, ``before``, these addresses, and
    ``results``."""
    launch = graph.launched or graph.launch()
    chunks, row, at = launch.chunks, 0, 0
    parts: tuple[int, ...] = ()
    for size in sizes:
        row += size
    if chunks:
        memory = torch.empty(chunks * row, dtype=torch.float32, device=graph.indptr.device)
        at = memory.data_ptr()
    for size in sizes:
        parts, at = (*parts, at if size else 0), at + 4 * chunks * size
    # `grid`, without its calls
    compiled(entry)((-(-(launch.slots + graph.rows) // WARPS), layout.tiles), THREADS, 0,
                    launch.graph + launch.split + inputs + parts)
    if launch.heavy:
        compiled(finish)((-(-launch.heavy // WARPS), layout.tiles), THREADS, 0,
                         launch.merge + launch.graph[:arrays] + before + parts + results)


def row_kernels(family: str, layout: Layout, dtype: torch.dtype, wide: bool,
                **flags: int) -> Kernels:
    """The kernels for rows of ``dtype`` over a graph, with int64 offsets if ``wide``. ValueError
    for a dtype that none covers."""
    if dtype not in TYPES:
        raise ValueError(f"dtype={dtype}: the {family} kernels know {', '.join(map(str, TYPES))}")
    return Kernels(family, (*layout.defines(), ("ROW_T", TYPES[dtype]),
                            ("OFF_T", "i64" if wide else "int"), ("DROPOUT", "0"),
                            *((name, str(int(value))) for name, value in flags.items())))


def check_dense(graph: Any, like: Tensor, **tensors: tuple[Tensor, int | None]) -> None:
    """ValueError unless all are dense rows like ``like``, as many as said, and the graph
    (`structure.Rows`) has places."""
    device = graph.indptr.device
    for name, (t, rows) in tensors.items():
        if (t.dim() != 2 or rows is not None and t.shape[0] != rows or t.shape[1:] != like.shape[1:]
            or t.dtype != like.dtype or t.device != device or not t.is_contiguous()
            or t.data_ptr() % 16):
            raise ValueError(f"{name} is {list(t.shape)}, {t.dtype}, on {t.device}, strides "
                             f"{list(t.stride())}; needed is [{'any' if rows is None else rows}, "
                             f"{like.shape[-1]}], {like.dtype}, contiguous, aligned, on {device}")
    if graph.place.shape[0] != graph.other.shape[0]:
        raise no_places(graph)


def check_graph(variant: Any, graph: Any, places: bool) -> None:
    """ValueError unless the graph (`structure.Rows`) has the variant's offsets, and ``places`` if
    they are read."""
    if graph.wide != variant.wide:
        raise wrong_offsets(variant, graph)
    if places and graph.place.shape[0] != graph.other.shape[0]:
        raise no_places(graph)


def wrong_offsets(variant: Any, graph: Any) -> ValueError:
    """The error for a graph whose offsets are not the variant's."""
    return ValueError(f"the graph's offsets are {graph.indptr.dtype}, but the variant has "
                      f"wide={variant.wide}")


def no_places(graph: Any) -> ValueError:
    """The error for a graph without places."""
    return ValueError(f"the graph has {graph.place.shape[0]} places for {graph.other.shape[0]} "
                      "edges: build it with places=True")


def wrong_weight(variant: Any, weight: Tensor | None) -> ValueError:
    """The error for a weight where the variant has none, or for none where it has one."""
    return ValueError(f"weight is {'missing' if weight is None else 'given'}, but the variant "
                      f"has weight={variant.weight!r}")


@dataclass(frozen=True)
class RowVariant:
    """Heads x width of a row; ``row``/``out``: dtypes of the gathered rows and of the result;
    ``edge``: there are edge features; ``train``: tensors are saved for backward; ``wide``: int64
    offsets."""

    heads: int
    width: int
    row: torch.dtype
    out: torch.dtype
    edge: bool = False
    dropout: bool = False
    train: bool = False
    wide: bool = False

    @functools.cached_property
    def layout(self) -> Layout:
        return layout_for(self.heads, self.width)

    def defines(self, unroll: int | None = None, **more) -> tuple:
        """``-D`` definitions: the layout's, the common ones, and ``more``."""
        return self.layout.defines(unroll) + self.flags(**more)

    def flags(self, **more) -> tuple:
        """The definitions that do not depend on the layout."""
        flags = dict(ROW_T=ROW_TYPES[self.row], OUT_T=TYPES[self.out],
                     OFF_T="i64" if self.wide else "int", EDGE=int(self.edge),
                     DROPOUT=int(self.dropout), **more)
        return tuple((k, str(v)) for k, v in flags.items())


# --- layout ---------------------------------------------------------------------------------------

def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@dataclass(frozen=True)
class Layout:
    """Heads x width over the lanes; see ``layout.cuh`` for the meaning of the short names."""

    heads: int
    width: int
    vec: int
    lh: int
    kv: int
    hl: int
    kh: int
    int8: bool = False

    @functools.cached_property
    def tile_heads(self) -> int:
        return self.hl * self.kh

    @functools.cached_property
    def step(self) -> np.int32:
        """Numbers from one head of a row to the next, as kernels take it."""
        return np.int32(self.width)

    @functools.cached_property
    def tiles(self) -> int:
        """Number of tiles of heads of a row: the grid's y size."""
        return -(-self.heads // self.tile_heads)

    @functools.cached_property
    def slots(self) -> int:
        """Rows that a warp treats side by side."""
        return 32 // (self.lh * self.hl)

    @functools.cached_property
    def packs(self) -> int:
        return self.kh * self.kv

    @functools.cached_property
    def unroll(self) -> int:
        """Rows in flight per slot: as many as keep the kernel below about 64 registers. Four int8
        take one register; for int8 the number is a power of two (layout.cuh)."""
        if self.int8:
            return max(1, min(4, 1 << (16 // (self.packs * -(-self.vec // 4))).bit_length() - 1))
        return max(1, min(4, 16 // (self.packs * self.vec)))

    @functools.cached_property
    def direct(self) -> bool:
        """Whether so few lanes share a head that each may as well score for itself
        (additive_direct.cuh)."""
        return self.lh <= (2 if self.int8 else 4)

    @functools.cached_property
    def scratch(self) -> int:
        """Bytes of shared memory for ``Scratch`` (merge.cuh), per block; a warp's begins at 8."""
        heads = self.tile_heads
        return WARPS * (2 * 32 * heads + heads + heads % 2) * 4

    def defines(self, unroll: int | None = None) -> tuple:
        values = dict(H=self.heads, D=self.width, VEC=self.vec, LH=self.lh, KV=self.kv, HL=self.hl,
                      KH=self.kh, UNROLL=unroll or self.unroll)
        return tuple((k, str(v)) for k, v in values.items())


@functools.cache
def layout_for(heads: int, width: int, int8: bool = False, most_heads: int = 512) -> Layout:
    """The layout for ``heads`` x ``width`` features, of which a lane loads up to 16 int8 at once,
    or else up to 4; a tile has at most ``most_heads`` heads, a power of two. ValueError for sizes
    the kernels do not cover."""
    if heads < 1 or not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"heads={heads}, width={width}: the kernels take heads >= 1 and 1 <= "
                         f"width <= {MAX_WIDTH}")
    vec = next(v for v in ((16, 8) if int8 else ()) + (4, 2, 1) if width % v == 0)
    packs = width // vec
    lh = min(32, _power_of_two(packs))
    kv = -(-packs // lh)
    hl = min(32 // lh, _power_of_two(heads), most_heads)
    room = max(1, _REGISTERS // (kv * vec))
    kh = min(_power_of_two(-(-heads // hl)), 1 << (room.bit_length() - 1), 32 // hl,
             most_heads // hl)
    return Layout(heads, width, vec, lh, kv, hl, kh, int8)


@functools.cache
def factored(width: int, int8: bool = False) -> tuple[int, int]:
    """(heads, D) with heads * D = ``width`` and D at most 512, for rows that have no weights per
    head. `aggregate.Variant` does it itself for int8.

    The split whose lanes load least, one more load counted per tile of heads since each tile reads
    the graph anew; among equals the fewest heads. A prime above 512 becomes that many heads of one
    channel. ValueError below 1.
    """
    if width < 1:
        raise ValueError(f"width={width}: a row has at least one channel")

    def cost(channels: int) -> tuple[int, int]:
        layout = layout_for(width // channels, channels, int8)
        return layout.tiles * (layout.packs + 1) * layout.lh * layout.hl, width // channels

    best = min((d for d in range(1, min(width, MAX_WIDTH) + 1) if width % d == 0), key=cost)
    return width // best, best


@functools.cache
def layout_of(width: int) -> Layout:
    """The layout of rows of ``width`` numbers that have no weights per head."""
    return layout_for(*factored(width))
