"""The way of one aggregation inside a host's layer: what speaks for and against each candidate, the
run, the record."""
from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.cuda import capture, driver
from gnnaccel.dispatch import counters, looped, records, router, rules
from gnnaccel.dispatch.checkpoints import checkpointed
from gnnaccel.dispatch.config import Config
from gnnaccel.dispatch.ops import (aggregation, aggregation_cost, aggregation_cpu, aggregation_cuda,
                                   aggregation_once)
from gnnaccel.dispatch.ops.aggregation import Aggregation, Reduce
from gnnaccel.dispatch.ops.aggregation_cost import Estimate
from gnnaccel.dispatch.ops.call import compile_reason
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.ops.route import device_reason
from gnnaccel.dispatch.reasons import Reason, reason

_KERNELS, _TORCH = "kernels", "torch operations"
_ON_CPU = reason("GA401", "the tensors are on the cpu, the kernels need a CUDA device")
_NO_GAIN = reason("GA301", "torch operations gain nothing on a GPU")
_MAY_NOT_COME_AGAIN = reason("GA301",
                             "the gain does not pay for the structure of a graph that may not come "
                             "again")
_ONCE = reason("GA302",
               "the structure of a graph that may not come again costs more than it saves "
               "over the list of edges")
_CHOSEN = ("GA301", "GA303", "GA401", "GA406")  # not a lack of ours
Run = Callable[[OpGraph, Aggregation], Any]


class Decision(NamedTuple):
    """``run``: None on the native route; ``estimate``: what such a call gains, if that was
    asked."""

    route: str
    kernel: str | None
    run: Run | None
    rejected: tuple[tuple[str, Reason], ...]
    estimate: Estimate | None
    storage: str | None = None  # the rows' format where it is not their dtype
    again: bool = False  # to be decided anew at the next call
    # counts further native calls like this one, where somebody does
    fell_back: Callable[[], None] | None = None

    @property
    def code(self) -> str | None:
        """Why it is native."""
        return self.rejected[0][1].code if self.run is None and self.rejected else None


def native(why: Reason) -> Decision:
    """The host's own code, for a reason that no candidate changes."""
    return Decision("native", None, None, ((_KERNELS, why),), None)


class Asked(NamedTuple):
    """What a decision is asked for that nothing will follow: on a call that is part of training, if
    ``grad``; over a graph that is ``fresh``, so that its structure has to be built, or that comes
    again."""

    grad: bool
    fresh: bool


def decide(graph: OpGraph, given: Aggregation, config: Config,
           asked: Asked | None = None) -> Decision:
    """The route of an aggregation that is about to run, or is ``asked`` about. Builds nothing but
    kernels, and those only where they are to run."""
    if given.x.is_cpu and config.backend == "auto" and not driver.placed():
        return _without_kernels(graph, given, config, _ON_CPU, asked)
    against = device_reason(given.x.device, config)
    kernel = against or aggregation_cuda.kernel(graph, given)
    if type(kernel) is Reason:
        return _without_kernels(graph, given, config, kernel, asked)
    why, estimate = _cost_reason(graph, given, config, asked)
    if why is _ONCE:
        name = aggregation_once.kernel(graph, given).name  # type: ignore[union-attr]
        return Decision("cuda", name, aggregation_once.run, (("kernels over a structure", why),),
                        estimate, again=True)
    if why is not None:
        return Decision("native", None, None, ((_KERNELS, why),), estimate)
    against = compile_reason(kernel)
    if against is not None:
        return _without_kernels(graph, given, config, against, asked)
    return Decision("cuda", kernel.name, aggregation_cuda.run, (), estimate)


