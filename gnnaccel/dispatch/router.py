"""A host call's way: the function in the place of the host's, rules, the adapter's statement, the
plan, the run, the record."""
from __future__ import annotations

import contextvars
import functools
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, compiler
from torch.compiler import is_dynamo_compiling

from gnnaccel.cuda.runtime import capture
from gnnaccel.dispatch.graph import ledger as ledgers
from gnnaccel.dispatch.graph.tensor_ref import unversioned
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.memory import layer_memory, native_learning
from gnnaccel.dispatch.memory.layer_memory import MISSED, LayerMemory, fast_path
from gnnaccel.dispatch.observe import counters, decisions, records, watch
from gnnaccel.dispatch.observe.decisions import Subject
from gnnaccel.dispatch.plan import planner
from gnnaccel.dispatch.plan.planner import Plan, native_plan
from gnnaccel.dispatch.plan.request import CallInputs, CallSpec
from gnnaccel.dispatch.policy import config as configs, rules
from gnnaccel.dispatch.policy.config import Config, current
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.quantized import attention as quantized, settings
from gnnaccel.dispatch.relational.request import RelationalCall, RelationalInputs, RelationalSpec
from gnnaccel.dispatch.run import attention
from gnnaccel.dispatch.run.autograd import checkpointed
from gnnaccel.dispatch.uncompiled import kept_apart, uncompiled


class Adapter(Protocol):
    """Interface of an adapter for one layer class."""

    host: str

    def key(self, layer: Any, args: tuple, kwargs: dict) -> tuple | None:
        """Key of a call: all that its route depends on but its integer tensors. None if it cannot
        be repeated without being stated."""

    def keep(self, layer: Any, args: tuple, kwargs: dict, spec: CallSpec,
             given: CallInputs | RelationalInputs) -> Any:
        """Facts of this call that calls repeating it need, without its tensors;
        `layer_memory.UNREPEATABLE` where none can."""

    def again(self, layer: Any, args: tuple, kwargs: dict,
              kept: Any) -> CallInputs | RelationalInputs:
        """The tensors of a call that repeats another one, as `state` would give them. ``kept``: the
        result of `keep` for that one."""

    def state(self, layer: Any, args: tuple, kwargs: dict) -> tuple[CallSpec, CallInputs] | Reason:
        """The call as a Program over a graph, or the reason why it is none. Must change nothing,
        nor compute on tensors."""

    #: (layer, args, kwargs, like) -> as `state`, of a call that differs from the kept one ``like``
    #: (`layer_memory.Exact`) in its graph and in numbers of rows alone, and so has its program;
    #: the result is None where that cannot be seen, the field None where it never can
    resized: Callable[[Any, tuple, dict, Any], Any] | None

    def run(self, layer: Any, spec: CallSpec, inputs: CallInputs, attend: attention.Call) -> Any:
        """The call's result; ``attend(tensors)`` runs the Program."""

    #: (layer, call) -> a plain call ``layer(x, edge_index)`` by kernels as an
    #: `attention_bound.Bound`, None if there is none; the field None where there never is
    bind: Callable[[Any, attention.Call], Any] | None


#: whether this is inside a call of a layer around others, over a new graph, that was estimated not
#: to pay as a whole
_whole_refused: contextvars.ContextVar[bool] = contextvars.ContextVar("gnnaccel_refused",
                                                                       default=False)
_AS_THE_WHOLE = native_plan(("kernels", reason(
    "GA301", "even for the whole layer around it, preparing this new graph would cost more than is "
    "saved")))


def routed(native: Callable, adapter: Any, inside: Callable | None = None,
           compiled: Callable | None = None) -> Callable:
    """The function that stands in for ``native``, a host layer's own ``forward``.

    ``inside(native, forward)``: the function that stands in for ``native`` on its route, of layers
    around others; ``forward``: the routed function, for layers that are made of them.
    ``compiled(native, layer, args, kwargs)``: a call in code that is compiled; None: such code gets
    ``native``.
    """
    held, cells = configs.held, configs.cells

    @kept_apart
    @functools.wraps(native)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # compiled regions (`is_compiling`, without its call) trace the host's own code (GA404),
        # but for what is made for them
        if is_dynamo_compiling() or compiler._is_compiling_flag:
            return (native(self, *args, **kwargs) if compiled is None
                    else compiled(native, self, args, kwargs))
        cell = held()  # `current`, without its call
        config = (cell.config if cell is not None else current() if cells
                  else configs.of_process)
        if config is None:
            return native(self, *args, **kwargs)
        out = fast_path(self, adapter, instead, args, kwargs, config)  # `route`, without its call
        if out is not MISSED:
            return out
        return decide(self, adapter, instead, args, kwargs, config)

    instead = native if inside is None else inside(native, forward)
    return forward


@uncompiled
def route(layer: Any, adapter: Adapter, native: Any, args: tuple, kwargs: dict,
          config: Config) -> Any:
    """Run one call of ``layer`` on the best route. ``native`` is the host's own function,
    unbound."""
    out = fast_path(layer, adapter, native, args, kwargs, config)
    if out is not MISSED:
        return out
    return decide(layer, adapter, native, args, kwargs, config)


