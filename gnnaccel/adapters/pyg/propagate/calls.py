"""One call of ``propagate``: the short way of a call like an earlier one, and the long way."""
from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.pyg import guards
from gnnaccel.adapters.pyg.propagate import (adjacency, attention, completing, new_graphs_native,
                                             new_graphs_taken, reading, repeated_calls, visit)
from gnnaccel.adapters.pyg.propagate.described import described
from gnnaccel.cuda.runtime import capture, driver
from gnnaccel.dispatch import router
from gnnaccel.dispatch.graph import self_loops
from gnnaccel.dispatch.memory import layer_memory
from gnnaccel.dispatch.memory.layer_memory import MISSED, memories
from gnnaccel.dispatch.observe import counters, records, watch
from gnnaccel.dispatch.ops import aggregation_cost, aggregation_cuda, aggregation_route
from gnnaccel.dispatch.policy import rules
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.reasons import Reason
from gnnaccel.dispatch.quantized import aggregation as quantized, settings
from gnnaccel.dispatch.run.autograd import checkpointed, saved_tensor_hooks
from gnnaccel.dispatch.uncompiled import uncompiled
from gnnaccel.errors import GraphError

_grad, _tracing = torch.is_grad_enabled, torch._C._get_tracing_state
_drivers = driver.in_place
# edges below which a call is not looked at, and not at the first times
_FEW, _FEW_AT_FIRST = 1000, 20000


@uncompiled
def decide(layer: Any, native: Any, edge_index: Any, kwargs: dict, config: Config) -> Any:
    """The long way of a call."""
    attends = (None if _tracing() is not None or type(layer) in attention.of_the_host
               or _arguments_reason(kwargs) is not None
               else attention.read(layer, kwargs, edge_index))
    if attends is not None:
        return router.decide(layer, attends,  # type: ignore[arg-type]  # is never repeated
                             native, (edge_index,), kwargs, config)
    if records.listening():
        return watch.around(watch.Visit(layer, visit.PROPAGATE, native, (edge_index,),
                                        kwargs, config), _told)
    return _decide(layer, native, edge_index, kwargs, config, 0)


def _told(visit: watch.Visit) -> Any:
    """The long way of a call, with a record."""
    return _decide(visit.layer, visit.native, *visit.args,  # type: ignore[call-arg]  # one
                   visit.kwargs, visit.config, time.perf_counter_ns())


def _decide(layer: Any, native: Any, edge_index: Any, kwargs: dict, config: Config,
            start: int) -> Any:
    """``start``: when the call began, 0 when nobody listens."""
    verdict = rules.verdict(layer, config)
    free = config.when == "profitable" and config.on_fallback == "native"
    outcome: Any = verdict.reason
    if verdict.inside:  # a tracer would write down what reading looks at
        outcome = (guards.context_reason() if _tracing() is not None
                   else (free and _still_lazy(layer)) or _arguments_reason(kwargs)
                   or reading.read(layer, edge_index, kwargs))
    if type(outcome) is not Reason:
        return _read(layer, native, edge_index, kwargs, outcome, config, start)
    settings.note_native(layer, config, outcome)
    if verdict.inside:
        new_graphs_native.remember_formless(layer, edge_index, kwargs, outcome, config)
    else:
        new_graphs_native.looked_at(layer_memory.of(layer), kwargs, math.inf,
                                    type(layer).__name__, outcome.code, config, None, True)
    return aggregation_route.run(layer, "pyg", None, aggregation_route.native(outcome), config,
                                 None, lambda: _natively(native, layer, edge_index, kwargs), start)


