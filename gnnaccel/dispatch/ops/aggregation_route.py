"""The way of one aggregation inside a host's layer: reasons for and against each candidate, the
run, the record."""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.cuda.runtime import capture, driver
from gnnaccel.dispatch.generated.messages import Generated
from gnnaccel.dispatch.graph import self_loops
from gnnaccel.dispatch.observe import counters, decisions
from gnnaccel.dispatch.observe.decisions import Subject
from gnnaccel.dispatch.ops import (aggregation, aggregation_cost, aggregation_cpu, aggregation_cuda,
                                   aggregation_once)
from gnnaccel.dispatch.ops.aggregation import Aggregation, Reduce
from gnnaccel.dispatch.ops.aggregation_cost import Estimate
from gnnaccel.dispatch.ops.call import compile_reason
from gnnaccel.dispatch.ops.graph import OpGraph, ProductGraph
from gnnaccel.dispatch.plan import compiling
from gnnaccel.dispatch.plan.compiling import device_reason
from gnnaccel.dispatch.plan.planner import KERNELS, TORCH, Plan, native_plan
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.run.autograd import checkpointed

_ON_CPU = reason("GA401", "the tensors are on the cpu, the kernels need a CUDA device")
_NO_GAIN = reason("GA301", "torch operations gain nothing on a GPU")
_NO_GAIN_OVER_PRODUCTS = reason("GA301", "torch's product with a sparse matrix is as fast")
_MAY_NOT_COME_AGAIN = reason("GA301",
                             "preparing this graph costs more than is saved, unless it is used "
                             "more often")
_ONCE = reason("GA302",
               "preparing this graph costs more than is saved, so its list of edges is read as it "
               "is")
_CHOSEN = ("GA301", "GA303", "GA401", "GA406")  # not a lack of ours
Run = Callable[[OpGraph, Aggregation], Any]


class Decision(NamedTuple):
    """``run``: None on the native route; ``estimate``: of the gain, if that was asked; ``again``:
    the decision holds for one call only; ``fell_back``: counts further native calls like this one,
    where somebody does."""

    plan: Plan
    run: Run | None = None
    estimate: Estimate | None = None
    again: bool = False
    fell_back: Callable[[], None] | None = None


def native(why: Reason) -> Decision:
    """The host's own code, for a reason that no candidate changes."""
    return Decision(native_plan((KERNELS, why)))


def _taken(route: str, kernel: str, run: Run, estimate: Estimate | None,
           *rejected: tuple[str, Reason]) -> Decision:
    seconds = (None, None) if estimate is None else (estimate.ours, estimate.native)
    return Decision(Plan(route, kernel, rejected, *seconds), run, estimate)


def _refused(estimate: Estimate | None, *rejected: tuple[str, Reason]) -> Decision:
    seconds = None if estimate is None else estimate.native
    return Decision(Plan("native", None, rejected, seconds, seconds), None, estimate)


class Asked(NamedTuple):
    """Question for a decision that no run follows: on a call that is part of training, if ``grad``;
    over a graph that is ``fresh``, so that its structure has to be built, or that comes again."""

    grad: bool
    fresh: bool


def decide(graph: OpGraph, aggregation: Aggregation, config: Config,
           asked: Asked | None = None, priced: Sequence[Aggregation] | None = None) -> Decision:
    """The route of an aggregation that is about to run, or is ``asked`` about. Builds nothing but
    kernels, and those only where they are to run. ``priced``: the aggregations that have to gain
    together, in the place of this one alone; none where it is settled that they do."""
    if aggregation.x.is_cpu and config.backend == "auto" and not driver.placed():
        return _without_kernels(graph, aggregation, config, _ON_CPU, asked)
    against = device_reason(aggregation.x.device.type, config)
    kernel = against or aggregation_cuda.kernel(graph, aggregation)
    if type(kernel) is Reason:
        return _without_kernels(graph, aggregation, config, kernel, asked)
    why, estimate = ((None, None) if config.when != "profitable" or priced == ()
                     else _cost_reason(graph, priced or (aggregation,), asked))
    if why is _ONCE:
        name = aggregation_once.kernel(graph, aggregation).name  # type: ignore[union-attr]
        decision = _taken("cuda", name, aggregation_once.run, estimate,
                          ("kernels over a structure", why))
        return decision._replace(again=True)
    if why is not None:
        return _refused(estimate, (KERNELS, why))
    against = compiling.problem(kernel.key, kernel.compile)  # `compile_reason`, without its call
    if against is not None:
        return _without_kernels(graph, aggregation, config, against, asked)
    if estimate is None:  # as `_taken`, without its call
        return Decision(Plan("cuda", kernel.name), aggregation_cuda.run)
    return _taken("cuda", kernel.name, aggregation_cuda.run, estimate)


