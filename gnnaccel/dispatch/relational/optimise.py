"""From a stated Program to the one that runs: all orderings, compacted and fused, counted; the
cheapest is taken."""
from __future__ import annotations

import functools
from dataclasses import dataclass

from gnnaccel.dispatch.ir.program import Program
from gnnaccel.dispatch.policy.config import PASSES
from gnnaccel.dispatch.relational.compaction import compact
from gnnaccel.dispatch.relational.counting import Count, Shape, formulas
from gnnaccel.dispatch.relational.fusion import fuse
from gnnaccel.dispatch.relational.gather import RelationStatistics
from gnnaccel.dispatch.relational.reordering import orderings


@dataclass(frozen=True, eq=False)
class Ordering:
    """One way to compute a Program. ``ordered``: before compaction and fusion; ``program``: after;
    ``count``: of forward, ``back``: of backward, zero where that was not weighed; ``seconds``:
    estimated, of both."""

    name: str
    ordered: Program
    program: Program
    count: Count
    seconds: float
    back: Count = Count()


@dataclass(frozen=True, eq=False)
class Optimised:
    """``stated``; ``orderings``: all that were counted, cheapest first; the first is taken."""

    stated: Program
    statistics: RelationStatistics
    orderings: tuple[Ordering, ...]

    @property
    def program(self) -> Program:
        return self.orderings[0].program

    @property
    def ordered(self) -> Program:
        return self.orderings[0].ordered

    @property
    def taken(self) -> Ordering:
        return self.orderings[0]

    def as_dict(self) -> dict:
        """For records: statistics, and what was counted for each ordering."""
        s, edges = self.statistics, max(1, self.statistics.num_edges)
        return {"pairs_src": s.pairs_src, "pairs_dst": s.pairs_dst, "relations": s.num_relations,
                "compaction_src": s.pairs_src / edges, "compaction_dst": s.pairs_dst / edges,
                "ordering": self.taken.name,
                "orderings": [{"name": o.name, **_told(o.count),
                               "backward": _told(o.back) if o.back.launches else None,
                               "estimated_us": o.seconds * 1e6} for o in self.orderings]}


def _told(count: Count) -> dict[str, int]:
    return {"bytes": count.moved, "flops": count.flops, "launches": count.launches}


def optimise(stated: Program, shapes: dict[str, Shape], statistics: RelationStatistics, device: str,
             passes: tuple[str, ...] = PASSES, train: bool = False) -> Optimised:
    """Counts every ordering of ``stated`` and puts the cheapest first.

    shapes: as in `counting.count`. device: "cuda" or "cpu", whose rates weigh bytes against
    operations. passes: without "reordering" only the Program as stated is looked at. (Without
    "compaction" the view that gives the statistics has a pair per edge; the Program is the same.)
    train: on a GPU backward is weighed too.
    """
    known, found = tuple(shapes.items()), []
    for name, ordered, program in _ways(stated, "reordering" in passes):
        counted, back = (formula.at(statistics)
                         for formula in formulas(program, known, device, train))
        found.append(Ordering(name, ordered, program, counted, (counted + back).seconds(device),
                              back))
    return Optimised(stated, statistics, tuple(sorted(found, key=lambda o: o.seconds)))


@functools.lru_cache(maxsize=256)
def _ways(stated: Program, reordered: bool) -> tuple[tuple[str, Program, Program], ...]:
    """Name, the ordering, and what becomes of it: the same Programs for every graph, so that what
    is found out about them is found out once."""
    ways = orderings(stated) if reordered else orderings(stated)[:1]
    return tuple((name, ordered, fuse(compact(ordered))) for name, ordered in ways)