def _read(layer: Any, native: Any, edge_index: Any, kwargs: dict, call: reading.Read,
          config: Config, start: int, memory: layer_memory.LayerMemory | None = None) -> Any:
    """Decide and run a call that was read. ``memory``: the layer's, if the call was read as the
    one kept there."""
    (graph, given, form, known, reduces, matrix), arguments = call, kwargs
    stacked, effective = memory is None and reading.moved(layer, form, kwargs), config
    if matrix is not None:
        arguments, effective = matrix.arguments, _asked(call, config)
    decision = (aggregation_route.decide(graph, given, effective) if len(reduces) == 1
                else aggregation_route.decide_all(graph, given, reduces, effective))
    entry, unfinished = settings.asked(layer, config), form.unfinished
    fresh = (not graph.known() if entry is None and decision.run is aggregation_cuda.run
             else None)  # before the run, which makes a structure
    if entry is not None:
        decision = quantized.narrowed(layer, entry, graph, given, config, decision,
                                      len(reduces) > 1)
    if decision.run is not None and (known.traced or unfinished and form.stand_in is not None):
        arguments = completing.arguments(form, layer, graph, arguments, known.traced)
    if decision.run is not None and unfinished:
        aggregation = completing.completed(layer, form, graph, given, arguments)
        if type(aggregation) is Reason:
            decision = aggregation_route.native(aggregation)
        else:
            given = aggregation
            call = call._replace(given=given)

    def finish(out: Any) -> Any:
        return reading.finished(layer, known, stacked, out, arguments, edge_index)

    out = aggregation_route.run(layer, "pyg", (graph, given), decision, config, finish,
                                lambda: _natively(native, layer, edge_index, kwargs), start)
    if (type(edge_index) is Tensor and not edge_index.is_inference()
        and not capture.capturing()):
        if decision.run is not None and memory is None:
            new_graphs_taken.remember(layer, edge_index, kwargs, call, decision, config, fresh)
        elif decision.run is not None and fresh is not None and len(reduces) == 1:
            memory.taken_once[_grad()].decided(  # type: ignore[union-attr]  # as it was read by it
                call, decision, fresh)
        if not decision.again:
            repeated_calls.remember(layer, edge_index, kwargs, call, decision, config, memory)
    return out


def _arguments_reason(kwargs: dict) -> Reason | None:
    """Why a call with these arguments is native, whatever the layer does."""
    return (guards.inference_reason(kwargs.values())
            or guards.subclass_reason(kwargs.values()))


def _still_lazy(layer: Any) -> Reason | None:
    """GA209 where this call only serves to make the layer's weights, as calls over lazy layers do
    once: its kernels would take longer to compile than it takes. Not in a checkpoint, which must
    repeat a call the same way."""
    return None if checkpointed() else guards.lazy_reason(*layer._modules.values())


def _asked(call: reading.Read, config: Config) -> Config:
    """The configuration of a call over a matrix: what the host refuses need not gain."""
    if not adjacency.host_refuses(call.matrix,  # type: ignore[arg-type]  # there is one
                                  call.reduces[0], call.given.x):
        return config
    return dataclasses.replace(config, when="supported")


def _natively(native: Any, layer: Any, edge_index: Any, kwargs: dict) -> Any:
    """The host's own code.

    GraphError where it would count edges that should count for nothing (`looped`).
    """
    if type(edge_index) is Tensor and self_loops.of(edge_index) is not None:
        from torch_geometric.nn import MessagePassing

        cls = type(layer)
        if not (cls.__module__.startswith("torch_geometric.")
                and cls.aggregate is MessagePassing.aggregate
                and type(layer.aggr_module).__name__ == "SumAggregation"):
            raise GraphError(f"{cls.__name__} cannot be captured in a CUDA graph: it would count "
                             "self loops that gcn_norm replaced. Add self loops before the capture "
                             "and make the layer with add_self_loops=False")
    return native(layer, edge_index, **kwargs)


# --- calls that repeat ----------------------------------------------------------------------------

