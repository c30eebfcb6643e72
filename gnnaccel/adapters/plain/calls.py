"""One call of a plain module that may sum over edges: read, decided and run. What is remembered of
calls is that of message passing (`pyg.propagate.calls`)."""
from __future__ import annotations

import time
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gnnaccel.adapters import guards
from gnnaccel.adapters.plain import arguments, tracing
from gnnaccel.adapters.plain.repeated import Repeated
from gnnaccel.adapters.plain.signature import Signature
from gnnaccel.adapters.pyg.propagate import (aggregates, calls, completing, generated,
                                              new_graphs_native, repeated_calls)
from gnnaccel.adapters.pyg.propagate.reading import Read
from gnnaccel.adapters.tracing.derived.program import DERIVED
from gnnaccel.adapters.tracing.expressed import CallArguments
from gnnaccel.cuda.runtime import capture, driver
from gnnaccel.dispatch.generated.messages import Generated
from gnnaccel.dispatch.graph import self_loops
from gnnaccel.dispatch.memory import layer_memory
from gnnaccel.dispatch.memory.layer_memory import MISSED
from gnnaccel.dispatch.observe import records, watch
from gnnaccel.dispatch.ops import aggregation, aggregation_route, route
from gnnaccel.dispatch.ops.aggregation import Aggregation
from gnnaccel.dispatch.ops.aggregation_route import Decision
from gnnaccel.dispatch.ops.aggregation_stated import AggregationInputs, AggregationSpec
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.policy import rules
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.uncompiled import uncompiled

_NOT_FOLLOWED = "its forward does something that is not followed"
_drivers = driver.in_place
HOST = "torch"
_TENSORS = (Tensor, Parameter)
_WITHOUT_EDGES = 16
#: what a call's arguments, and what its module computes around the sums, cost the host, in inputs
#: that are computed (`Generated.made`); by hand, so that a network over 150,000 edges stays native,
#: which took longer by kernels on the slow host of an H200 (docs/notes/aggregation.md)
_AROUND = 3
#: the same for each list of edges that a forward makes: such a call is never a repeated one, and
#: makes 120 Python calls more (by hand, not timed on a GPU)
_LIST = 4


class Forward:
    """The ``forward`` of a class, ``function``, with its ``signature``: an adapter for those who
    explain, compare and measure calls. ``let_go()`` puts the function back; ``left``: how many
    calls without a list of edges there may be until then, None once one had some."""

    host = HOST

    def __init__(self, function: types.FunctionType, signature: Signature,
                 let_go: Callable[[], None]):
        self.function, self.signature, self.let_go = function, signature, let_go
        self.left: int | None = _WITHOUT_EDGES

    def has_edges(self, given: Any) -> None:
        """Note whether a call's arguments have a list of edges."""
        if given is not arguments.NO_EDGES:
            self.left = None
        elif self.left is not None:
            self.left -= 1
            if not self.left:
                self.let_go()

    def state(self, module: Any, args: tuple, kwargs: dict) -> tuple[Any, Any] | Reason:
        """The call stated, or why it cannot be."""
        understood = arguments.understood(self.signature, args, kwargs)
        call = read(module, self.function, understood)
        if type(call) is Reason:
            return call
        assert type(call) is Read and type(understood) is arguments.Given
        given = CallArguments(understood.values, call.graph, module)
        first = completing.completed(module, call.form, call.graph, call.given, given)
        if type(first) is Reason:
            return first
        inputs = AggregationInputs(call.graph, first, call.reduces, (call.known, given))
        return AggregationSpec.of(inputs), inputs

    def run(self, module: Any, spec: Any, inputs: Any, attend: Any) -> Any:
        """The result of a call that was stated."""
        found, given = inputs.more
        return found.result(attend(inputs), given)


def decided(forward: Forward) -> Callable:
    """The function that gives the result of a call of a class with this ``forward``."""
    @uncompiled
    def decide(module: Any, args: tuple, kwargs: dict, config: Config) -> Any:
        if not _drivers and _on_cpu(args, kwargs) and route.on_cpu_native(type(module).__name__,
                                                                          config):
            return forward.function(module, *args, **kwargs)
        return _looked_at(module, forward, args, kwargs, config)

    return decide


def _looked_at(module: Any, forward: Forward, args: tuple, kwargs: dict, config: Config) -> Any:
    """The result of a call that is not native at once."""
    if records.listening():
        return watch.around(watch.Visit(module, forward, forward.function, args, kwargs, config),
                            _told)
    given = arguments.understood(forward.signature, args, kwargs)
    if forward.left is not None:
        forward.has_edges(given)

    def native(*_: Any, **__: Any) -> Any:
        return forward.function(module, *args, **kwargs)

    if type(given) is arguments.Given and not capture.capturing():
        out = calls.fast_path(module, native, given.edge_index, given.values, config)
        if out is not MISSED:
            return out
    return _decide(module, forward.function, given, native, config, 0)


def _on_cpu(args: tuple, kwargs: dict) -> bool:
    """Whether a call is on a CPU: a look at its first tensor decides."""
    for one in (*args, *kwargs.values()):
        if type(one) in _TENSORS:
            return one.is_cpu
    return False


def _told(visit: watch.Visit) -> Any:
    """A call with a record."""
    start, forward = time.perf_counter_ns(), visit.adapter
    given = arguments.understood(forward.signature, visit.args, visit.kwargs)
    return _decide(visit.layer, forward.function, given,
                   lambda: visit.native(visit.layer, *visit.args, **visit.kwargs),
                   visit.config, start)