@uncompiled
def decide(layer: Any, adapter: Adapter, native: Any, args: tuple, kwargs: dict,
           config: Config) -> Any:
    """`route` of a call that is like no earlier one."""
    if records.sinks:  # `records.listening`, without its call
        return watch.around(watch.Visit(layer, adapter, native, args, kwargs, config), _told)
    return _decide(layer, adapter, native, args, kwargs, config, 0)


def _told(visit: watch.Visit) -> Any:
    """`_decide` with a record."""
    return _decide(*visit, time.perf_counter_ns())


def _decide(layer: Any, adapter: Adapter, native: Any, args: tuple, kwargs: dict, config: Config,
            start: int) -> Any:
    """`decide` without watchers. ``start``: when the call began, 0 when nobody listens."""
    verdict = rules.verdict(layer, config)
    if not verdict.inside:
        settings.note_native(layer, config, verdict.reason)  # type: ignore[arg-type]  # has one
        return _refused(layer, adapter, native, args, kwargs, config, verdict.reason, start)
    held = layer_memory.memories.entries.get(id(layer))  # `IdentityMap.get`, without its call
    memory = held[1] if held is not None and held[0]() is layer else None
    statement, like = _stated(layer, adapter, args, kwargs, config, memory)
    if type(statement) is Reason:
        settings.note_native(layer, config, statement)
        if config.on_fallback == "native" and not capture.capturing():
            native_learning.remember_reason(layer, args, kwargs, config, statement)
        return _refused(layer, adapter, native, args, kwargs, config, statement, start)
    spec, inputs = statement
    if capture.capturing() and isinstance(spec, RelationalSpec):
        why = spec.captured_reason(inputs)
        if why is not None:
            return _refused(layer, adapter, native, args, kwargs, config, why, start)
    device, grad = inputs.device.type, torch.is_grad_enabled()
    fresh = _fresh(memory, layer, spec, inputs, args, kwargs)
    plan = (_AS_THE_WHOLE if fresh and _whole_refused.get() and config.when == "profitable"
            else planner.plan(spec.request(device, grad, fresh), config))
    view = None if plan.route == "native" else spec.lookup(inputs)
    if plan.route == "cuda" and spec.by_graph:
        plan = _over_this_graph(spec, view[0], plan, grad)  # type: ignore[index]
    entry = settings.asked(layer, config)
    use: Any = None if entry is None else quantized.chosen(layer, entry, config, spec, plan)
    if plan.route != "native":
        out = _by_plan(layer, adapter, args, kwargs, config, spec, inputs, plan, view, entry, use,
                       like, memory, start)
        # no view: a view made without gradients cannot be changed in place once they are on
        return out if grad or type(out) is not Tensor or not out._is_view() else out.detach()
    if entry is not None:
        entry.fell_back(use)
    if not settings.learning(use) and not capture.capturing():
        native_learning.remember(layer, inputs.structure,
                                 args if config.on_fallback == "native" else (), kwargs, config,
                                 plan.code, not fresh)
    if (fresh and device == "cuda" and spec.together and plan.code == "GA301"
            and config.on_fallback == "native"):
        native = _with_its_parts(native)
    return _native(layer, adapter, native, args, kwargs, config, spec, inputs, plan, start)


def _by_plan(layer: Any, adapter: Adapter, args: tuple, kwargs: dict, config: Config, spec: Any,
             inputs: Any, plan: Plan, made: Any, entry: Any, use: Any, like: Any,
             memory: LayerMemory | None, start: int) -> Any:
    """A call by a faster route, counted, remembered and recorded. ``made``: the structure, and how
    it was found; ``entry``, ``use``: of a quantized layer; ``like``: as of `_stated`."""
    counters.count(type(layer).__name__, plan.route)
    graph, hit = made
    call, run = spec.call(graph, plan), spec.runner(plan.route)
    if entry is not None:
        run = quantized.runner(entry, use, run)
    # a call in a capture says nothing about others
    if (hit != "none" and not capture.capturing()
        and (entry is None or (isinstance(spec, CallSpec) and not settings.learning(use)))):
        bound = layer_memory.remember(layer, adapter, args, kwargs, config, spec, inputs, plan,
                                      call, run, entry is not None, like, memory)
        if bound is not None and not start:
            return bound(inputs.x_src, graph)
    call.run = run if not start else _recorded(
        run, call, _subject(layer, adapter, spec, inputs.device.type),
        plan if entry is None else plan._replace(storage=run.storage),
        _graph_of(spec, graph), hit, start)
    return adapter.run(layer, spec, inputs, call)


def _stated(layer: Any, adapter: Adapter, args: tuple, kwargs: dict, config: Config,
            memory: LayerMemory | None) -> tuple[Any, Any]:
    """The result of `Adapter.state`, and the kept call as which the call was stated, None where it
    was stated by itself. ``memory``: the layer's."""
    if adapter.resized is not None and memory is not None:
        # `layer_memory.mode_of`, without its call
        like = memory.exact[torch.is_grad_enabled() + 2 * (layer.training is True)]
        if like is not None and like.epoch == config.epoch:
            statement = adapter.resized(layer, args, kwargs, like)
            if statement is not None:
                return statement, like
    return adapter.state(layer, args, kwargs), None