@uncompiled
def fast_path(layer: Any, native: Any, edge_index: Any, kwargs: dict, config: Config) -> Any:
    """The result of a call that is like an earlier one of the layer, or too small to be read;
    `MISSED` for any other."""
    if _tracing() is not None:  # a tracer would write the comparisons down
        return MISSED
    entry, grad = memories.entries.get(id(layer)), _grad()
    memory = None if entry is None else entry[1]  # an entry goes when its layer does
    mode = grad + 2 * (layer.training is True)  # the layer's `mode_of`, without its call
    streak = None if memory is None else memory.going[grad]
    if streak is not None and streak.goes_on(memory, edge_index, kwargs, config, mode):
        return native(layer, edge_index, **kwargs)
    last = None if memory is None else memory.over[mode].get(id(edge_index))
    arguments: Any = None
    same_edges = last is not None and last.edges() is edge_index  # new ones may lie where old did
    if same_edges:
        while last is not None:
            if last.native:
                if last.fits(edge_index, kwargs, config):
                    return native(layer, edge_index, **kwargs)
            else:
                arguments = arguments or described(kwargs)
                out = last.run(layer, edge_index, kwargs, arguments, config)
                if out is not None:
                    memory.unrepeated = 0  # type: ignore[union-attr]  # it has `last`
                    return out
            last = last.older
    if (memory is not None and (memory.native_exact[mode] or memory.native_sized[mode])
        and type(layer) not in attention.of_the_host
        and _stays_native(memory, layer, edge_index, kwargs, config, mode)):
        memory.going[grad] = None
        return native(layer, edge_index, **kwargs)
    if same_edges:
        return MISSED
    earlier: Any = None if memory is None else memory.taken_once[grad]
    fits = earlier is not None and earlier.fits(layer, edge_index, described(kwargs), config)
    if fits and (out := earlier.run(layer, edge_index, kwargs, config, memory)) is not None:
        return out
    if memory is not None and memory.in_turn[grad]:
        other = memory.in_turn[grad].get(tuple(map(type, kwargs.values())))
        if (other is not None and other is not streak
            and other.goes_on(memory, edge_index, kwargs, config, mode)):
            return native(layer, edge_index, **kwargs)
    if config.when == "profitable" and too_small(layer, memory, edge_index, kwargs, config):
        return native(layer, edge_index, **kwargs)
    like = None if memory is None else memory.native_once[grad]
    if like is not None and like.holds(edge_index, kwargs, config):
        counters.count(like.name, "native", like.code)
        new_graphs_native.looked_at(memory,  # type: ignore[arg-type]  # it has `like`
                                    kwargs, like.most, like.name, like.code, config,
                                    edge_index.layout)
        return native(layer, edge_index, **kwargs)
    if not fits or earlier.summed:
        return MISSED
    call = earlier.read(layer, edge_index, kwargs)
    return (MISSED if call is None
            else _read(layer, native, edge_index, kwargs, call, config, 0, memory))


def _stays_native(memory: layer_memory.LayerMemory, layer: Any, edge_index: Any, kwargs: dict,
                  config: Config, mode: int) -> bool:
    """Whether a call is like one of attention that the router left native; counts it then."""
    like = layer_memory.looked_at(memory, layer, (edge_index,), kwargs, config, mode)
    if like is None:
        return False
    counters.again(type(layer).__name__, like.code)
    settings.native_again(layer)
    return True


def too_small(layer: Any, memory: layer_memory.LayerMemory | None, edge_index: Any, kwargs: dict,
              config: Config) -> bool:
    """Whether a call that has to gain may go native without being read; counts it then. Over so few
    edges nothing gains on a CPU, and a graph hardly seen before, of not many more, does not pay for
    its structure yet. One of many such calls is read, as a GPU may gain without a structure."""
    if (type(edge_index) is not Tensor or edge_index.dim() != 2
        or config.on_fallback != "native"):
        return False
    if settings.asked(layer, config) is not None:  # whose calls are counted
        return False
    edges = edge_index.shape[-1]
    if edges >= _FEW_AT_FIRST or saved_tensor_hooks(True) is not None:  # `checkpointed`
        return False
    without_gpu = edge_index.is_cpu and not _drivers  # as `driver.placed` says
    if edges < _FEW and without_gpu:
        counters.again(type(layer).__name__, "GA301")
        return True
    # edges of a sparse matrix are its columns here; on a GPU the host may have no code for extrema
    if edge_index.layout is not torch.strided and layer.__dict__.get("aggr") in ("max", "min"):
        return False
    if edge_index.is_inference() or not aggregation_cost.hardly_seen(edge_index):
        return False
    memory = layer_memory.of(layer) if memory is None else memory
    if not without_gpu:
        grad = _grad()
        memory.unread[grad] += 1
        if memory.unread[grad] == new_graphs_native.READ_SMALL_AT:
            return False
    name = type(layer).__name__
    counters.count(name, "native", "GA301")
    layout = edge_index.layout
    if layout is not torch.strided:
        edges = edge_index._nnz() if adjacency.is_matrix(edge_index) else 0
    if edges:
        most = min(edges * new_graphs_native.MORE, _FEW_AT_FIRST - 1)
        new_graphs_native.looked_at(memory, kwargs, most, name, "GA301", config, layout, True)
    return True