def decide_all(graph: OpGraph, aggregation: Aggregation, reduces: tuple[Reduce, ...],
               config: Config, asked: Asked | None = None) -> Decision:
    """Route of aggregations that differ only in their ``reduces``, of which ``aggregation`` has the
    first; several give a list. One that is native makes all native, as the host makes its messages
    once for all. Kernels share a pass where they can."""
    if len(reduces) == 1:
        return decide(graph, aggregation, config, asked)
    whole = aggregation.at_once(reduces)
    if whole is not None:
        decision = decide(graph, whole, config, asked)
        if decision.plan.route != "torch":
            return decision if decision.run is None else decision._replace(
                run=partial(_at_once, decision.run, reduces))
    each = [aggregation.by(reduce) for reduce in reduces]
    # messages of their own, of which one may be made of what another costs
    together = any(type(one.more) is Generated for one in each)
    choices: list[Decision] = []
    for one in each:
        priced = None if not together else () if choices else each
        choices.append(decide(graph, one, config, asked, priced))
        if choices[-1].run is None:
            return choices[-1]
    kernels: list[str]
    runs: list[Run]
    kernels, runs = map(list, zip(*((choice.plan.kernel, choice.run) for choice in choices)))

    def apart(graph: OpGraph, aggregation: Aggregation) -> list[Tensor]:
        return [run(graph, aggregation.by(reduce)) for run, reduce in zip(runs, reduces)]

    run = apart
    if all(choice.plan.route == "cuda" for choice in choices):
        passes = aggregation_cuda.together(graph, aggregation, reduces)
        groups = tuple(group for group, kernel in passes.items() if compile_reason(kernel) is None)
        kernels = [next((passes[group].name for group in groups if reduce in group), kernel)
                   for reduce, kernel in zip(reduces, kernels)]
        run = partial(aggregation_cuda.run_all, reduces=reduces, groups=groups, alone=runs)
    # one aggregation that builds the structure builds it for all
    first = next((choice for choice in choices if not choice.again), choices[0])
    plan = first.plan._replace(kernel=" + ".join(dict.fromkeys(kernels)))
    return first._replace(plan=plan, run=run)


def _at_once(run: Run, reduces: tuple[Reduce, ...], graph: OpGraph,
             aggregation: Aggregation) -> list[Tensor]:
    return run(graph, aggregation.at_once(reduces))  # type: ignore[arg-type]  # as it was decided


def on(route: str, graph: OpGraph, given: Aggregation) -> Tensor:
    """One aggregation's result on ``route``, as of a `Decision` that took it."""
    if route == "cuda":
        return aggregation_cuda.run(graph, given)
    return (aggregation_cpu.run
            if _unfit_by_torch(graph, given) is None else aggregation.plain)(graph, given)


def on_all(route: str, graph: OpGraph, aggregation: Aggregation,
           reduces: tuple[Reduce, ...]) -> list[Tensor]:
    """Results of several aggregations, as of a `Decision` of `decide_all`."""
    if route == "cuda":
        whole = aggregation.at_once(reduces)
        if whole is not None:
            return aggregation_cuda.run(graph, whole)  # type: ignore[return-value]  # a list
        groups = tuple(aggregation_cuda.together(graph, aggregation, reduces))
        return aggregation_cuda.run_all(graph, aggregation, reduces, groups,
                                        [aggregation_cuda.run] * len(reduces))
    return [on(route, graph, aggregation.by(reduce)) for reduce in reduces]


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
            why, estimate = _cost_reason(graph, (given,), asked)
    if why is not None:
        return _refused(estimate, (KERNELS, against), (TORCH, why))
    run = aggregation_cpu.run if unfit is None else aggregation.plain
    return _taken("torch", "embedding bags" if unfit is None else TORCH, run, estimate,
                  (KERNELS, against))


