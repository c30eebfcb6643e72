"""A relational layer's plain call that repeats: what was found out of one holds for the next over the same edges.

On small graphs stating such a call, planning it and finding its structure take as long as to launch its kernels.
"""
from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

from gnnaccel.dispatch.attention import Attend
from gnnaccel.dispatch.config import Config
from gnnaccel.dispatch.names import IdentityMap
from gnnaccel.dispatch.planner import Plan
from gnnaccel.dispatch.relational.request import RelationalGiven, RelationalStated
from gnnaccel.dispatch.relational.view import RelationView
from gnnaccel.dispatch.tensor_ref import TensorRef


class Repeated:
    """A layer's last plain call. Holds the tensors of its graph, and its structure, weakly."""

    __slots__ = ("epoch", "signature", "structure", "graph", "stated", "plan", "run")

    def attend(self) -> Attend | None:
        """To run the Program with; None where the structure is gone."""
        graph = self.graph()
        if graph is None:
            return None
        graph.touched = True
        return Attend(self.stated.call(graph, self.plan), self.run)


last: IdentityMap[Repeated] = IdentityMap()


def remember(layer: Any, signature: tuple | None, config: Config, given: RelationalGiven, graph: RelationView,
             stated: RelationalStated, plan: Plan, run: Any) -> None:
    """Keep what was decided of a call that has a ``signature``."""
    if signature is None:
        return
    kept = Repeated()
    kept.epoch, kept.signature, kept.graph, kept.plan, kept.run = config.epoch, signature, weakref.ref(graph), plan, run
    kept.structure = tuple(map(TensorRef, given.structure))
    kept.stated = replace(stated, make=_made_already)  # which holds the edges
    last.set(layer, kept)


def _made_already(own: bool, compact: bool) -> RelationView:
    raise AssertionError("the structure of a repeated call is there")
