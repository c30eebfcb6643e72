"""`GraphView`: the structure of one graph as the backends need it, built on demand and kept."""
from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gnnaccel.cuda.runtime import capture
from gnnaccel.cuda.structures import structure as counting
from gnnaccel.cuda.structures.structure import Rows
from gnnaccel.dispatch.graph import structure as sorting
from gnnaccel.dispatch.graph.edge_arrays import CSC, EdgeArrays, csc_of
from gnnaccel.dispatch.graph.ordered_weights import PlacedWeights, in_fp32
from gnnaccel.dispatch.graph.tensor_ref import Derived
from gnnaccel.dispatch.run import torch_backend
from gnnaccel.errors import VALID, GraphError

if TYPE_CHECKING:
    from gnnaccel.dispatch.run.torch_backend import Edges

# Edges above which a radix sort beats counting with atomics, and a call takes so long that waiting
# for the report once is nothing (on an H200: docs/notes/attention.md).
SORT_FROM = 1 << 22


@dataclass(frozen=True)
class Statistics:
    """Counts of a graph by destination. ``super_share``: share of edges in rows longer than one
    warp carries (``chunk_edges``); ``histogram[b]``: destinations whose degree has b bits;
    ``density``: edges over all pairs."""

    num_src: int
    num_dst: int
    num_edges: int
    max_degree: int
    mean_degree: float
    super_nodes: int
    super_share: float
    chunk_edges: int
    density: float
    histogram: tuple[int, ...]


#: Decorator of functions that build tensors to keep: made in inference mode they could not take
#: part in training later.
_ordinary_tensors = torch.inference_mode(False)


