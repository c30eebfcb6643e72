"""``propagate`` of a layer without an adapter, in the form of one, for those who explain, compare
and measure calls.

The layer's own code around it stays the host's, so what they see is the aggregation alone: the
arguments of ``propagate``, and what it gives.
"""
from __future__ import annotations

from typing import Any

from gnnaccel.adapters.pyg import propagate_reading as reading
from gnnaccel.dispatch.ops.aggregation_stated import AggregationGiven, AggregationStated
from gnnaccel.dispatch.reasons import Reason


class _Propagate:
    host = "pyg"

    @staticmethod
    def state(layer: Any, args: tuple[Any],
              kwargs: dict) -> tuple[AggregationStated, AggregationGiven] | Reason:
        """``args``: the ``edge_index``; ``kwargs``: everything else."""
        found = reading.read(layer, *args, kwargs)
        if type(found) is Reason:
            return found
        first = reading.completed(layer, found.form, found.graph, found.given, kwargs)
        if type(first) is Reason:
            return first
        given = AggregationGiven(found.graph, first, found.reduces, (found, kwargs))
        return AggregationStated.of(given), given

    @staticmethod
    def run(layer: Any, stated: AggregationStated, given: AggregationGiven, attend: Any) -> Any:
        found, kwargs = given.more
        moved = reading.stacked(layer, reading.source(kwargs, found.form.source))
        return reading.finished(layer, found.known, moved, attend(given), kwargs)


PROPAGATE = _Propagate()
