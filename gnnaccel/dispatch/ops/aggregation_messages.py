"""Aggregations of the messages of `messages` by CUDA kernels."""
from __future__ import annotations

from torch import Tensor

from gnnaccel.dispatch.ops import messages
from gnnaccel.dispatch.ops.aggregation import Aggregation
from gnnaccel.dispatch.ops.call import Kernel
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.ops.messages import Shifted
from gnnaccel.dispatch.reasons import Reason, reason


def kernel(graph: OpGraph, given: Aggregation) -> Kernel | Reason:
    """The way by kernels, or why there is none."""
    found = _PARTS[type(given.more)].kernel(graph, given)
    return found._replace(run=lambda: run(graph, given)) if type(found) is Kernel else found


def run(graph: OpGraph, given: Aggregation) -> Tensor:
    """`aggregation.plain` by kernels."""
    return _PARTS[type(given.more)].run(graph, given)


class _Split:
    """A sum of the neighbours' rows, and one of the weights."""

    @staticmethod
    def kernel(graph: OpGraph, given: Aggregation) -> Kernel | Reason:
        from gnnaccel.dispatch.ops import aggregation_cuda

        if given.reduce not in ("sum", "mean"):
            return reason("GA208", f"{given.reduce} of messages that both ends of an edge go into")
        parts = [aggregation_cuda.kernel(graph, one) for one in (given._replace(more=None), messages.weights_alone(given))]
        for part in parts:
            if type(part) is Reason:
                return part

        def compile_() -> None:
            for part in parts:
                part.compile()

        return Kernel(f"{parts[0].name}, shifted", ("shifted", *(part.key for part in parts)), compile_, parts[0].run)

    @staticmethod
    def run(graph: OpGraph, given: Aggregation) -> Tensor:
        from gnnaccel.dispatch.ops import aggregation_cuda

        return messages.split(aggregation_cuda.run, graph, given)


_PARTS = {Shifted: _Split}