def decide_all(graph: OpGraph, given: Aggregation, reduces: tuple[Reduce, ...], config: Config,
               asked: Asked | None = None) -> Decision:
    """The route of aggregations that differ in nothing but their ``reduces``, of which ``given``
    has the first; several give a list. One that is native makes all native, as the host makes its
    messages once for all. Kernels share a pass where they can."""
    if len(reduces) == 1:
        return decide(graph, given, config, asked)
    found = [decide(graph, given.by(one), config, asked) for one in reduces]
    for one in found:
        if one.run is None:
            return one
    kernels: list[str]
    runs: list[Run]
    kernels, runs = [one.kernel for one in found], [one.run for one in found]  # type: ignore[misc]

    def apart(graph: OpGraph, given: Aggregation) -> list[Tensor]:
        return [run(graph, given.by(reduce)) for run, reduce in zip(runs, reduces)]

    run = apart
    if all(one.route == "cuda" for one in found):
        together = aggregation_cuda.together(graph, given, reduces)
        groups = tuple(group for group, kernel in together.items()
                       if compile_reason(kernel) is None)
        kernels = [next((together[group].name for group in groups if reduce in group), kernel)
                   for reduce, kernel in zip(reduces, kernels)]
        run = partial(aggregation_cuda.run_all, reduces=reduces, groups=groups, alone=runs)
    # once one has a structure, there is one
    first = next((one for one in found if not one.again), found[0])
    return first._replace(kernel=", ".join(dict.fromkeys(kernels)), run=run)


def on(route: str, graph: OpGraph, given: Aggregation) -> Tensor:
    """One aggregation's result on ``route``, as of a `Decision` that took it."""
    if route == "cuda":
        return aggregation_cuda.run(graph, given)
    return (aggregation_cpu.run
            if _unfit_by_torch(graph, given) is None else aggregation.plain)(graph, given)


def on_all(route: str, graph: OpGraph, given: Aggregation,
           reduces: tuple[Reduce, ...]) -> list[Tensor]:
    """Several, as of a `Decision` of `decide_all`."""
    if route == "cuda":
        groups = tuple(aggregation_cuda.together(graph, given, reduces))
        return aggregation_cuda.run_all(graph, given, reduces, groups,
                                        [aggregation_cuda.run] * len(reduces))
    return [on(route, graph, given.by(reduce)) for reduce in reduces]


def _without_kernels(graph: OpGraph, given: Aggregation, config: Config, against: Reason,
                     asked: Asked | None) -> Decision:
    estimate, unfit = None, _unfit_by_torch(graph, given)
    if config.backend == "cuda":
        why = reason("GA406", "backend='cuda' was asked for")
    elif config.when == "supported":
        why = None
    else:
        why = unfit
        if why is None:
            why, estimate = _cost_reason(graph, given, config, asked)
    if why is not None:
        return Decision("native", None, None, ((_KERNELS, against), (_TORCH, why)), estimate)
    run = aggregation_cpu.run if unfit is None else aggregation.plain
    return Decision("torch", _TORCH if unfit is not None else "embedding bags", run,
                    ((_KERNELS, against),), estimate)


def _unfit_by_torch(graph: OpGraph, given: Aggregation) -> Reason | None:
    return aggregation_cpu.unfit(graph, given) if given.x.is_cpu else _NO_GAIN


def _cost_reason(graph: OpGraph, given: Aggregation, config: Config,
                 asked: Asked | None) -> tuple[Reason | None, Estimate | None]:
    """Why the host's own code is no slower."""
    if config.when != "profitable":
        return None, None
    if asked is None and capture.capturing():  # at each replay the structure is built anew
        asked = Asked(_differentiated(given), looped.of(graph.edge_index) is None)
    found = aggregation_cost.estimate(graph, given,
                                      _differentiated(given) if asked is None else asked.grad)
    if found.once_pays and _may_run_once(graph, given, asked):
        found = found.over_once()
        builds = (found.gain > found.structure
                  if asked is not None else aggregation_cost.pays(graph.edge_index, found))
        return (None if builds else _ONCE), found
    if found.gain <= 0:
        return reason("GA301"), None
    if asked is not None:
        return (_MAY_NOT_COME_AGAIN if asked.fresh
                and found.gain <= found.structure else None), found
    # A checkpoint may be about to repeat this call, and must then find the same route: for it the
    # structure counts as there.
    if graph.known() or checkpointed() or aggregation_cost.pays(graph.edge_index, found):
        return None, found
    return _MAY_NOT_COME_AGAIN, found


