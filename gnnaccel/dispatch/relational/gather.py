"""Rows of one domain read in a finer one, and how many rows each domain has."""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.ir.program import DST, EDGE, PAIR_DST, PAIR_SRC, RELATION, SRC

if TYPE_CHECKING:
    from gnnaccel.dispatch.relational.view import RelationView


@dataclass(frozen=True)
class RelationStatistics:
    """Counts that the passes weigh orderings with. ``pairs_src``, ``pairs_dst``: distinct (node,
    relation) pairs."""

    num_src: int
    num_dst: int
    num_edges: int
    num_relations: int
    pairs_src: int
    pairs_dst: int

    def rows(self, domain: str) -> int:
        """Rows of a value that lives in ``domain``."""
        return {SRC: self.num_src, DST: self.num_dst, EDGE: self.num_edges,
                RELATION: self.num_relations, PAIR_SRC: self.pairs_src,
                PAIR_DST: self.pairs_dst}.get(domain, 1)


@dataclass(frozen=True)
class Gather:
    """Reading rows of ``coarse`` in ``fine``: which row each row of ``fine`` belongs to, and the
    way back for gradients."""

    view: RelationView
    coarse: str
    fine: str

    @property
    def index(self) -> Tensor:
        """[rows of ``fine``] int32."""
        return self.view.index(self.coarse, self.fine)

    @property
    def members(self) -> GraphView:
        return self.view.members(self.coarse, self.fine)


class Members(NamedTuple):
    """A `Gather` that is given by its arrays, not by domains.

    ``index`` [rows] int32: which coarse row each row reads; ``members``: the graph with an edge
    from each row to its coarse row.
    """

    index: Tensor  # type: ignore[assignment]  # hides tuple.index
    members: GraphView
