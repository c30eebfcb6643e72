"""Showing what a layer call is made into: its Program before and after the passes, and what they weighed."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gnnaccel import adapters
from gnnaccel.dispatch import patterns
from gnnaccel.dispatch.ops.plain import PlainStated
from gnnaccel.dispatch.program import Program
from gnnaccel.dispatch.reasons import Reason
from gnnaccel.dispatch.relational.compaction import compact
from gnnaccel.dispatch.relational.optimise import Optimised
from gnnaccel.dispatch.relational.request import RelationalStated


@dataclass(frozen=True, eq=False)
class Explanation:
    """What was found out about one call. ``reason``: why it is not stated, else None; ``stated``: the Program, or of
    plain layers the one operation that they are; ``optimised``: of relational layers, the orderings with their counts; ``str()`` of
    it is for reading."""

    layer: str
    reason: Reason | None
    stated: Program | PlainStated | None
    optimised: Optimised | None

    def __str__(self) -> str:
        if self.reason is not None:
            return f"{self.layer} runs the host's own code: {self.reason} ({self.reason.hint})"
        if isinstance(self.stated, PlainStated):
            return f"{self.layer} as stated:\n{self.stated}"
        if self.optimised is None:
            found = patterns.attention(self.stated)
            return f"{self.layer} as stated:\n{self.stated}\n\nfused: {found.family} attention, score {found.score!r}"
        return "\n\n".join([f"{self.layer} as stated:\n{self.stated}", _weighed(self.optimised),
                            f"compacted:\n{compact(self.optimised.ordered)}", f"fused, what runs:\n{self.optimised.program}"])


def _weighed(optimised: Optimised) -> str:
    s = optimised.statistics
    edges = max(1, s.num_edges)
    lines = [f"{s.num_edges} edges, {s.num_relations} relations; (source, relation) pairs {s.pairs_src}, {s.pairs_src / edges:.2f} per "
             f"edge; (destination, relation) pairs {s.pairs_dst}, {s.pairs_dst / edges:.2f} per edge",
             f"{'ordering':40} {'MB':>10} {'MFLOP':>10} {'us':>10}  (forward, estimated)"]
    for at, o in enumerate(optimised.orderings):
        lines.append(f"{o.name:40} {o.count.moved / 1e6:10.2f} {o.count.flops / 1e6:10.2f} {o.seconds * 1e6:10.1f}"
                     f"{'  <- taken' if at == 0 else ''}")
    return "\n".join(lines)


def explain_program(layer: Any, *inputs: Any, **kwargs: Any) -> Explanation:
    """What ``layer(*inputs, **kwargs)`` would be made into. Runs nothing but the building of the graph's structure, and needs
    no ``enable()``.

    Print it: the Program as the layer states it, every ordering that the passes considered with the bytes and operations they
    counted, and the Program that runs. Raises TypeError for a layer that gnnaccel does not know.
    """
    adapter = adapters.adapter_of(layer)
    if adapter is None:
        raise TypeError(f"{type(layer).__name__} is no layer that gnnaccel knows; it knows {', '.join(adapters.known_layers())}")
    name = type(layer).__name__
    found = adapter.state(layer, inputs, kwargs)
    if isinstance(found, Reason):
        return Explanation(name, found, None, None)
    stated, given = found
    if isinstance(stated, PlainStated):
        return Explanation(name, None, stated, None)
    if not isinstance(stated, RelationalStated):
        return Explanation(name, None, stated.program, None)
    view, _ = stated.lookup(given)
    return Explanation(name, None, stated.program, stated.call(view, None).optimised())