def _unfit_by_torch(graph: OpGraph, aggregation: Aggregation) -> Reason | None:
    if type(graph) is ProductGraph:
        return _NO_GAIN_OVER_PRODUCTS
    return aggregation_cpu.unfit(graph, aggregation) if aggregation.x.is_cpu else _NO_GAIN


def _cost_reason(graph: OpGraph, of: Sequence[Aggregation],
                 asked: Asked | None) -> tuple[Reason | None, Estimate | None]:
    """Why the host's own code is no slower, if calls are to gain, for aggregations that run
    together."""
    aggregation = of[0]
    # at each replay the structure is built anew, if it may not be used from before
    still = capture.here.held is not None and graph.known()
    if asked is None and capture.capturing() and not still:
        asked = Asked(_differentiated(of), self_loops.of(graph.edge_index) is None)
    grad = _differentiated(of) if asked is None else asked.grad
    estimate = aggregation_cost.estimate(graph, aggregation, grad)
    for one in of[1:]:
        estimate = estimate.beside(aggregation_cost.estimate(graph, one, grad))
    if estimate.once_pays and _may_run_once(graph, aggregation, asked):
        estimate = estimate.over_once()
        builds = (estimate.gain > estimate.structure
                  if asked is not None else aggregation_cost.pays(graph.edge_index, estimate))
        return (None if builds else _ONCE), estimate
    if estimate.gain <= 0:
        return reason("GA301"), None
    if asked is not None:
        return (_MAY_NOT_COME_AGAIN if asked.fresh
                and estimate.gain <= estimate.structure else None), estimate
    # A checkpoint may be about to repeat this call, and must then find the same route: for it the
    # structure counts as there.
    if graph.known() or aggregation_cost.pays(graph.edge_index, estimate, checkpointed()):
        return None, estimate
    return _MAY_NOT_COME_AGAIN, estimate


def _may_run_once(graph: OpGraph, aggregation: Aggregation, asked: Asked | None) -> bool:
    """Whether there is a way without a structure for a graph that has none. A checkpoint finds its
    graph's structure known."""
    if checkpointed() or (graph.known() if asked is None else not asked.fresh):
        return False
    kernel = aggregation_once.kernel(graph, aggregation)
    return kernel is not None and compile_reason(kernel) is None


def _differentiated(of: Sequence[Aggregation]) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for one in of for t in one.tensors)


# --- the run --------------------------------------------------------------------------------------

def run(layer: Any, host: str, found: tuple[OpGraph, Aggregation] | None, decision: Decision,
        config: Config, finish: Callable[[Any], Any] | None, call_native: Callable[[], Any],
        start: int) -> Any:
    """Count, record and run one call of ``layer``. ``finish``: maps the result to the layer's, None
    of a native call; ``start``: when the call began, 0 when nobody listens."""
    plan, spent = decision.plan, (time.perf_counter_ns() - start) / 1e3
    name = type(layer).__name__
    counters.count(name, plan.route, plan.code if decision.run is None else None)
    if decision.run is None:
        if start:
            decisions.told(_subject(layer, host, found), plan, found and found[0], spent)
        if config.on_fallback != "native" and not _by_design(plan):
            decisions.object_to(name, config.on_fallback, plan.rejected)
        return call_native()
    out = decision.run(*found)  # type: ignore[misc]
    if start:
        decisions.told(_subject(layer, host, found), plan, found and found[0], spent, out)
    return finish(out)  # type: ignore[misc]  # not native


def _by_design(plan: Plan) -> bool:
    """Whether going native is no fallback: the user's own choice, or the host's code is the one for
    such a call."""
    return all(r.code in _CHOSEN or r.code.startswith("GA1") for _, r in plan.rejected)


def _subject(layer: Any, host: str, found: tuple[OpGraph, Aggregation] | None) -> Subject:
    if found is None:
        return Subject(host, type(layer).__name__, layer)
    x = found[1].x
    return Subject(host, type(layer).__name__, layer, x.device.type, x.dtype, x.dtype)
