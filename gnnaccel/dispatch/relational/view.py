"""`RelationView`: the structure of one graph with relations, and the virtual graphs on which its
layers run.

A relational layer is a homogeneous layer on a virtual graph: its sources may be (source, relation)
pairs, its destinations (destination, relation) pairs. The traversals know nothing of relations;
they take index arrays.
"""
from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.cuda.runtime import capture
from gnnaccel.cuda.structures import pairs as cuda_pairs
from gnnaccel.cuda.structures.structure import Rows, split_rows
from gnnaccel.dispatch.graph.ordered_weights import of_the_graph
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.ir.program import DST, EDGE, PAIR_DST, PAIR_SRC, RELATION, SRC
from gnnaccel.dispatch.relational.edges import Edges, Ends, by_type
from gnnaccel.dispatch.relational.gather import Members, RelationStatistics
from gnnaccel.dispatch.relational.pairs import Blocks, Pairs, pairs_of, pairs_of_both
from gnnaccel.errors import GraphError


class RelationView:
    """The `Edges` that ``assemble(*structure)`` gives, and the arrays derived from them, each when
    first asked for.

    Callers that need new arrays hold the tensors of ``structure``. EDGE values are in the order of
    ``assemble``; EDGE inputs and ``ignore`` do not go together. ``compact`` False: every edge is a
    source pair of its own. Destination pairs stay, as reductions end in them.

    ``kernels``: whether kernels may build the arrays, which are the same; set by callers that run
    kernels over the view. Calls over it `enter` first: as long as all of them are on one stream,
    nobody waits for arrays to be built, since they are read after it on that stream.
    """

    def __init__(self, structure: tuple[Tensor, ...], num_src: int, num_dst: int,
                 num_relations: int, assemble: Callable[..., Ends] = by_type, compact: bool = True,
                 own: bool = False, ignore: bool = False):
        self.num_src, self.num_dst, self.num_relations = num_src, num_dst, num_relations
        self.device = structure[0].device
        self.compact = compact
        self.touched = self.kernels = False
        self.plans: dict[Any, Any] = {}  # optimised Programs, by keys of `RelationalCall`
        sizes = num_src, num_dst, num_relations
        self._edges = Edges(structure, sizes, assemble, own, ignore)
        self._lock = threading.RLock()
        self._made: dict[tuple, Any] = {}
        # the only stream on which there were calls so far, None before the first and once there
        # are several; and the event after the last array was built there
        self.alone: int | None = None
        self._entered = False
        self._built: torch.cuda.Event | None = None

    def enter(self) -> None:
        """Note that a call over this view begins, on the current stream."""
        stream = capture.stream(self.device)
        if stream == self.alone or self._entered and self.alone is None:
            return
        with self._lock:
            if capture.capturing():  # it begins with everything done, and builds nothing
                return
            if self._entered:
                self.alone = None
                if self._built is not None:
                    self._built.synchronize()
            else:
                self.alone, self._entered = stream, True

    def _finish(self) -> None:
        """Note that an array was built: later calls are to find it finished."""
        if self.alone is None or capture.stream(self.device) != self.alone:
            capture.finish(self.device)
        elif self.device.type == "cuda":
            self._built = self._built or torch.cuda.Event()
            self._built.record(torch.cuda.current_stream(self.device))

    def bind(self, *structure: Tensor) -> None:
        """`Edges.bind`."""
        self._edges.bind(*structure)

    def stands(self, *structure: Tensor) -> None:
        """Within a capture: have each replay compare its edges with those of this view.

        If they differ, the replay stops with a failed assertion on the device. A new structure
        cannot be built: the sizes of compact arrays depend on the edges, but are fixed in a
        capture.
        """
        src, dst, relation = self._edges.assemble(*(t.detach() for t in structure))
        by_src, by_dst = self.pairs(PAIR_SRC), self.pairs(PAIR_DST)
        if by_src.of_edge.shape != src.shape:
            raise GraphError("a CUDA graph is being captured, and some edges are of no relation: "
                             "leave them out before")
        same = ((by_src.node.index_select(0, by_src.of_edge) == src)
                & (by_dst.node.index_select(0, by_dst.of_edge) == dst)
                & (by_src.relation.index_select(0, by_src.of_edge) == relation))
        torch._assert_async(same.all(), "gnnaccel: edge_index or edge_type changed since the CUDA "
                                        "graph was captured; layers of relations are captured for "
                                        "one graph: capture again, or run them outside of CUDA "
                                        "graphs")

    # --- pairs and index arrays -------------------------------------------------------------------

    def _once(self, key: tuple, make: Callable[[], Any], wait: bool = True) -> Any:
        """The result of the first ``make()``, outside of inference mode, so that its tensors may
        take part in training later. ``wait`` False: it has the device do nothing, or has waited
        for it."""
        value = self._made.get(key)
        if value is None:
            if capture.capturing():
                raise GraphError("a CUDA graph is being captured that needs arrays of its "
                                 "relations which are not there: run the same step, backward too, "
                                 "once before the capture")
            with self._lock, torch.inference_mode(False):
                value = self._made.get(key)
                if value is None:
                    value = make()
                    if wait:
                        self._finish()
                    self._made[key] = value
        return value

    def pairs(self, domain: str) -> Pairs:
        """The pairs of PAIR_SRC or PAIR_DST."""
        return (self._made.get((domain,))
                or self._once((domain,), lambda: self._make_pairs(domain), wait=not self.kernels))

    def _make_pairs(self, domain: str) -> Pairs:
        if self.kernels:
            self._build()
            return self._made[(domain,)]
        src, dst, relation = self._edges.ends()
        compact = self.compact or domain == PAIR_DST
        if src is dst and compact and (PAIR_SRC,) in self._made:  # one set of pairs at both ends
            return self._made[(PAIR_SRC,)]
        ends = (src, self.num_src) if domain == PAIR_SRC else (dst, self.num_dst)
        return pairs_of(ends[0], relation, ends[1], self.num_relations, compact)

    def _build(self) -> None:
        """Make the pairs of both ends by kernels, which check ids too, and for few edges the index
        arrays of edges."""
        edges, sizes = self._edges, (self.num_src, self.num_dst, self.num_relations)
        ends = edges.ends(check=False)
        both = pairs_of_both(*ends, *sizes, self.compact)
        if both is None:
            edges.check(*ends)  # raises GraphError, or leaves edges out
            both = pairs_of_both(*edges.ends(), *sizes, self.compact)
        edges.checked = True
        assert both is not None
        by_src, by_dst, copies = both
        self._finish()
        if edges.kept is not None and copies is not None:
            edges.kept = copies  # rather than the same ids twice
        for key, value in zip(((PAIR_SRC,), (PAIR_DST,),
                               *((end, EDGE, "index") for end in (SRC, DST, RELATION))),
                              (by_src, by_dst, *(copies or ()))):
            self._made.setdefault(key, value)

    def statistics(self) -> RelationStatistics:
        return (self._made.get(("statistics",))
                or self._once(("statistics",), self._make_statistics, wait=False))

    def _make_statistics(self) -> RelationStatistics:
        by_src = self.pairs(PAIR_SRC)
        return RelationStatistics(self.num_src, self.num_dst, by_src.of_edge.shape[0],
                                  self.num_relations, by_src.count, self.pairs(PAIR_DST).count)

    def index(self, coarse: str, fine: str) -> Tensor:
        """[rows of ``fine``] int32: the row of ``coarse`` that each row of ``fine`` belongs to."""
        index = self._made.get((coarse, fine, "index"))
        if index is not None:
            return index
        return self._once((coarse, fine, "index"), lambda: self._make_index(coarse, fine),
                          wait=False)

    def _make_index(self, coarse: str, fine: str) -> Tensor:
        if fine in (PAIR_SRC, PAIR_DST):
            pairs = self.pairs(fine)
            return pairs.relation if coarse == RELATION else pairs.node
        if coarse in (PAIR_SRC, PAIR_DST):
            return self.pairs(coarse).of_edge
        if self.kernels:
            self.pairs(PAIR_DST)  # with which they may come
            index = self._made.get((coarse, fine, "index"))
            if index is not None:
                return index
        src, dst, relation = self._edges.ends()
        # never the caller's own
        index = {SRC: src, DST: dst, RELATION: relation}[coarse].to(torch.int32, copy=True)
        self._finish()
        return index

    def graph(self, source: str, target: str) -> GraphView:
        """The virtual graph from the rows of one domain to those of another, along the edges, in
        the caller's order."""
        view = self._made.get((source, target))
        if view is not None:
            return view

        def make() -> GraphView:
            return self._make_graph(source, target, self.index(source, EDGE),
                                    self.index(target, EDGE))

        return self._once((source, target), make, wait=False)

    def members(self, coarse: str, fine: str) -> GraphView:
        """The virtual graph with one edge from each row of ``fine`` to the row of ``coarse`` that
        it belongs to."""
        view = self._made.get((fine, coarse, "members"))
        return (view
                if view is not None
                else self._once((fine, coarse, "members"),
                                lambda: self._make_members(coarse, fine)))

    def _make_members(self, coarse: str, fine: str) -> GraphView:
        index = self.index(coarse, fine)
        return self._make_graph(fine, coarse,
                                torch.arange(index.shape[0], dtype=torch.int32, device=self.device),
                                index)

    def _make_graph(self, source: str, target: str, src: Tensor, dst: Tensor) -> GraphView:
        rows = self.statistics().rows
        return BetweenRows(src, dst, rows(source), rows(target))

    def mixture(self, bases: int) -> GraphView:
        """The virtual graph from the rows of ``bases`` tables [bases * num_src] to the source
        pairs: each pair has an edge from its node's row in every table, in order."""
        return self._once((PAIR_SRC, bases, "mixture"), lambda: self._make_mixture(bases))

    def _make_mixture(self, bases: int) -> GraphView:
        pairs = self.pairs(PAIR_SRC)
        tables = torch.arange(bases, dtype=torch.int32, device=self.device) * self.num_src
        src = (pairs.node.unsqueeze(1) + tables).flatten()
        dst = torch.arange(pairs.count, dtype=torch.int32,
                           device=self.device).repeat_interleave(bases)
        return GraphView(torch.stack([src, dst]), bases * self.num_src, pairs.count, own=True)

    def share(self, dtype: torch.dtype) -> Tensor:
        """[E]: 1 / edges of the edge's (destination, relation), in the caller's order."""
        return self._once(("share", dtype), lambda: of_the_graph(self._make_share(dtype)))

    def _make_share(self, dtype: torch.dtype, order: Tensor | None = None) -> Tensor:
        pairs = self.pairs(PAIR_DST)
        if self.kernels:
            counts = self._made.get(("counts",))  # shares are made by `_once`, which has the lock
            if counts is None:
                counts = self._made[("counts",)] = cuda_pairs.counted(pairs.of_edge, pairs.count)
            return cuda_pairs.shares(pairs.of_edge, counts, dtype, order)
        count = torch.bincount(pairs.of_edge, minlength=pairs.count)
        share = count.to(dtype).reciprocal().index_select(0, pairs.of_edge)
        return share if order is None else share.index_select(0, order)

    def share_along(self, source: str, target: str, back: bool = False) -> Tensor:
        """`share` in the order in which the graph from ``source`` to ``target`` holds its edges,
        ``back`` when traversed against them: read one after the other, rather than wherever the
        caller's order has them."""
        share = self._made.get(("share", source, target, back))
        if share is not None:
            return share

        def make() -> Tensor:
            graph = self.graph(source, target)
            rows = graph.csr_by_id() if back else graph.csc()
            return self._make_share(torch.float32, rows.place)

        return self._once(("share", source, target, back), make)

    def blocks(self, sizes: tuple[int, ...]) -> Blocks:
        """The sources or destinations by type, ``sizes`` of each, type after type."""
        return (self._made.get(("blocks", sizes))
                or self._once(("blocks", sizes), lambda: Blocks(sizes, self.device)))

    def of_blocks(self, sizes: tuple[int, ...]) -> GraphView:
        """The virtual graph with one edge from each destination to its type."""
        return self._once(("blocks", sizes, "members"), lambda: OfBlocks(self.blocks(sizes)),
                          wait=False)

    def types_of_blocks(self, sizes: tuple[int, ...]) -> Members:
        """Reading rows of types at the destinations."""
        return Members(self.blocks(sizes).relation, self.of_blocks(sizes))

    def degree(self) -> Tensor:
        """[num_dst] int64: the edges that enter each destination."""
        return self._once(("degree",),
                          lambda: torch.bincount(self.index(DST, EDGE), minlength=self.num_dst))

    def nbytes(self) -> int:
        """Bytes held by what was built so far. Arrays that two of them share count once, room that
        was not needed is left out."""
        values = {id(v): v for v in list(self._made.values())}.values()
        arrays = [v for v in values if isinstance(v, Tensor)]
        arrays += [t for v in values if isinstance(v, Pairs)
                   for t in (v.node, v.relation, v.ptr, v.of_edge)]
        arrays += self._edges.kept or ()
        return (sum(t.nbytes for t in {id(t): t for t in arrays}.values())
                + sum(v.nbytes() for v in values if isinstance(v, (Blocks, GraphView))))


