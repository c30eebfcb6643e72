"""`OpGraph`: the edges that one operation runs over."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.graph import cache, joining, self_loops, structure
from gnnaccel.dispatch.graph.isolated import isolated
from gnnaccel.dispatch.graph.joining import JoinedView, flipped, flipped_sizes, reversed_ends
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.run.autograd import checkpointed


class OpGraph:
    """Edges ``edge_index`` [2, E], int32 or int64, from ``num_src`` to ``num_dst`` nodes. Features
    of edges are in that order. ``flipped``: its second row holds the sources.

    The object holds ``edge_index``, so that structures can be built in backward too.
    ``num_edges``: their number; ``built``: the result of `view`, None before; ``cached``: the
    structure cache's answer, "hit", "miss" or "none", for records.
    """

    __slots__ = ("edge_index", "num_src", "num_dst", "num_edges", "flipped", "built", "cached",
                 "_ends")

    def __init__(self, edge_index: Tensor, num_src: int, num_dst: int, flipped: bool = False,
                 view: GraphView | None = None, num_edges: int | None = None):
        self.edge_index, self.num_src, self.num_dst, self.flipped = (edge_index, num_src, num_dst,
                                                                     flipped)
        self.num_edges: int = edge_index.shape[1] if num_edges is None else num_edges
        self.built, self.cached = view, "none"
        self._ends: tuple[Tensor, Tensor] | None = None

    def index(self, target: str) -> Tensor:
        """[E]: the node of each edge at its source ("u") or destination ("v")."""
        if self._ends is None:
            src, dst = self.edge_index.unbind(0)
            self._ends = src, dst = (dst, src) if self.flipped else (src, dst)
            if not driver.runs_on(src.device):  # torch operations say little of ids out of range
                structure.check_ids(src, dst, self.num_src, self.num_dst)
        return self._ends[target == "v"]

    def rows(self, target: str) -> int:
        """Number of rows of features of "u", "v" or "e"."""
        return {"u": self.num_src, "v": self.num_dst, "e": self.num_edges}[target]

    def view(self) -> GraphView:
        """The structure that kernels read, from the structure cache."""
        if self.built is None:
            looped = self_loops.of(self.edge_index)
            if looped is not None:
                self.built, self.cached = cache.lookup_many(
                    (looped.edge_index,), (*self._sizes(), "looped", looped.loops),
                    lambda own: self._with_loops(looped, own))
            elif self.flipped:
                self.built, self.cached = flipped(self.edge_index, self.num_src, self.num_dst)
            else:
                self.built, self.cached = cache.lookup(self.edge_index, self.num_src, self.num_dst)
        return self.built

    def known(self) -> bool:
        """Whether `view` is there already."""
        return (self.built is not None or self_loops.of(self.edge_index) is not None
                or cache.peek_many((self.edge_index,), self._sizes()))

    def found(self) -> bool:
        """Whether `view` is there already; sets ``built`` then."""
        if self_loops.of(self.edge_index) is not None:
            return True
        self.built, self.cached = cache.lookup_many((self.edge_index,), self._sizes(), None)
        return self.built is not None

    def _sizes(self) -> tuple:
        return (flipped_sizes(self.num_src, self.num_dst) if self.flipped else
                (self.num_src, self.num_dst, 0))

    def _with_loops(self, found: self_loops.Looped, own: bool) -> GraphView:
        ends = reversed_ends if self.flipped else torch.unbind
        return JoinedView((found.edge_index,), self.num_src, self.num_dst, ends, own, found.loops)

    def unread(self, target: str) -> tuple[Tensor, Tensor] | None:
        """[nodes]: whether no edge is at a node's rows of "u" or "v", and [1] a node with one; None
        where all nodes are known to have one."""
        if not driver.runs_on(self.edge_index.device):
            index = self.index(target)
            bare = torch.ones(self.rows(target), dtype=torch.bool, device=index.device)
            return bare.index_fill_(0, index.long(), False), index[:1]
        view = self.view()
        return (view.csr if target == "u" else view.csc)(places=False).bare(checkpointed())

    def isolated(self) -> tuple[Tensor, Tensor] | None:
        """As `unread`, of nodes that no edge is at, at either end, where sources are the
        destinations."""
        if not driver.runs_on(self.edge_index.device):
            (by_src, node), (by_dst, _) = self.unread("u"), self.unread("v")  # type: ignore[misc]
            return by_src & by_dst, node
        return isolated(self.view(), checkpointed())

    def facts(self) -> dict[str, int]:
        """Sizes of the graph, for records."""
        return dict(num_src=self.num_src, num_dst=self.num_dst, num_edges=self.num_edges)


class ProductGraph(OpGraph):
    """An `OpGraph` over which the host's own code is a product with a sparse matrix."""

    __slots__ = ()


class JoinedGraph(OpGraph):
    """An `OpGraph` of the edges ``join(*structure)``: arguments as of `JoinedView`, with which it
    shares its structure."""

    __slots__ = ("_structure", "_join")

    def __init__(self, structure: tuple[Tensor, ...], num_src: int, num_dst: int,
                 join: Callable[..., tuple], view: GraphView | None = None):
        super().__init__(structure[0], num_src, num_dst, view=view,
                         num_edges=sum([t.shape[1] for t in structure]))
        self._structure, self._join = structure, join

    def index(self, target: str) -> Tensor:
        if self._ends is None:
            self._ends = joining.checked(self._join, self._structure)[:2]
        return self._ends[target == "v"]

    def view(self) -> GraphView:
        if self.built is None:
            self.built, self.cached = cache.lookup_many(self._structure, self._sizes(),
                                                        self._joined)
        return self.built

    def known(self) -> bool:
        return self.built is not None or cache.peek_many(self._structure, self._sizes())

    def _sizes(self) -> tuple:
        return "joined", self.num_src, self.num_dst, 0, self._join

    def _joined(self, own: bool) -> GraphView:
        return JoinedView(self._structure, self.num_src, self.num_dst, self._join, own)