def _recorded(run: Any, call: Any, subject: Subject, plan: Plan, graph: Any, hit: str,
              start: int) -> Any:
    """``run`` that records the call's backward, after the call's own record was written."""
    passes = call.optimised().as_dict() if isinstance(call, RelationalCall) else None
    number = decisions.forward(subject, plan, graph, hit, _since(start), passes)
    return _recording(run, decisions.on_backward(subject, plan, number))


def _over_this_graph(spec: RelationalSpec, graph: Any, plan: Plan, grad: bool) -> Plan:
    """``plan``; native where the kernels for this graph's pairs cannot run, or not yet."""
    why = spec.call(graph, plan).problem(grad)
    return plan if why is None else native_plan((plan.kernel or "kernels", why))


def _with_its_parts(native: Any) -> Any:
    """``native`` of a layer around others, in which those stay native over new graphs."""
    def whole(layer: Any, *args: Any, **kwargs: Any) -> Any:
        token = _whole_refused.set(True)
        try:
            return native(layer, *args, **kwargs)
        finally:
            _whole_refused.reset(token)

    return whole


def _fresh(memory: LayerMemory | None, layer: Any, spec: CallSpec, inputs: CallInputs,
           args: tuple, kwargs: dict) -> int:
    """How many calls the graph's structure is expected to serve; 0 where it is not priced: it is
    there; or the layer was called over these very edges, and more often than over the graph before,
    so there will be more calls; or a checkpoint may repeat this call, and must then find the same
    route; or a CUDA graph will, in which few layers' own code can be captured. ``memory``: the
    layer's, None where it has none yet."""
    structure = inputs.structure
    if capture.capturing():
        return 0
    if unversioned(structure):
        return 1
    if memory is None:
        memory = layer_memory.of(layer)
    again, expected = memory.expects(inputs.edge_index)
    if spec.peek(inputs) or checkpointed():
        return 0
    if len(structure) == 1:
        if again:
            return expected
        ledger = ledgers.ledgers.get(id(structure[0]))
        if type(structure[0]) is Tensor and ledger is not None and not ledger.layers:
            return expected or 1  # no layer was native over them
    entry = memory.of(layer_memory.graph_of(structure, args, kwargs))
    return expected or 1 if entry is None else 0


def _recording(run: Any, on_backward: Any) -> Any:
    """``run`` whose result, the last of several, reports its backward."""

    def recorded(call: attention.Call, tensors: dict[str, Tensor]) -> Tensor:
        out = run(call, tensors)
        last = out[-1] if isinstance(out, tuple) else out
        if last.requires_grad:
            last.register_hook(on_backward)
        return out

    return recorded


# --- native ---------------------------------------------------------------------------------------

def _refused(layer, adapter, native, args, kwargs, config: Config, why: Any, start: int) -> Any:
    """The native result of a call that was not planned."""
    return _native(layer, adapter, native, args, kwargs, config, None, None,
                   native_plan((type(layer).__name__, why)), start)


def _native(layer, adapter, native, args, kwargs, config: Config, spec: CallSpec | None,
            given: CallInputs | None, plan: Plan, start: int) -> Any:
    name = type(layer).__name__
    counters.count(name, "native", plan.code)
    if start:
        device = given.device.type if given is not None else "cpu"
        decisions.forward(_subject(layer, adapter, spec, device), plan, _graph_of(spec, None),
                          "none", _since(start))
    # the user's own rules are no fallback
    chosen = all(r.code.startswith(("GA1", "GA210")) for _, r in plan.rejected)
    around = spec is not None and spec.around
    if config.on_fallback != "native" and not chosen and not around:
        decisions.object_to(name, config.on_fallback, plan.rejected)
    return native(layer, *args, **kwargs)


# --- records --------------------------------------------------------------------------------------

def _since(start: int) -> float:
    """Microseconds since ``start``, a `time.perf_counter_ns`."""
    return (time.perf_counter_ns() - start) / 1e3


def _subject(layer: Any, adapter: Adapter, spec: CallSpec | None, device: str) -> Subject:
    return Subject(adapter.host, type(layer).__name__, layer, device,
                   None if spec is None else spec.row, None if spec is None else spec.out)


def _graph_of(spec: CallSpec | None, graph: Any) -> dict[str, Any] | None:
    if spec is None:
        return None
    facts = spec.facts()
    statistics = (graph.statistics() if isinstance(graph, GraphView)
                  and graph.device.type == "cuda" else None)
    if statistics is not None:
        facts.update(max_degree=statistics.max_degree, mean_degree=statistics.mean_degree,
                     super_nodes=statistics.super_nodes, super_share=statistics.super_share,
                     density=statistics.density, histogram=list(statistics.histogram))
    return facts
