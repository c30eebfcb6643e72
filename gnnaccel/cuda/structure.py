"""Index arrays of a graph as the kernels read them, and the kernels that build them
(``src/structure.cu``)."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda import driver
from gnnaccel.cuda.layout import WARPS
from gnnaccel.cuda.reports import Report, Unread, reports

_THREADS = 256
_COUNTERS, _HOST_AT, _BINS_AT, _BINS = 38, 4, 6, 32
# For the kernel `order` (row_order.cuh): how many places a bitmap covers, the bytes of shared
# memory, the most blocks for long rows, the most entries of a row that a warp puts in order, and
# the rows that a warp has.
_WINDOW, _ORDER_BYTES, _HEAVY_BLOCKS = 1 << 17, (1 << 14) + 4 * (2 * _THREADS + 1), 264
_MOST_SHORT, _GROUP = 256, 4
# For the kernel `scan`: rows of a block, bytes of shared memory.
_SCANNED, _SCAN_BYTES = 4 * _THREADS, 8 * (_THREADS // 32 + 1) + 4 * (_BINS + 1)
_MOST_MADE = 32  # forms of calls remembered for each graph


@dataclass
class Split:
    """Long rows cut into chunks of ``chunk_edges``. Until the report is in, sizes are upper
    bounds."""

    chunk_edges: int
    counters: int  # address of int32 [38]
    memory: Tensor  # in which they lie
    chunks: Tensor  # int32 [max_chunks, 2]: row, number within the row
    heavy: Tensor  # int32 [max_heavy, 4]: row, first chunk, chunks, unused
    report: Report | Unread
    _exact: tuple[int, int] | None = field(default=None)

    def sizes(self) -> tuple[int, int]:
        """(chunks, split rows): exact once the device has reported, bounds before."""
        if self._exact is None:
            words = self.report.words
            if words is None:
                return self.chunks.shape[0], self.heavy.shape[0]
            self._exact = int(words[_HOST_AT]), int(words[_HOST_AT + 1])
        return self._exact

    @property
    def known(self) -> bool:
        """Whether the device has reported. What follows is only to be read then."""
        return self.report.words is not None

    @property
    def invalid(self) -> bool:
        """Whether ids outside the node range were seen (and left out)."""
        return bool(self.report.words[1])  # type: ignore[index]  # known

    @property
    def edges(self) -> int:
        """Edges in the rows, after dropped and added loops."""
        return int(self.report.words[2:4].view(np.int64)[0])  # type: ignore[index]  # known

    @property
    def longest(self) -> int:
        """Edges of the longest row."""
        return int(self.report.words[_HOST_AT + 2])  # type: ignore[index]  # known

    @property
    def split_edges(self) -> int:
        """Edges in split rows."""
        return int(self.report.words[_HOST_AT + 4:_HOST_AT
                                     + 6].view(np.int64)[0])  # type: ignore[index]  # known

    def histogram(self) -> list[int]:
        """Rows by degree: entry b counts the degrees of b bits (0; 1; 2-3; 4-7; ...)."""
        bins = self.report.words[_HOST_AT + _BINS_AT:_HOST_AT + _BINS_AT
                                 + _BINS]  # type: ignore[index]  # known
        return [int(v) for v in np.trim_zeros(bins, "b")]


class Launch(NamedTuple):
    """What every kernel is told of a graph. ``graph``: indptr, other, place, rows; ``slots``: warps
    for chunks, in whole blocks, so that a block holds either chunks or rows; ``split``: counters,
    chunks, chunk_edges, slots; ``merge``: counters, split rows; ``chunks`` and ``heavy`` as
    `Split.sizes`."""

    graph: tuple
    slots: int
    split: tuple
    merge: tuple
    chunks: int
    heavy: int


@dataclass
class Rows:
    """A graph grouped by one end of its edges.

    ``indptr`` [rows + 1] int32 or int64; ``other`` [edges] int32, the other end; ``place`` [edges]
    of indptr's dtype: for the CSC the edge's id in the caller's order (added self loops count after
    the caller's edges), for the transposed graph its place in the CSC. The arrays may be longer
    than ``indptr[-1]``; what lies beyond is never read. ``inverse`` [edges]: of the transposed
    graph, where it was asked for, the place in it of each edge of the CSC. ``made``: what launchers
    found out for calls alike, by what makes them so.
    """

    indptr: Tensor
    other: Tensor
    place: Tensor
    split: Split
    _launch: Launch | None = field(default=None, repr=False)
    inverse: Tensor | None = None
    made: dict[tuple, Any] = field(default_factory=dict, repr=False, compare=False)

    def keep(self, key: tuple, found: Any) -> Any:
        """``found``, kept in `made`."""
        if len(self.made) >= _MOST_MADE:
            self.made.clear()
        self.made[key] = found
        return found

    def launch(self) -> Launch:
        """Kernel parameters; kept once the device has reported exact sizes."""
        return self._launch or self._make_launch()

    def _make_launch(self) -> Launch:
        split = self.split
        known = split.known  # asked first: sizes may become exact in between
        chunks, heavy = split.sizes()
        slots = -(-chunks // WARPS) * WARPS
        counters = split.counters
        found = Launch(
            (self.indptr.data_ptr(), self.other.data_ptr(), self.place.data_ptr(),
             np.int32(self.rows)), slots,
            (counters, split.chunks.data_ptr(), np.int32(split.chunk_edges), np.int32(slots)),
            (counters, split.heavy.data_ptr()), chunks, heavy)
        if known:
            self._launch = found
        return found

    @property
    def settled(self) -> bool:
        """Whether `launch` gives the same from now on."""
        return self._launch is not None

    @property
    def rows(self) -> int:
        return self.indptr.shape[0] - 1

    @property
    def wide(self) -> bool:
        return self.indptr.dtype == torch.int64

    def nbytes(self) -> int:
        parts = (self.indptr, self.other, self.place, self.split.chunks, self.split.heavy,
                 self.inverse)
        return sum(t.nbytes for t in parts if t is not None)


def chunk_edges(edges: int) -> int:
    """Edges that one warp should carry: short enough to balance a GPU of some 8,000 warps, long
    enough to pay. Graphs too small to fill it are bound by launches, so they had better not be
    split at all."""
    if edges < 1 << 18:
        return 256
    return min(1024, max(64, 1 << (edges // 32768).bit_length()))


def _offsets(wide: bool) -> tuple[torch.dtype, tuple]:
    return (torch.int64, (("OFF_T", "i64"),)) if wide else (torch.int32, (("OFF_T", "int"),))


def _launch(entry: str, defines: tuple, blocks: int, args: tuple, shared: int = 0) -> None:
    driver.current().kernel("structure", entry, defines)((blocks, 1), _THREADS, shared, args)


def _blocks(threads: int) -> int:
    return -(-threads // _THREADS)


def prepare() -> None:
    """Compile what builds the structure of graphs with int32 offsets. Raises CompileError."""
    entries = ("count", "scan", "place", "split", "order", "count_src", "place_src")
    for index, loops in (("i64", "0"), ("i64", "1"), ("int", "0")):
        defines = ("INDEX_T", index), ("LOOPS", loops), *_offsets(False)[1]
        for entry in entries:
            driver.current().kernel("structure", entry, defines)


class _Lists(NamedTuple):
    """Long rows and their chunks, as upper bounds allow for, and the report on them."""

    chunks: Tensor
    heavy: Tensor
    report: Report | Unread

    @classmethod
    def of(cls, rows: int, edges: int, limit: int, device: torch.device) -> _Lists:
        max_heavy = min(rows, edges // (limit + 1))
        max_chunks = edges // limit + max_heavy if max_heavy else 0
        return cls(torch.empty(max_chunks, 2, dtype=torch.int32, device=device),
                   torch.empty(max_heavy, 4, dtype=torch.int32, device=device),
                   reports(device).take())

    def arguments(self, counters: int, flags: int) -> tuple:
        return (counters, self.chunks.data_ptr(), self.heavy.data_ptr(), flags,
                self.report.address, np.int32(self.report.tag))


def split_rows(indptr: Tensor, edges: int, flags: Tensor | None = None,
               limit: int | None = None) -> Split:
    """Lists the rows of more than ``limit`` edges (default: by `chunk_edges`) and has the device
    report on them."""
    rows, device = indptr.shape[0] - 1, indptr.device
    limit = limit or chunk_edges(edges)
    lists = _Lists.of(rows, edges, limit, device)
    memory = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
    counters = memory.data_ptr()
    _, defines = _offsets(indptr.dtype == torch.int64)
    _launch("split", (("INDEX_T", "i64"), ("LOOPS", "0")) + defines, _blocks(max(rows, 1)),
            (indptr.data_ptr(), np.int32(rows), np.int32(limit),
             *lists.arguments(counters, flags.data_ptr() if flags is not None else 0)),
            shared=4 * (_BINS + 1))
    return Split(limit, counters, memory, *lists)


class _Counting(NamedTuple):
    """Memory to count in, zeros at first: ``indptr`` [rows + 1], and addresses of what the kernels
    `count` and `scan` need beside it."""

    memory: Tensor
    indptr: Tensor
    counters: int  # int32 [38]
    flags: int  # int32 [2]
    state: int  # int64 [blocks + 1]

    @classmethod
    def of(cls, rows: int, wide: bool, device: torch.device) -> _Counting:
        dtype, _ = _offsets(wide)
        unit = 1 if wide else 2  # offsets in eight bytes
        head = -(-(rows + 1) // unit)
        beside = _COUNTERS // 2 + 1
        memory = torch.zeros(unit * (head + beside + max(1, -(-rows // _SCANNED)) + 1),
                             dtype=dtype, device=device)
        counters = memory.data_ptr() + 8 * head
        return cls(memory, memory[:rows + 1], counters, counters + 4 * _COUNTERS,
                   counters + 8 * beside)

    def scan(self, edges: int, loops: int, flags: int) -> Split:
        """Degrees become offsets; ``edges``: the most that rows may hold."""
        rows, limit = self.indptr.shape[0] - 1, chunk_edges(edges)
        lists = _Lists.of(rows, edges, limit, self.memory.device)
        _, defines = _offsets(self.indptr.dtype == torch.int64)
        _launch("scan", (("INDEX_T", "i64"), ("LOOPS", "0")) + defines,
                max(1, -(-rows // _SCANNED)),
                (self.memory.data_ptr(), np.int32(rows), np.int64(loops), np.int32(limit),
                 self.state, *lists.arguments(self.counters, flags)), shared=_SCAN_BYTES)
        return Split(limit, self.counters, self.memory, *lists)


def _ordered(indptr: Tensor, entries: Tensor, split: Split, place: Tensor) -> Rows:
    """Rows with the entries of each in ascending order of their places: the same in every run.
    ``entries`` [E, 2]: places and other ends, in indptr's dtype; ``place`` [E]: memory for the
    result."""
    total, rows = entries.shape[0], indptr.shape[0] - 1
    _, defines = _offsets(indptr.dtype == torch.int64)
    other = torch.empty(total, dtype=torch.int32, device=indptr.device)
    long = (split if split.chunk_edges <= _MOST_SHORT
            else split_rows(indptr, total, limit=_MOST_SHORT))
    heavy_blocks = min(_HEAVY_BLOCKS, long.heavy.shape[0])
    windows = -(-total // _WINDOW)
    if total:
        _launch("order", (("INDEX_T", "i64"), ("LOOPS", "0")) + defines,
                heavy_blocks * windows + _blocks(32 * -(-rows // _GROUP)),
                (indptr.data_ptr(), np.int32(rows), np.int32(long.chunk_edges), long.counters,
                 long.heavy.data_ptr(), np.int32(heavy_blocks), np.int32(windows),
                 entries.data_ptr(), other.data_ptr(), place.data_ptr()), shared=_ORDER_BYTES)
    return Rows(indptr, other, place, split)


def csc(src: Tensor, dst: Tensor, num_src: int, num_dst: int, loops: int, wide: bool) -> Rows:
    """Groups edges by destination on the device, in the caller's order within a row.

    The host learns nothing.

    Args:
        src, dst: [E] int32 or int64, contiguous. Ids outside the node ranges are left out and
            reported.
        loops: how many nodes get a self loop; existing loops are dropped then. 0 leaves the edges
            as they are.
        wide: int64 offsets.
    """
    edges, device = src.shape[0], src.device
    dtype, offsets = _offsets(wide)
    defines = (("INDEX_T", "i64" if src.dtype == torch.int64 else "int"),
               ("LOOPS", str(int(loops > 0)))) + offsets
    total = edges + loops
    made = _Counting.of(num_dst, wide, device)
    number = torch.empty(total, dtype=dtype, device=device)
    head = (src.data_ptr(), dst.data_ptr(), np.int64(edges), np.int64(num_src), np.int64(num_dst))
    _launch("count", defines, _blocks(edges),
            (*head, made.memory.data_ptr(), number.data_ptr(), made.flags))
    split = made.scan(total, loops, made.flags)
    entries = torch.empty(total, 2, dtype=dtype, device=device)
    _launch("place", defines, _blocks(total),
            (*head, np.int64(loops), made.memory.data_ptr(), number.data_ptr(), made.flags,
             entries.data_ptr()))
    return _ordered(made.indptr, entries, split, number)


def transpose(by_dst: Rows, num_src: int) -> Rows:
    """The graph grouped by source; ``place`` refers to the CSC and ascends within a row."""
    total, device = by_dst.other.shape[0], by_dst.indptr.device
    dtype, offsets = _offsets(by_dst.wide)
    defines = (("INDEX_T", "i64"), ("LOOPS", "0")) + offsets
    made = _Counting.of(num_src, by_dst.wide, device)
    number = torch.empty(total, dtype=dtype, device=device)
    head = (by_dst.indptr.data_ptr(), by_dst.other.data_ptr(), np.int32(by_dst.rows))
    _launch("count_src", defines, _blocks(total),
            (*head, made.memory.data_ptr(), number.data_ptr()))
    split = made.scan(total, 0, 0)
    entries = torch.empty(total, 2, dtype=dtype, device=device)
    _launch("place_src", defines, _blocks(total),
            (*head, made.memory.data_ptr(), number.data_ptr(), entries.data_ptr()))
    return _ordered(made.indptr, entries, split, number)