def _may_run_once(graph: OpGraph, given: Aggregation, asked: Asked | None) -> bool:
    """Whether there is a way without a structure for a graph that has none. A checkpoint finds its
    graph's structure known."""
    if checkpointed() or (graph.known() if asked is None else not asked.fresh):
        return False
    kernel = aggregation_once.kernel(graph, given)
    return kernel is not None and compile_reason(kernel) is None


def _differentiated(given: Aggregation) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in given.tensors)


# --- the run --------------------------------------------------------------------------------------

def run(layer: Any, host: str, found: tuple[OpGraph, Aggregation] | None, decision: Decision,
        config: Config, finish: Callable[[Tensor], Any], call_native: Callable[[], Any],
        start: int) -> Any:
    """Count, record and run one call of ``layer``. ``finish``: what the layer makes of the result;
    ``start``: when the call began, 0 when nobody listens."""
    name = type(layer).__name__
    spent = (time.perf_counter_ns() - start) / 1e3
    counters.count(name, decision.route, decision.code)
    if decision.run is None:
        if start:
            _record(layer, host, found, decision, spent)
        if config.on_fallback != "native" and not _by_design(decision):
            router.object_to(name, config.on_fallback, decision.rejected)
        return call_native()
    out = decision.run(*found)  # type: ignore[misc]
    if start:
        number = _record(layer, host, found, decision, spent)
        shown = out[0] if type(out) is list else out
        if shown.requires_grad:
            shown.register_hook(
                lambda _: _record_backward(layer, host, found[1],  # type: ignore[index]
                                           decision, number))
    return finish(out)


def _by_design(decision: Decision) -> bool:
    """Whether going native is no fallback: the user's own choice, or the host's code is the one for
    such a call."""
    return all(r.code in _CHOSEN or r.code.startswith("GA1") for _, r in decision.rejected)


def _fields(layer: Any, host: str, given: Aggregation | None, decision: Decision) -> dict[str, Any]:
    device = "cpu" if given is None else given.x.device.type
    dtype = None if given is None else str(given.x.dtype).removeprefix("torch.")
    autocast = (str(torch.get_autocast_dtype(device)).removeprefix("torch.")
                if torch.is_autocast_enabled(device) else None)
    return dict(host=host, layer=type(layer).__name__, name=rules.qualified_name(layer),
                route=decision.route, kernel=decision.kernel, storage=decision.storage, dtype=dtype,
                out_dtype=dtype, autocast=autocast, training=bool(layer.training),
                deterministic=torch.are_deterministic_algorithms_enabled(),
                capturing=device == "cuda" and torch.cuda.is_current_stream_capturing())


def _record(layer: Any, host: str, found: tuple[OpGraph, Aggregation] | None, decision: Decision,
            spent: float) -> int:
    graph, given = found or (None, None)
    rejected = [dict(candidate=candidate, code=r.code, text=r.text, hint=r.hint)
                for candidate, r in decision.rejected]
    record = records.new(graph=None if graph is None else graph.facts(), rejected=rejected,
                         grad=torch.is_grad_enabled(),
                         cache="none" if graph is None else graph.cached, overhead_us=spent,
                         **_fields(layer, host, given, decision))
    records.emit(record)
    return record["call"]


def _record_backward(layer: Any, host: str, given: Aggregation, decision: Decision,
                     number: int) -> None:
    if records.listening():
        records.emit(records.new(direction="backward", forward_call=number, grad=True,
                                 **_fields(layer, host, given, decision)))