class GraphView(Derived):
    """Edges ``edge_index`` [2, E] from ``num_src`` to ``num_dst`` nodes, by destination (CSC) and
    by source.

    ``loops`` > 0: existing self loops are dropped, and each node with a lower number gets one. Edge
    ids number the caller's edges in order, then the added loops. Rows list their edges in the order
    of these ids, so that sums repeat bit for bit. A CSC that came with the edges (`EdgeArrays`) is
    used as it is. The view does not keep ``edge_index`` alive, unless ``own``: callers that ask for
    index arrays hold it. Building takes a lock. ``num_edges``: where ``edge_index`` has not all.
    """
    _complete = False  # whether all edges are known to count: none is dropped for its ids

    def __init__(self, edge_index: Tensor | EdgeArrays, num_src: int, num_dst: int, loops: int = 0,
                 own: bool = False, num_edges: int | None = None):
        self.num_src, self.num_dst, self.loops = num_src, num_dst, loops
        num_edges = edge_index.shape[1] if num_edges is None else num_edges
        self.num_edges = num_edges + loops  # an upper bound: dropped loops are still in it
        self.device = edge_index.device
        self.wide = self.num_edges >= 2**31
        self.large = self.num_edges >= SORT_FROM
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        self.touched = False  # used since the cache last looked for something to drop
        self._kept: Tensor | EdgeArrays | tuple[Tensor, ...] | None = edge_index if own else None
        self._sources = [(weakref.ref(edge_index),)]
        self._arrays = type(edge_index) is EdgeArrays  # these may come with a CSC
        csc = self._given_csc() if self._arrays else None
        self._in_order = csc is not None and not csc.ids.shape[0]  # edge ids are places in it
        self._lock = threading.RLock()
        self._csc: Rows | None = None
        self._csr: Rows | None = None
        self._csr_by_id: Rows | None = None
        self._edges: Edges | None = None
        self._weights = PlacedWeights()
        self._covered: Tensor | None = None
        self._inverse_degree: dict[torch.dtype, Tensor] = {}
        self._shares: Tensor | None = None
        self._no_isolated: bool | None = None
        self._derived: dict[Hashable, Any] = {}
        self._stream = 0
        self._built: torch.cuda.Event | None = None
        self._checked = False
        self._captured = capture.current() if capture.capturing() else 0

    def _ends(self) -> tuple[Tensor, Tensor]:
        edge_index = self._sources[0][0]()
        if edge_index is None:  # the last caller's; another thread's may be there
            edge_index = self._alive()[0]
        src, dst = edge_index.detach().unbind(0)
        return src.contiguous(), dst.contiguous()

    def _may_build(self) -> None:
        """GraphError within a capture, unless this view was made in it.

        Arrays built then would last, but only the replays of the CUDA graph would compute them.
        """
        if not self._captured and capture.capturing():
            raise GraphError("a CUDA graph is being captured that needs index arrays of a graph "
                             "from before which are not there: run the same step, backward too, "
                             "once before the capture")

    def _given_csc(self) -> CSC | None:
        """The CSC that came with the edges, if it may be used: its order within rows is the host's,
        which need not repeat."""
        return None if self.loops or self.deterministic else csc_of(self._sources[0][0]())

    def csc(self, places: bool = True) -> Rows:
        """Edges by destination; ``place`` is the edge id. ``places`` False may leave `Rows.place`
        empty.

        GraphError once the device has reported ids out of range.
        """
        rows = self._csc
        # `_serves`, without its call
        if rows is None or (places and rows.place.shape[0] != rows.other.shape[0]):
            rows = self._build_csc(places)
        if self._checked and (self._built is None or torch._C._cuda_getCurrentRawStream(
                self.device.index) == self._stream):
            return rows  # as `_ready` would
        return self._ready(rows)

    def csr(self, places: bool = True, inverse: bool = False) -> Rows:
        """The transposed graph, grouped by source; ``place`` is the place in the CSC. ``inverse``:
        with `Rows.inverse`, which only ``large`` graphs have."""
        rows = self._csr
        if (rows is None or (places and rows.place.shape[0] != rows.other.shape[0])
            or (inverse and rows.inverse is None)):
            rows = self._build_csr(places, inverse)
        return self._ready(rows)

    def csr_by_id(self) -> Rows:
        """The transposed graph whose ``place`` is the edge id: for weights in that order."""
        rows = self._csr_by_id = self._csr_by_id or self._build_csr_by_id()
        if self._checked and (self._built is None or torch._C._cuda_getCurrentRawStream(
                self.device.index) == self._stream):
            return rows  # as `_ready` would
        return self._ready(rows)

    def weighted(self, weight: Tensor | None,
                 by_src: bool = False) -> tuple[Rows, Tensor | None, str]:
        """Inputs of a weighted sum: index arrays by destination or by source, ``weight`` [E] or
        [E, H] in fp32, and where in it an edge's weight stands: at the edge's "position" in these
        arrays, or at its id ("place"). None: all weights are one."""
        if weight is None:
            return self.csr(places=False) if by_src else self.csc(places=False), None, "place"
        by_id = self.csr_by_id if by_src else self.csc
        if weight.dtype is not torch.float32:
            weight = in_fp32(weight)
        if self._in_order and not by_src:
            return self.csc(places=False), weight.float().contiguous(), "position"
        placed = self._weights.find(weight, by_src, by_id)
        if placed is not None:
            return self._ready(placed[0]), placed[1], "position"
        return by_id(), weight.float().contiguous(), "place"

    def edges(self, ids: bool = True) -> Edges:
        """Plain int64 indices in CSC order for the torch backend. May wait for the device.

        ``ids`` False: edge ids are not needed, so a CSC that was built without is good enough.
        Backward asks so, because by then ``edge_index`` may be gone or changed.
        """
        if self._edges is None or (ids and self._edges.eid is None):
            with self._lock:
                if self._edges is None or (ids and self._edges.eid is None):
                    self._edges = self._build_edges(ids)
        return self._edges

    @_ordinary_tensors
    def covered(self, dtype: torch.dtype) -> Tensor:
        """[num_dst, 1]: 1 where a destination has an edge, else 0."""
        covered = self._covered  # another thread may ask for another dtype
        if covered is None or covered.dtype != dtype:
            self._may_build()
            if self._csc is not None:
                some = self.csc(places=False).indptr.diff() > 0
            else:
                some = torch.zeros(self.num_dst, dtype=torch.bool, device=self.device)
                some[self.edges().dst] = True
            covered = self._covered = some.to(dtype).unsqueeze(1)
        return covered

    @_ordinary_tensors
    def inverse_degree(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[num_dst]: one over the number of edges that enter a node, 1 where there is none. Kernels
        read it in fp32."""
        if dtype not in self._inverse_degree:
            self._may_build()
            if self._csc is not None:
                degree = self.csc(places=False).indptr.diff()
            else:
                degree = torch.bincount(self.edges(ids=False).dst, minlength=self.num_dst)
            self._inverse_degree[dtype] = 1.0 / degree.clamp(min=1).to(dtype)
        return self._inverse_degree[dtype]

    @_ordinary_tensors
    def shares_by_src(self) -> Tensor | None:
        """[edges] fp32: `inverse_degree` of the node that each edge enters, in the order of the
        transposed graph; None the first time, since it may be the last, and during a capture, in
        which nothing is made to keep."""
        if self._shares is None:
            capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            share = self._inverse_degree.get(torch.float32)
            if share is None or capturing:
                return None
            # beyond the last edge memory is not initialised
            ends = self.csr(places=False).other.clamp(0, self.num_dst - 1)
            self._shares = share.index_select(0, ends)
        return self._shares

    def all_covered(self) -> bool:
        """Whether every destination has an edge, as far as that is known from the first call on:
        False for graphs that are not ``large``. Of those the device reports at some later time,
        which must not decide how numbers are rounded."""
        rows = self._csc
        if rows is None or not self.large or not rows.split.known:
            return False
        if self._no_isolated is None:
            self._no_isolated = rows.split.histogram()[:1] == [0]
        return self._no_isolated

    def statistics(self, wait: bool = False) -> Statistics | None:
        """Statistics; None while the device has not reported, unless told to ``wait``."""
        if self._csc is None and not wait:
            return None
        split = self.csc(places=False).split
        if not split.known:
            if not wait:
                return None
            torch.cuda.synchronize(self.device)
        edges, pairs = split.edges, max(1, self.num_src * self.num_dst)
        return Statistics(self.num_src, self.num_dst, edges, split.longest,
                          edges / max(1, self.num_dst), split.sizes()[1],
                          split.split_edges / max(1, edges), split.chunk_edges, edges / pairs,
                          tuple(split.histogram()))

    def derived(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The tuple of tensors and other graphs that ``make`` derives from this graph, made once
        for each ``key``."""
        value = self._derived.get(key)
        if value is None:
            self._may_build()
            with self._lock, torch.inference_mode(False):
                value = self._derived.setdefault(key, make())
            capture.finish(self.device)
        return value

    def nbytes(self) -> int:
        """Bytes held by the index arrays built so far."""
        total = self._weights.nbytes()
        for part in (self._csc, self._csr, self._edges):
            total += 0 if part is None else part.nbytes()
        total += 0 if self._csr_by_id is None else self._csr_by_id.place.nbytes
        total += 0 if self._shares is None else self._shares.nbytes
        if self._derived:
            total += sum(one.nbytes if type(one) is Tensor else one.nbytes()
                         for value in list(self._derived.values()) for one in value)
        return total

    # --- building ---------------------------------------------------------------------------------

    @_ordinary_tensors
    def _build_csc(self, places: bool) -> Rows:
        with self._lock:
            if (rows := self._csc) is not None and _serves(rows, places):
                return rows  # built by another thread meanwhile
            if capture.capturing():
                self._may_build()
            csc = self._given_csc() if self._arrays else None
            if self._in_order and self._csc is not None:  # in backward the edges may be gone
                rows = sorting.with_places(self._csc)
            elif csc is not None:
                rows = sorting.csc_as_given(csc, self.num_src, self.wide, places)
                if self.large:
                    capture.finish(self.device)
            else:
                rows = self._grouped(places)
            self._mark_built()
            self._csc = rows
            return rows

    def _grouped(self, places: bool) -> Rows:
        """Edges by destination; one wait for large graphs gives exact sizes of workspaces."""
        arguments = *self._ends(), self.num_src, self.num_dst, self.loops, self.wide
        if not self.large:
            return counting.csc(*arguments)
        rows = sorting.csc(*arguments, places)
        capture.finish(self.device)
        return rows

    @_ordinary_tensors
    def _build_csr(self, places: bool, inverse: bool) -> Rows:
        with self._lock:
            if (rows := self._csr) is not None:
                if _serves(rows, places, inverse):
                    return rows
                # never less than before: callers that need the rest would build it again
                places, inverse = (places or _serves(rows, True),
                                   inverse or _serves(rows, False, True))
            if capture.capturing():
                self._may_build()
            by_dst = self.csc(places=False)
            if self.large:
                rows = sorting.transpose(by_dst, self.num_src, places, inverse)
                capture.finish(self.device)
            else:
                rows = counting.transpose(by_dst, self.num_src)
            self._mark_built()
            self._csr = rows
            return rows

    @_ordinary_tensors
    def _build_csr_by_id(self) -> Rows:
        if capture.capturing():
            self._may_build()
        if self._in_order:
            return self.csr()
        with self._lock:
            ids, by_src = self.csc().place, self.csr()
            # nothing reads what lies beyond the last edge, but an index must fit
            place = by_src.place if self._complete else by_src.place.clamp(0, ids.shape[0] - 1)
            return replace(by_src, place=ids.index_select(0, place), launched=None, made={})

    @_ordinary_tensors
    def _build_edges(self, ids: bool) -> Edges:
        csc = self._given_csc()
        if csc is not None:
            return torch_backend.Edges(*sorting.edges_as_given(csc, self.num_src, ids),
                                       self.num_dst)
        if self._csc is None:
            src, dst = self._ends()
            sorting.check_ids(src, dst, self.num_src, self.num_dst)
            src, dst, order, _ = sorting.sorted_edges(src, dst, self.num_src, self.num_dst,
                                                      self.loops)
            total = int((dst < self.num_dst).sum())
            return torch_backend.Edges(src[:total].long(), dst[:total].long(), order[:total],
                                       self.num_dst)
        rows = self.csc(places=ids)
        total = int(rows.indptr[-1])
        dst = torch.repeat_interleave(rows.indptr.diff().long(), output_size=total)
        eid = rows.place[:total].long() if rows.place.shape[0] == rows.other.shape[0] else None
        return torch_backend.Edges(rows.other[:total].long(), dst, eid, self.num_dst)

    # --- reading ----------------------------------------------------------------------------------

    def _mark_built(self) -> None:
        # an event that is recorded within a capture cannot be waited for outside of it
        if self.device.type == "cuda" and not capture.capturing():
            stream = torch.cuda.current_stream(self.device)
            self._stream, self._built = stream.cuda_stream, torch.cuda.Event()
            self._built.record(stream)

    def _ready(self, rows: Rows) -> Rows:
        if (self._built is not None
            and torch._C._cuda_getCurrentRawStream(self.device.index) != self._stream):
            self._follow(rows)
        # the transposed graph is made of what the CSC let in
        words = None if self._checked else self._csc.split.report.words  # type: ignore[union-attr]
        if words is not None:
            if words[1]:  # `Split.invalid`, without its call
                raise GraphError(
                    "edge_index holds ids outside the graph: sources must lie in [0, "
                    f"{self.num_src}), destinations in [0, {self.num_dst}). Found on the GPU after "
                    f"the call that used it; such edges were left out. {VALID}")
            self._checked = True
        return rows

    def _follow(self, rows: Rows) -> None:
        """Order this stream after the one that built ``rows``, and keep their memory until it is
        done. A capture cannot wait for work outside, and need not: all is done when it begins."""
        stream = torch.cuda.current_stream(self.device)
        if torch.cuda.is_current_stream_capturing():
            return
        stream.wait_event(self._built)  # type: ignore[arg-type]
        split = rows.split
        for tensor in (rows.indptr, rows.other, rows.place, split.memory, split.lists,
                       rows.inverse):
            if tensor is not None:
                tensor.record_stream(stream)


def _serves(rows: Rows, places: bool, inverse: bool = False) -> bool:
    """Whether these index arrays have ``places`` and ``inverse`` if they are asked for."""
    return not (places and rows.place.shape[0] != rows.other.shape[0]
                or inverse and rows.inverse is None)
