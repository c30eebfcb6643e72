"""Index arrays of a graph as the kernels read them, and the kernels that build them
(``src/structure.cu``)."""
from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda import capture, driver
from gnnaccel.cuda.layout import WARPS

_THREADS = 256
_SLOT = 48  # int32 words per report; the layout stands in structure.cu, above the kernel `split`
_COUNTERS, _HOST_AT, _BINS_AT, _BINS = 38, 4, 6, 32
_SLOTS = 1024  # per slab
# For the kernel `order` (row_order.cuh): how many places a bitmap covers, the bytes of shared
# memory, the most blocks for long rows, and the most entries of a row that a warp puts in order.
_WINDOW, _ORDER_BYTES, _HEAVY_BLOCKS = 1 << 17, (1 << 14) + 4 * (2 * _THREADS + 1), 264
_MOST_SHORT = 256
_MOST_MADE = 32  # forms of calls remembered for each graph


class Reports:
    """Small pinned memory that kernels write and the host reads without ever waiting.

    Slots are lent and taken back. A kernel may still be running when its slot is lent again, so
    each loan has a tag, which the kernel writes last: a report with another tag belongs to another
    loan. A captured CUDA graph reports at each replay, long after its loan would have ended: it
    writes to a slot that is never lent and that nobody reads.
    """

    def __init__(self, pinned: bool):
        self._pinned = pinned
        self._slabs: list[Tensor] = []
        self._free: list[tuple[int, np.ndarray]] = []
        self._unread: int | None = None
        self._tags = itertools.count(1)
        self._lock = threading.Lock()

    def take(self) -> Report | Unread:
        captured = capture.current()
        with self._lock:
            if captured and self._unread is not None:
                return Unread(self._unread)
            if not self._free:
                slab = torch.zeros(_SLOTS, _SLOT, dtype=torch.int32, device="cpu",
                                   pin_memory=self._pinned)
                self._slabs.append(slab)
                self._free = [(slab.data_ptr() + i * _SLOT * 4, slab.numpy()[i])
                              for i in range(_SLOTS)]
            address, words = self._free.pop()
            if self._unread is None:
                self._unread = address
                address, words = self._free.pop()
            if captured:
                return Unread(self._unread)
        return Report(self, address, words, next(self._tags) % 0x7FFFFFFF + 1)

    def give_back(self, address: int, words: np.ndarray) -> None:
        self._free.append((address, words))


class Report:
    """What the device tells of one built index array; ``words`` once it has, None before."""

    __slots__ = ("_owner", "address", "_slot", "tag", "_words", "__weakref__")

    def __init__(self, owner: Reports, address: int, slot: np.ndarray, tag: int):
        self._owner, self.address, self._slot, self.tag, self._words = (owner, address, slot, tag,
                                                                        None)

    @property
    def words(self) -> np.ndarray | None:
        if self._words is None and self._slot[0] == self.tag:
            words = self._slot.copy()
            # else a late kernel of the slot's earlier borrower is writing
            if self._slot[0] == self.tag:
                self._words = words
        return self._words

    def __del__(self) -> None:
        self._owner.give_back(self.address, self._slot)


class Unread:
    """The report of a captured CUDA graph; each replay has other edges, so the host reads none."""

    __slots__ = ("address",)
    words, tag = None, 1

    def __init__(self, address: int):
        self.address = address


_reports: dict[bool, Reports] = {}
_reports_lock = threading.Lock()


def reports(device: torch.device) -> Reports:
    pinned = device.type == "cuda"
    with _reports_lock:
        if pinned not in _reports:
            _reports[pinned] = Reports(pinned)
        return _reports[pinned]


@dataclass
class Split:
    """Long rows cut into chunks of ``chunk_edges``. Until the report is in, sizes are upper
    bounds."""

    chunk_edges: int
    counters: Tensor  # int32 [38]
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
        counters = split.counters.data_ptr()
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


