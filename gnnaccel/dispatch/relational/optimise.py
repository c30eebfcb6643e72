"""Choosing the Program that runs for a stated one: all orderings, compacted and fused, are counted;
the cheapest is taken."""
from __future__ import annotations

import functools
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from gnnaccel.dispatch.ir.program import Program
from gnnaccel.dispatch.policy.config import PASSES
from gnnaccel.dispatch.relational.counting import Count, Formula, Shape, formulas, rates
from gnnaccel.dispatch.relational.gather import RelationStatistics
from gnnaccel.dispatch.relational.passes import compact, fuse, orderings

_seconds = attrgetter("seconds")


class Way(NamedTuple):
    """One way to compute a Program over any graph. ``ordered``: before compaction and fusion;
    ``program``: after; ``forward``, ``backward``, ``both``: counts of what it costs."""

    name: str
    ordered: Program
    program: Program
    forward: Formula
    backward: Formula
    both: Formula


class Ordering:
    """A `Way` over one graph. ``count``: of forward, ``back``: of backward, zero where that was not
    weighed, both counted when they are asked for; ``seconds``: estimated, of both."""

    __slots__ = ("_way", "_statistics", "program", "seconds")

    def __init__(self, way: Way, statistics: RelationStatistics, seconds: float):
        self._way, self._statistics = way, statistics
        self.program, self.seconds = way.program, seconds

    @property
    def name(self) -> str:
        return self._way.name

    @property
    def ordered(self) -> Program:
        return self._way.ordered

    @property
    def count(self) -> Count:
        return self._way.forward.at(self._statistics)

    @property
    def back(self) -> Count:
        return self._way.backward.at(self._statistics)


@dataclass(frozen=True, eq=False)
class Optimised:
    """All ``orderings`` of the Program ``stated``, cheapest first, which is taken."""

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
        """Statistics, and counts of each ordering, for records."""
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
    candidates, device_rates = [], rates(device)
    for way in _ways(stated, tuple(shapes.items()), device, "reordering" in passes, train):
        candidates.append(Ordering(way, statistics, way.both.at(statistics).by(device_rates)))
    candidates.sort(key=_seconds)
    return Optimised(stated, statistics, tuple(candidates))


@functools.lru_cache(maxsize=1024)
def _ways(stated: Program, shapes: tuple[tuple[str, Shape], ...], device: str, reordered: bool,
          train: bool) -> tuple[Way, ...]:
    """Orderings of a Program with their formulas, which are the same for every graph."""
    return tuple(Way(*programs, forward, backward, forward.with_(backward))
                 for programs in _programs(stated, reordered)
                 for forward, backward in [formulas(programs[-1], shapes, device, train)])


@functools.lru_cache(maxsize=256)
def _programs(stated: Program, reordered: bool) -> tuple[tuple[str, Program, Program], ...]:
    """(name, ordering, ordering compacted and fused) for each ordering: the same objects for all
    shapes, so that caches by Program serve them all."""
    ways = orderings(stated) if reordered else orderings(stated)[:1]
    return tuple((name, ordered, fuse(compact(ordered))) for name, ordered in ways)
