"""Index arrays of a graph as the kernels read them, and the kernels that build them
(``src/structure.cu``, ``row_split.cu``, ``row_order.cu``)."""
from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.runtime import capture
from gnnaccel.cuda.runtime.launch import WARPS, Kernels
from gnnaccel.cuda.runtime.reports import Report, Unread, reports

_THREADS = 256
_COUNTERS, _HOST_AT, _BINS_AT, _BINS = 38, 4, 6, 32
# For the kernel `order` (row_order.cuh): how many places a bitmap covers, the bytes of shared
# memory, the most blocks for long rows, the most entries of a row that a warp puts in order, and
# the rows that a warp has.
_WINDOW, _ORDER_BYTES, _HEAVY_BLOCKS = 1 << 17, (1 << 14) + 4 * (2 * _THREADS + 1), 264
_MOST_SHORT, _GROUP = 256, 4
_GROUPS = _GROUP * (_THREADS // 32)  # rows of a block
# For the kernel `scan`: rows of a block, bytes of shared memory.
_SCANNED, _SCAN_BYTES = 4 * _THREADS, 8 * (_THREADS // 32 + 1) + 4 * (_BINS + 1)
# Graphs of so few edges, with loops, and rows are built in one launch for each direction, by one
# block: its keys are a row's number above the bits of a place (small.cuh).
_SMALL_EDGES, _SMALL_ROWS, _SMALL_THREADS = 1 << 13, 1 << 14, 1024
_MOST_MADE = 32  # forms of calls remembered for each graph


@dataclass
class Split:
    """Long rows cut into chunks of ``chunk_edges``. Until the report is in, sizes are upper
    bounds."""

    chunk_edges: int
    counters: int  # address of int32 [38]
    memory: Tensor  # holds the counters
    lists: Tensor  # int32: `heavy`, then `chunks`
    bounds: tuple[int, int]  # most chunks and split rows
    report: Report | Unread
    _exact: tuple[int, int] | None = field(default=None)

    def sizes(self) -> tuple[int, int]:
        """(chunks, split rows): exact once the device has reported, bounds before."""
        if self._exact is None:
            words = self.report.words
            if words is None:
                return self.bounds
            self._exact = int(words[_HOST_AT]), int(words[_HOST_AT + 1])
        return self._exact

    @property
    def heavy(self) -> Tensor:
        """int32 [most split rows, 4]: row, first chunk, chunks, unused."""
        return self.lists[:4 * self.bounds[1]].view(-1, 4)

    @property
    def chunks(self) -> Tensor:
        """int32 [most chunks, 2]: row, number within the row."""
        return self.lists[4 * self.bounds[1]:].view(-1, 2)

    def addresses(self) -> tuple[int, int]:
        """Addresses of `chunks` and of `heavy`."""
        heavy = self.lists.data_ptr()
        return heavy + 16 * self.bounds[1], heavy

    @property
    def known(self) -> bool:
        """Whether the device has reported. The properties below are only to be read then."""
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
    """Kernel arguments of a graph. ``graph``: indptr, other, place, rows; ``slots``: warps
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
    than ``indptr[-1]``; elements beyond are never read. ``inverse`` [edges]: of the transposed
    graph, where it was asked for, the place in it of each edge of the CSC. ``launched``: the result
    of `launch` from now on, None before that is known; ``bounded``: its result until then;
    ``made``: prepared calls of launchers, by their keys.
    """

    indptr: Tensor
    other: Tensor
    place: Tensor
    split: Split
    launched: Launch | None = field(default=None, repr=False)
    inverse: Tensor | None = None
    made: dict[tuple, Any] = field(default_factory=dict, repr=False, compare=False)
    bounded: Launch | None = field(default=None, init=False, repr=False, compare=False)

    def keep(self, key: tuple, found: Any) -> Any:
        """``found``, kept in `made`."""
        if len(self.made) >= _MOST_MADE:
            self.made.clear()
        self.made[key] = found
        return found

    def edges_like(self, like: Tensor) -> Tensor:
        """Memory for what a kernel writes at each edge that it visits, as ``like`` [E, ...]: zeros
        unless all edges are known to be in the rows, as dropped self loops are not. To ask the
        device would cost more."""
        known = self.split.report.words is not None  # `Split.known`, without its call
        full = known and self.split.edges == like.shape[0]
        return torch.empty_like(like) if full else torch.zeros_like(like)

    def bare(self, repeated: bool = False) -> tuple[Tensor, Tensor] | None:
        """[rows]: whether a row has no edges, and [1] one that has some; None where all are known
        to have some. Kept once the device has reported. ``repeated``: the caller will ask again and
        has to get as many tensors, whatever is known by then."""
        device = self.indptr.device
        key = "bare", capture.stream(device)  # another stream would have to wait for the result
        anew = repeated or capture.capturing()
        if key in self.made and not anew:
            return self.made[key]
        known = self.split.known and not anew
        if known and self.split.histogram()[:1] == [0]:
            return self.keep(key, None)
        with torch.inference_mode(False):
            nonempty = self.indptr.diff() > 0
            empty = ~nonempty, nonempty.byte().argmax().view(1)
        return self.keep(key, empty) if known else empty

    def launch(self) -> Launch:
        """Kernel parameters; kept once the device has reported exact sizes."""
        if self.launched is not None:
            return self.launched
        waits = self.bounded is not None and self.split.report.words is None
        return self.bounded if waits else self._make_launch()  # type: ignore[return-value]

    def _make_launch(self) -> Launch:
        split = self.split
        chunks, heavy = split.sizes()
        known = split._exact is not None
        slots = -(-chunks // WARPS) * WARPS
        counters, (chunk_list, heavy_list) = split.counters, split.addresses()
        launch = Launch(
            (self.indptr.data_ptr(), self.other.data_ptr(), self.place.data_ptr(),
             np.int32(self.indptr.shape[0] - 1)), slots,
            (counters, chunk_list, np.int32(split.chunk_edges), np.int32(slots)),
            (counters, heavy_list), chunks, heavy)
        if known:
            self.launched = launch
        else:
            self.bounded = launch
        return launch

    @functools.cached_property
    def rows(self) -> int:
        return self.indptr.shape[0] - 1

    @functools.cached_property
    def wide(self) -> bool:
        return self.indptr.dtype is torch.int64

    def nbytes(self) -> int:
        inverse = 0 if self.inverse is None else self.inverse.nbytes
        return (self.indptr.nbytes + self.other.nbytes + self.place.nbytes
                + self.split.lists.nbytes + inverse)


def chunk_edges(edges: int) -> int:
    """Edges that one warp should carry: short enough to balance a GPU of some 8,000 warps, long
    enough to pay. Graphs too small to fill it are bound by launches, so they had better not be
    split at all."""
    if edges < 1 << 18:
        return 256
    return min(1024, max(64, 1 << (edges // 32768).bit_length()))


@functools.cache
def _kernels(family: str, wide: bool) -> Kernels:
    """Kernels for offsets of 64 bits if ``wide``, else of 32."""
    return Kernels(family, (("OFF_T", "i64" if wide else "int"),))


def prepare() -> None:
    """Compile the kernels that build graphs with int32 offsets. Raises CompileError."""
    _kernels("row_order", False)("order")
    for entry in ("scan", "split"):
        _kernels("row_split", False)(entry)
    for entry in ("count_i64", "place_i64", "small_i64", "count_int", "place_int", "small_int",
                  "count_src", "place_src", "small_src", "join"):
        _kernels("structure", False)(entry)


def _list_sizes(rows: int, edges: int, limit: int) -> tuple[int, int]:
    """The most chunks and split rows."""
    heavy = min(rows, edges // (limit + 1))
    return edges // limit + heavy if heavy else 0, heavy


def _split(rows: int, edges: int, limit: int, counters: int, memory: Tensor, flags: int,
           lists: Tensor | None = None) -> tuple[Split, tuple]:
    """Room for long rows and their chunks, up to upper bounds, with the report on them; and the
    arguments of a kernel that fills it. ``flags``: an address; ``lists``: the room, if it is
    there."""
    device, (chunks, heavy) = memory.device, _list_sizes(rows, edges, limit)
    if lists is None:
        lists = torch.empty(4 * heavy + 2 * chunks, dtype=torch.int32, device=device)
    report, address = reports(device).take(), lists.data_ptr()
    return (Split(limit, counters, memory, lists, (chunks, heavy), report),
            # the first addresses are those of `Split.addresses`
            (counters, address + 16 * heavy, address, flags, report.address, np.int32(report.tag)))


def split_rows(indptr: Tensor, edges: int, flags: Tensor | None = None,
               limit: int | None = None) -> Split:
    """Lists the rows of more than ``limit`` edges (default: by `chunk_edges`) and has the device
    report on them."""
    rows = indptr.shape[0] - 1
    limit = limit or chunk_edges(edges)
    memory = torch.zeros(_COUNTERS, dtype=torch.int32, device=indptr.device)
    split, args = _split(rows, edges, limit, memory.data_ptr(), memory,
                         flags.data_ptr() if flags is not None else 0)
    _kernels("row_split", indptr.dtype is torch.int64)("split")(
        (-(-max(rows, 1) // _THREADS), 1), _THREADS, 4 * (_BINS + 1),
        (indptr.data_ptr(), np.int32(rows), np.int32(limit), *args))
    return split


class _Counting(NamedTuple):
    """Memory to count in, zeros at first: ``indptr`` [rows + 1], and addresses of it and of the
    further memory of the kernels `count` and `scan`."""

    memory: Tensor
    indptr: Tensor
    rows: int
    address: int
    counters: int  # int32 [38]
    flags: int  # int32 [2]
    state: int  # int64 [blocks + 1]

    @classmethod
    def of(cls, rows: int, wide: bool, device: torch.device) -> _Counting:
        unit = 1 if wide else 2  # offsets in eight bytes
        head = -(-(rows + 1) // unit)
        counter_units = _COUNTERS // 2 + 1
        memory = torch.zeros(unit * (head + counter_units + max(1, -(-rows // _SCANNED)) + 1),
                             dtype=torch.int64 if wide else torch.int32, device=device)
        address = memory.data_ptr()
        counters = address + 8 * head
        return cls(memory, memory[:rows + 1], rows, address, counters, counters + 4 * _COUNTERS,
                   counters + 8 * counter_units)

    def scan(self, wide: bool, edges: int, loops: int, flags: int) -> Split:
        """Degrees become offsets; ``edges``: the most that rows may hold."""
        rows, limit = self.rows, chunk_edges(edges)
        split, args = _split(rows, edges, limit, self.counters, self.memory, flags)
        scan = _kernels("row_split", wide)("scan")
        scan((max(1, -(-rows // _SCANNED)), 1), _THREADS, _SCAN_BYTES,
             (self.address, np.int32(rows), np.int64(loops), np.int32(limit), self.state, *args))
        return split


def _ordered(indptr: Tensor, entries: Tensor, split: Split, place: Tensor) -> Rows:
    """Rows with the entries of each in ascending order of their places: the same in every run.
    ``entries`` [E, 2]: places and other ends, in indptr's dtype; ``place`` [E]: memory for the
    result."""
    total, rows = place.shape[0], indptr.shape[0] - 1
    other = torch.empty(total, dtype=torch.int32, device=indptr.device)
    long = (split if split.chunk_edges <= _MOST_SHORT
            else split_rows(indptr, total, limit=_MOST_SHORT))
    heavy_blocks = min(_HEAVY_BLOCKS, long.bounds[1])
    windows = -(-total // _WINDOW)
    if total:
        _kernels("row_order", indptr.dtype is torch.int64)("order")(
            (heavy_blocks * windows + -(-rows // _GROUPS), 1), _THREADS, _ORDER_BYTES,
            (indptr.data_ptr(), np.int32(rows), np.int32(long.chunk_edges), long.counters,
             long.lists.data_ptr(), np.int32(heavy_blocks), np.int32(windows),
             entries.data_ptr(), other.data_ptr(), place.data_ptr()))
    return Rows(indptr, other, place, split)


def _is_small(total: int, num_src: int, num_dst: int, wide: bool) -> bool:
    return (total <= _SMALL_EDGES and num_src <= _SMALL_ROWS and num_dst <= _SMALL_ROWS
            and not wide)


def _in_one_launch(entry: str, given: tuple, rows: int, total: int, device: torch.device) -> Rows:
    """The ``rows`` of a small graph, of at most ``total`` edges, by the kernel ``entry`` with the
    arguments ``given``."""
    limit = chunk_edges(total)
    chunks, heavy = _list_sizes(rows, total, limit)
    # one allocation, whose parts begin at multiples of 16 bytes
    lists, head = 4 * heavy + 2 * chunks, _COUNTERS + 2
    counters, room, _, other, _, place, _, indptr = torch.empty(
        head + lists + (-lists) % 4 + 2 * (total + -total % 4) + rows + 1, dtype=torch.int32,
        device=device).split((head, lists, -lists % 4, total, -total % 4, total, -total % 4,
                              rows + 1))
    address, size = counters.data_ptr(), 1 << max(0, total - 1).bit_length()
    split, args = _split(rows, total, limit, address, counters, address + 4 * _COUNTERS, room)
    _kernels("structure", False)(entry)(
        (1, 1), min(_SMALL_THREADS, max(_THREADS, size // 2)), 4 * (size + _BINS + 2),
        (*given, np.int32(size), indptr.data_ptr(), other.data_ptr(), place.data_ptr(),
         np.int32(limit), *args))
    return Rows(indptr, other, place, split)


def csc(src: Tensor, dst: Tensor, num_src: int, num_dst: int, loops: int, wide: bool) -> Rows:
    """Groups edges by destination on the device, in the caller's order within a row.

    The host learns nothing.

    Args:
        src, dst: [E] int32 or int64, contiguous. Ids outside the node ranges are left out and
            reported.
        loops: number of nodes that get a self loop; existing loops are dropped then. 0 leaves the
            edges as they are.
        wide: int64 offsets.
    """
    edges, device = src.shape[0], src.device
    kernels, ids = _kernels("structure", wide), "i64" if src.dtype is torch.int64 else "int"
    total = edges + loops
    head = (src.data_ptr(), dst.data_ptr(), np.int64(edges), np.int64(num_src), np.int64(num_dst),
            np.int64(loops))
    if _is_small(total, num_src, num_dst, wide):
        return _in_one_launch(f"small_{ids}", head, num_dst, total, device)
    counting = _Counting.of(num_dst, wide, device)
    number = torch.empty(total, dtype=counting.memory.dtype, device=device)
    kernels(f"count_{ids}")((-(-edges // _THREADS), 1), _THREADS, 0,
                            (*head, counting.address, number.data_ptr(), counting.flags))
    split = counting.scan(wide, total, loops, counting.flags)
    entries = torch.empty(total, 2, dtype=number.dtype, device=device)
    kernels(f"place_{ids}")((-(-total // _THREADS), 1), _THREADS, 0,
                            (*head, counting.address, number.data_ptr(), counting.flags,
                             entries.data_ptr()))
    return _ordered(counting.indptr, entries, split, number)


def transpose(by_dst: Rows, num_src: int) -> Rows:
    """The graph grouped by source; ``place`` refers to the CSC and ascends within a row."""
    total, device, wide = by_dst.other.shape[0], by_dst.indptr.device, by_dst.wide
    head = (by_dst.indptr.data_ptr(), by_dst.other.data_ptr(), np.int32(by_dst.rows))
    if _is_small(total, num_src, by_dst.rows, wide):
        return _in_one_launch("small_src", (*head, np.int32(num_src)), num_src, total, device)
    kernels, counting = _kernels("structure", wide), _Counting.of(num_src, wide, device)
    number = torch.empty(total, dtype=counting.memory.dtype, device=device)
    kernels("count_src")((-(-total // _THREADS), 1), _THREADS, 0,
                         (*head, counting.address, number.data_ptr()))
    split = counting.scan(wide, total, 0, 0)
    entries = torch.empty(total, 2, dtype=number.dtype, device=device)
    kernels("place_src")((-(-total // _THREADS), 1), _THREADS, 0,
                         (*head, counting.address, number.data_ptr(), entries.data_ptr()))
    return _ordered(counting.indptr, entries, split, number)
