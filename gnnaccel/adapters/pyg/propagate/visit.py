"""``propagate`` of a layer without an adapter, in the form of one, for those who explain, compare
and measure calls.

The layer's own code around it stays the host's, so what they see is the aggregation alone: the
arguments of ``propagate``, and what it gives.
"""
from __future__ import annotations

from typing import Any

from gnnaccel.adapters.pyg.propagate import attention, completing, reading
from gnnaccel.dispatch.ops.aggregation_stated import AggregationInputs, AggregationSpec
from gnnaccel.dispatch.plan.request import CallSpec
from gnnaccel.dispatch.policy.reasons import Reason


class _Propagate:
    host = "pyg"

    @staticmethod
    def state(layer: Any, args: tuple[Any], kwargs: dict) -> tuple[Any, Any] | Reason:
        """``args``: the ``edge_index``; ``kwargs``: everything else."""
        attends = attention.read(layer, kwargs, *args)
        if attends is not None:
            return attends.state(layer, args, kwargs)
        call = reading.read(layer, *args, kwargs)
        if type(call) is Reason:
            return call
        kwargs = completing.arguments(call.form, layer, call.graph, kwargs,
                                      call.known.traced)
        first = completing.completed(layer, call.form, call.graph, call.given, kwargs)
        if type(first) is Reason:
            return first
        inputs = AggregationInputs(call.graph, first, call.reduces, (call, kwargs, *args))
        return AggregationSpec.of(inputs), inputs

    @staticmethod
    def run(layer: Any, spec: Any, inputs: Any, attend: Any) -> Any:
        if type(spec) is CallSpec:
            attends: Any = attention.read(layer, *inputs.extra)
            return attends.run(layer, spec, inputs, attend)
        call, kwargs, edge_index = inputs.more
        moved = reading.moved(layer, call.form, kwargs)
        return reading.finished(layer, call.known, moved, attend(inputs), kwargs,
                                edge_index)


PROPAGATE = _Propagate()
