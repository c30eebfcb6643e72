"""`OpGraph`: the edges that one operation runs over."""
from __future__ import annotations

from torch import Tensor

from gnnaccel.dispatch import cache
from gnnaccel.dispatch.graph import GraphView


class OpGraph:
    """Edges ``edge_index`` [2, E], int32 or int64, from ``num_src`` to ``num_dst`` nodes. Features of edges are in that order.

    It holds ``edge_index``, so that what is made of it can be made in backward too.
    """

    __slots__ = ("edge_index", "num_src", "num_dst", "cached", "_ends", "_view")

    def __init__(self, edge_index: Tensor, num_src: int, num_dst: int):
        self.edge_index, self.num_src, self.num_dst = edge_index, num_src, num_dst
        self.cached = "none"  # what the structure cache said, for records
        self._ends: tuple[Tensor, Tensor] | None = None
        self._view: GraphView | None = None

    @property
    def num_edges(self) -> int:
        return self.edge_index.shape[1]

    def index(self, target: str) -> Tensor:
        """[E]: the node of each edge at its source ("u") or destination ("v")."""
        if self._ends is None:
            src, dst = self.edge_index.unbind(0)
            self._ends = src, dst
        return self._ends[target == "v"]

    def rows(self, target: str) -> int:
        """How many rows features of "u", "v" or "e" have."""
        return {"u": self.num_src, "v": self.num_dst, "e": self.num_edges}[target]

    def view(self) -> GraphView:
        """The structure that kernels read, from the structure cache."""
        if self._view is None:
            self._view, self.cached = cache.lookup(self.edge_index, self.num_src, self.num_dst)
        return self._view

    def facts(self) -> dict[str, int]:
        """Of the graph, for records."""
        return dict(num_src=self.num_src, num_dst=self.num_dst, num_edges=self.num_edges)