def _decide(module: Any, function: types.FunctionType, given: Any, native: Any, config: Config,
            start: int) -> Any:
    """The long way of a call. ``start``: when it began, 0 when nobody listens."""
    verdict = rules.verdict(module, config)
    call = read(module, function, given) if verdict.inside else verdict.reason
    if type(call) is Reason:
        if type(given) is arguments.Given and verdict.inside:
            new_graphs_native.remember_formless(module, given.edge_index, given.values, call,
                                                config)
        return aggregation_route.run(module, HOST, None, aggregation_route.native(call), config,
                                     None, native, start)
    assert type(call) is Read
    graph, values, first = call.graph, given.values, call.given
    found: Any = call.known
    decision = aggregation_route.decide_all(graph, first, call.reduces, config)
    if decision.run is not None:
        values = CallArguments(values, graph, module)
        whole = completing.completed(module, call.form, graph, first, values)
        if type(whole) is Reason:
            decision = aggregation_route.native(whole)
        else:
            first = whole
    out = aggregation_route.run(module, HOST, (graph, first), decision, config,
                                lambda out: found.result(out, values), native, start)
    if not given.edge_index.is_inference() and not capture.capturing() and not decision.again:
        _remember(module, given, call, decision, config)
    return out


def _remember(module: Any, given: arguments.Given, call: Read, decision: Decision,
              config: Config) -> None:
    """Keep a call for those that repeat it."""
    memory = layer_memory.of(module)
    given.values.pop(DERIVED, None)
    if decision.run is not None:
        known: Any = call.known
        if call.graph.built is None or not memory.keeps(call.graph.built) or known.derived:
            return
        kept: Any = Repeated(type(module), given, call, decision, config)
    elif config.on_fallback == "native":
        kept = repeated_calls.RepeatedNative(module, given.edge_index, given.values, call,
                                             decision, config)
        new_graphs_native.remember(module, given.edge_index, given.values, call, decision, config)
    else:
        return
    repeated_calls.keep(module, given.edge_index, kept, memory)


# --- reading --------------------------------------------------------------------------------------

def read(module: Any, function: types.FunctionType, given: Any) -> Read | Reason:
    """The call as aggregations over a graph, or why it is none. ``given``: its arguments, or why
    they are not understood."""
    if type(given) is Reason:
        return given
    edge_index, values = given.edge_index, given.values
    why = guards.inference_reason(values.values()) or _unfit(given)
    if why is not None:
        return why
    if not generated.serves(values):
        return reason("GA401")
    found = tracing.found(module, function, given)
    if found is not None and found.derived is not None:
        given = found.derived.of_call(given)
        if type(given) is Reason:
            return given
        edge_index = given.edge_index
    x = None if found is None else _source(given, found)
    if found is None or x is None:
        return reason("GA211", _NOT_FOLLOWED)
    if found.derived is not None:
        why = found.derived.unfit(module, given, values[x])
        if why is not None:
            return why
    sources = _sources(given, found)
    if sources is None or tracing.counts_from_behind(module, edge_index):
        return reason("GA204", "there may be ids of no node, or negative ones")
    graph = OpGraph(edge_index, sources, given.nodes, found.flipped)
    if not found.trace.counts(graph) or not aggregates.rows_are_nodes(graph, found, values):
        return reason("GA206", "results are not one for each node")
    first: Any = aggregation.prepare(found.reduces[0], values[x], None, edge_index.shape[1])
    form: Any = aggregates.form_of(found.trace, x, found.messages,
                                   reason("GA211", "what its forward reads has changed"))
    if type(first) is not Reason:
        first = completing.with_more(module, form, graph, first, values, True)
    if type(first) is Aggregation and type(first.more) is Generated:
        around = _AROUND + (0 if found.derived is None else _LIST * len(found.derived.lists))
        first = first._replace(more=first.more._replace(made=first.more.made + around))
    return first if type(first) is Reason else Read(
        graph, first, form, found, found.reduces)  # type: ignore[arg-type]  # for its `Known`


def _unfit(given: arguments.Given) -> Reason | None:
    """Why no kernel takes such arguments, whatever the module does."""
    if torch.is_autocast_enabled(given.edge_index.device.type):
        return reason("GA203", "autocast is on", "call the layer outside of autocast")
    if self_loops.of(given.edge_index) is not None:
        return reason("GA204", "edges that stand for others")
    for name, kind in given.kinds.items():
        t = given.values[name]
        if kind is not arguments.COUNT and t.is_floating_point() and t.dtype is not torch.float32:
            return reason("GA203", f"{name} is {t.dtype}", "use float32")
    return None


def _sources(given: arguments.Given, found: tracing.Found) -> int | None:
    """How many nodes there are at the end that edges come from. If no rows are picked there, the
    device is asked for the last; None where it cannot be."""
    if found.sends:
        return given.nodes
    if capture.capturing():
        return None
    return max(given.nodes, int(given.edge_index[int(found.flipped)].amax()) + 1)


def _source(given: arguments.Given, found: tracing.Found) -> str | None:
    """The argument that decides about dtype and device: features that are gathered, else others."""
    names = (*(name for name, _ in found.trace.ends), *given.kinds)
    return next((name for name in names if given.kinds[name] in (arguments.NODES, arguments.EDGES)
                 and given.values[name].dim() > 1
                 and given.values[name].is_floating_point()), None)
