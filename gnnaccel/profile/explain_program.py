"""Showing what a layer call is made into: its Program before and after the passes, and what they
weighed."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gnnaccel import adapters, session
from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.ir.program import Program
from gnnaccel.dispatch.observe.watch import Run, Visit
from gnnaccel.dispatch.ops.aggregation_stated import AggregationSpec
from gnnaccel.dispatch.ops.plain import PlainSpec
from gnnaccel.dispatch.policy import config as configs
from gnnaccel.dispatch.policy.reasons import Reason
from gnnaccel.dispatch.relational.optimise import Optimised
from gnnaccel.dispatch.relational.passes import compact
from gnnaccel.dispatch.relational.request import RelationalSpec
from gnnaccel.profile.compare import watching
from gnnaccel.profile.sides import Decided, decided, quietly
from gnnaccel.profile.undisturbed import undisturbed

_HOST = "the host's own code"


@dataclass(frozen=True, eq=False)
class Explanation:
    """What was found out about one call. ``reason``: why it is not stated, else None; ``stated``:
    the Program, or of plain layers the one operation that they are; ``optimised``: of relational
    layers, the orderings with their counts; ``decision``: which way it goes and why not another,
    over a graph that comes again; ``inside``: of layers without an adapter, their message passing,
    of a `torch.fx.GraphModule` its layers, call by call; ``str()`` of it is for reading."""

    layer: str
    reason: Reason | None
    stated: Program | PlainSpec | AggregationSpec | None
    optimised: Optimised | None
    decision: Decided | None = None
    inside: tuple[Explanation, ...] | None = None

    def __str__(self) -> str:
        if self.inside is not None:
            calls = len(self.inside)
            head = (f"{self.layer} runs {_HOST}; what can be taken over is its message passing "
                    f"(calls: {calls})")
            return "\n\n".join([head, *map(str, self.inside)])
        if self.reason is not None:
            return f"{self.layer} runs the host's own code: {self.reason} ({self.reason.hint})"
        parts = [f"{self.layer} as stated:\n{self.stated}",
                 *([] if self.decision is None else [_way(self.decision)])]
        if self.optimised is not None:
            parts += [_weighed(self.optimised), f"compacted:\n{compact(self.optimised.ordered)}",
                      f"fused, what runs:\n{self.optimised.program}"]
        elif isinstance(self.stated, Program):
            found = programs.attention(self.stated)
            assert found is not None  # its layer is taken over
            parts.append(f"fused: {found.family} attention, score {found.score!r}")
        return "\n\n".join(parts)


def _way(decision: Decided) -> str:
    plan = decision.plan
    if plan is None:  # a rule says so
        return f"goes to {_HOST}" + "".join(f"; {why}" for _, why in decision.rejected)
    text = f"goes to {plan.kernel or _HOST}"
    if plan.seconds is not None:
        text += f", estimated {plan.seconds * 1e6:.0f} us"
        if plan.kernel and plan.native_seconds is not None:
            text += f", {_HOST} {plan.native_seconds * 1e6:.0f} us"
    return "\n".join([text, *(f'  ruled out "{candidate}": {why}'
                              for candidate, why in plan.rejected)])


def _weighed(optimised: Optimised) -> str:
    s = optimised.statistics
    edges = max(1, s.num_edges)
    lines = [f"{s.num_edges} edges, {s.num_relations} relations; (source, relation) pairs "
             f"{s.pairs_src}, {s.pairs_src / edges:.2f} per edge; (destination, relation) pairs "
             f"{s.pairs_dst}, {s.pairs_dst / edges:.2f} per edge",
             f"{'ordering':40} {'MB':>10} {'MFLOP':>10} {'launches':>10} {'us':>10}  "
             f"({_weighed_of(optimised)}, estimated)"]
    for at, o in enumerate(optimised.orderings):
        whole = o.count + o.back
        lines.append(f"{o.name:40} {whole.moved / 1e6:10.2f} {whole.flops / 1e6:10.2f} "
                     f"{whole.launches:10} "
                     f"{o.seconds * 1e6:10.1f}{'  <- taken' if at == 0 else ''}")
    return "\n".join(lines)


def _weighed_of(optimised: Optimised) -> str:
    return "forward and backward" if optimised.taken.back.launches else "forward"


def explain_program(layer: Any, *inputs: Any, **kwargs: Any) -> Explanation:
    """What ``layer(*inputs, **kwargs)`` would be made into. Builds the graph's structure and
    compiles the kernels that would run, but runs nothing; a layer without an adapter, whose message
    passing is what there is to see, runs once without gradients, and so does a model that PyG's
    ``to_hetero`` or ``to_hetero_with_bases`` made, of which each layer is shown. Needs no
    ``enable()``.

    Print it: the Program as the layer states it, the way that it goes with the reasons against
    others, every ordering that the passes considered with the bytes, operations and launches they
    counted (on a GPU of backward too, if the layer is in training mode), and the Program that runs.
    Raises TypeError for a layer that gnnaccel does not know.
    """
    with session.enabled(first_use="wait"):
        adapter = adapters.adapter_of(layer)
        if adapter is not None:
            return _explained(Visit(layer, adapter, None, inputs, kwargs, configs.current()))
        around = isinstance(layer, torch.fx.GraphModule)  # as `to_hetero` makes them
        if not around and not getattr(getattr(type(layer), "propagate", None), "routed", False):
            raise TypeError(f"{type(layer).__name__} is no layer that gnnaccel knows; it knows "
                            f"{', '.join(adapters.known_layers())}, and the message passing of "
                            "PyG's other layers")
        return Explanation(type(layer).__name__, None, None, None,
                           inside=_message_passing(layer, inputs, kwargs))


def _explained(visit: Visit) -> Explanation:
    name = type(visit.layer).__name__
    found = visit.adapter.state(visit.layer, visit.args, visit.kwargs)
    if isinstance(found, Reason):
        return Explanation(name, found, None, None)
    spec, given = found
    # None: GNNACCEL=0
    decision = None if visit.config is None else decided(visit, visit.layer.training)
    if isinstance(spec, (PlainSpec, AggregationSpec)):
        return Explanation(name, None, spec, None, decision)
    if not isinstance(spec, RelationalSpec):
        return Explanation(name, None, spec.program, None, decision)
    view, _ = spec.lookup(given)
    return Explanation(name, None, spec.program,
                       spec.call(view, None).optimised(visit.layer.training), decision)


def _message_passing(layer: Any, inputs: tuple, kwargs: dict) -> tuple[Explanation, ...]:
    found: list[Explanation] = []

    def look(visit: Visit, run: Run) -> Any:
        if visit.adapter is not None:
            found.append(_explained(visit))
        return quietly(visit, run)

    with undisturbed(layer), watching(look, lambda record: None), torch.no_grad():
        layer(*inputs, **kwargs)
    return tuple(found)