# --- virtual graphs, of which more is known than of a caller's edges ------------------------------

class BetweenRows(GraphView):
    """A `GraphView` of edges given as sources and destinations, [E] int32 each, which it keeps: no
    copy of both as one array."""

    _kept: tuple[Tensor, Tensor]
    _complete = True  # relations and ids were checked

    def __init__(self, src: Tensor, dst: Tensor, num_src: int, num_dst: int):
        super().__init__(src, num_src, num_dst, num_edges=src.shape[0])
        self._kept = src, dst

    def _ends(self) -> tuple[Tensor, Tensor]:
        return self._kept


class OfBlocks(GraphView):
    """The edges from each node of ``blocks`` to its type, by which they are grouped already."""

    _complete = True

    def __init__(self, blocks: Blocks):
        super().__init__(blocks.ptr, blocks.count, blocks.ptr.shape[0] - 1, num_edges=blocks.count)
        self._blocks = blocks

    def _nodes(self) -> Tensor:
        return torch.arange(self.num_src, dtype=torch.int32, device=self.device)

    def _ends(self) -> tuple[Tensor, Tensor]:
        return self._nodes(), self._blocks.relation

    def _grouped(self, places: bool) -> Rows:
        ptr, nodes = self._blocks.ptr, self._nodes()
        return Rows(ptr, nodes, nodes, split_rows(ptr, self.num_src))
