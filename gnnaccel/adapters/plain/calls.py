"""One call of a plain module that may sum over edges: read, decided and run."""
from __future__ import annotations

import inspect
import time
import types
from typing import Any, NamedTuple

import torch

from gnnaccel.adapters import guards
from gnnaccel.adapters.plain import arguments, tracing
from gnnaccel.adapters.pyg.propagate import aggregates, completing, generated
from gnnaccel.adapters.pyg.propagate.expressed import CallArguments
from gnnaccel.adapters.pyg.propagate.standins import Form
from gnnaccel.cuda import capture
from gnnaccel.dispatch.graph import self_loops
from gnnaccel.dispatch.observe import records
from gnnaccel.dispatch.ops import aggregation, aggregation_route
from gnnaccel.dispatch.ops.aggregation import Aggregation, Reduce
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.policy import rules
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.uncompiled import uncompiled

_NOT_FOLLOWED = "its forward does something that is not followed"


class Read(NamedTuple):
    """A call, understood: ``first`` of the aggregations over the graph, which differ in their
    ``reduces``."""

    graph: OpGraph
    first: Aggregation
    reduces: tuple[Reduce, ...]
    form: Form
    found: tracing.Found
    values: dict[str, Any]


@uncompiled
def decide(module: Any, function: types.FunctionType, signature: inspect.Signature, args: tuple,
           kwargs: dict, config: Config) -> Any:
    """The result of a call of ``function``, the ``forward`` of the module's class."""
    start = time.perf_counter_ns() if records.listening() else 0
    verdict = rules.verdict(module, config)
    call = (verdict.reason if not verdict.inside
            else guards.context_reason() or guards.inference_reason((*args, *kwargs.values()))
            or read(module, function, arguments.bound(signature, module, args, kwargs)))

    def native() -> Any:
        return function(module, *args, **kwargs)

    if type(call) is Reason:
        return aggregation_route.run(module, "torch", None, aggregation_route.native(call), config,
                                     None, native, start)
    assert type(call) is Read
    graph, first, reduces, form, found, values = call
    decision = aggregation_route.decide_all(graph, first, reduces, config)
    given: Any = first
    if decision.run is not None:
        values = CallArguments(values, graph, module)
        given = completing.completed(module, form, graph, first, values)
        if type(given) is Reason:
            decision = aggregation_route.native(given)

    def finish(out: Any) -> Any:
        return found.combine(out if type(out) is list else [out], values)

    return aggregation_route.run(module, "torch", (graph, given), decision, config, finish, native,
                                 start)


def read(module: Any, function: types.FunctionType, values: dict | None) -> Read | Reason:
    """The call as aggregations over a graph, or why it is none."""
    if values is None:
        return reason("GA206", "the arguments do not fit its forward")
    given = arguments.given(values)
    if type(given) is Reason:
        return given
    edge_index, nodes = given.edge_index, given.nodes
    if torch.is_autocast_enabled(edge_index.device.type):
        return reason("GA203", "autocast is on", "call the layer outside of autocast")
    if self_loops.of(edge_index) is not None or capture.capturing():
        return reason("GA204", "edges that stand for others")
    if not generated.serves(values):
        return reason("GA401")
    found = tracing.found(module, function, given)
    if found is None:
        return reason("GA211", _NOT_FOLLOWED)
    why = reason("GA211", "what was read of it has changed")
    graph = OpGraph(edge_index, nodes, nodes, found.flipped)
    if not found.trace.counts(graph) or not aggregates.rows_are_nodes(graph, found, values):
        return reason("GA206", "results are not one for each node")
    x = _source(given, found)
    if x is None:
        return reason("GA206", "no argument is a matrix of features")
    first = aggregation.prepare(found.reduces[0], values[x], None, edge_index.shape[1])
    if type(first) is Reason:
        return first
    form: Any = aggregates.form_of(found.trace, x, found.messages, why)
    first = completing.with_more(module, form, graph, first, values, True)
    if type(first) is Reason:
        return first
    return Read(graph, first, found.reduces, form, found, values)


def _source(given: arguments.Given, found: tracing.Found) -> str | None:
    """The argument that decides about dtype and device: features that are gathered, else others."""
    names = (*(name for name, _ in found.trace.ends), *given.kinds)
    return next((name for name in names if given.kinds[name] is not arguments.ONE
                 and given.values[name].dim() > 1
                 and given.values[name].is_floating_point()), None)