def _launch(entry: str, defines: tuple, threads: int, args: tuple, shared: int = 0) -> None:
    driver.current().kernel("structure", entry, defines)((-(-threads // _THREADS), 1), _THREADS,
                                                         shared, args)


def prepare() -> None:
    """Compile what builds the structure of graphs with int32 offsets. Raises CompileError."""
    entries = ("count", "place", "split", "order", "count_src", "place_src")
    for index, loops in (("i64", "0"), ("i64", "1"), ("int", "0")):
        defines = ("INDEX_T", index), ("LOOPS", loops), *_offsets(False)[1]
        for entry in entries:
            driver.current().kernel("structure", entry, defines)


def _scan(degree: Tensor) -> Tensor:
    """[rows + 1] offsets from [rows] degrees."""
    indptr = torch.zeros(degree.shape[0] + 1, dtype=degree.dtype, device=degree.device)
    torch.cumsum(degree, 0, dtype=degree.dtype, out=indptr[1:])
    return indptr


def split_rows(indptr: Tensor, edges: int, flags: Tensor | None = None,
               limit: int | None = None) -> Split:
    """Lists the rows of more than ``limit`` edges (default: by `chunk_edges`) and has the device
    report on them."""
    rows, device = indptr.shape[0] - 1, indptr.device
    limit = limit or chunk_edges(edges)
    max_heavy = min(rows, edges // (limit + 1))
    max_chunks = edges // limit + max_heavy if max_heavy else 0
    counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
    chunks = torch.empty(max_chunks, 2, dtype=torch.int32, device=device)
    heavy = torch.empty(max_heavy, 4, dtype=torch.int32, device=device)
    report = reports(device).take()
    _, defines = _offsets(indptr.dtype == torch.int64)
    _launch("split", (("INDEX_T", "i64"), ("LOOPS", "0")) + defines, max(rows, 1),
            (indptr.data_ptr(), np.int32(rows), np.int32(limit), counters.data_ptr(),
             chunks.data_ptr(), heavy.data_ptr(), flags.data_ptr() if flags is not None else 0,
             report.address, np.int32(report.tag)), shared=4 * (_BINS + 1))
    return Split(limit, counters, chunks, heavy, report)


def _ordered(indptr: Tensor, other: Tensor, place: Tensor, split: Split) -> Rows:
    """Rows with the entries of each in ascending order of ``place``: the same in every run."""
    total, rows = other.shape[0], indptr.shape[0] - 1
    _, defines = _offsets(indptr.dtype == torch.int64)
    other_out, place_out = torch.empty_like(other), torch.empty_like(place)
    long = (split if split.chunk_edges <= _MOST_SHORT
            else split_rows(indptr, total, limit=_MOST_SHORT))
    heavy_blocks = min(_HEAVY_BLOCKS, long.heavy.shape[0])
    windows = -(-total // _WINDOW)
    blocks = heavy_blocks * windows + -(-rows // (_THREADS // 32))
    if total:
        _launch("order", (("INDEX_T", "i64"), ("LOOPS", "0")) + defines, blocks * _THREADS,
                (indptr.data_ptr(), np.int32(rows), np.int32(long.chunk_edges),
                 long.counters.data_ptr(), long.heavy.data_ptr(), np.int32(heavy_blocks),
                 np.int32(windows), other.data_ptr(), place.data_ptr(), other_out.data_ptr(),
                 place_out.data_ptr()), shared=_ORDER_BYTES)
    return Rows(indptr, other_out, place_out, split)


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
    degree = torch.zeros(num_dst, dtype=dtype, device=device)
    flags = torch.zeros(2, dtype=torch.int32, device=device)
    head = (src.data_ptr(), dst.data_ptr(), np.int64(edges), np.int64(num_src), np.int64(num_dst),
            np.int64(loops))
    _launch("count", defines, total, head + (degree.data_ptr(), flags.data_ptr()))
    indptr = _scan(degree)
    col = torch.empty(total, dtype=torch.int32, device=device)
    eid = torch.empty(total, dtype=dtype, device=device)
    cursor = degree.zero_()
    _launch("place", defines, total, head + (indptr.data_ptr(), cursor.data_ptr(),
                                             flags.data_ptr(), col.data_ptr(), eid.data_ptr()))
    return _ordered(indptr, col, eid, split_rows(indptr, total, flags))


def transpose(by_dst: Rows, num_src: int) -> Rows:
    """The graph grouped by source; ``place`` refers to the CSC and ascends within a row."""
    total, device = by_dst.other.shape[0], by_dst.indptr.device
    dtype, offsets = _offsets(by_dst.wide)
    defines = (("INDEX_T", "i64"), ("LOOPS", "0")) + offsets
    degree = torch.zeros(num_src, dtype=dtype, device=device)
    head = (by_dst.indptr.data_ptr(), by_dst.other.data_ptr(), np.int32(by_dst.rows))
    _launch("count_src", defines, total, head + (degree.data_ptr(),))
    indptr = _scan(degree)
    nbr = torch.empty(total, dtype=torch.int32, device=device)
    position = torch.empty(total, dtype=dtype, device=device)
    cursor = degree.zero_()
    _launch("place_src", defines, total, head + (indptr.data_ptr(), cursor.data_ptr(),
                                                 nbr.data_ptr(), position.data_ptr()))
    return _ordered(indptr, nbr, position, split_rows(indptr, total))
