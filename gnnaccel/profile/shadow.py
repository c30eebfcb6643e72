"""One call repeated by the host's own code, by the same in fp64, and by the route that it took."""
from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gnnaccel.dispatch.observe.records import Record
from gnnaccel.dispatch.observe.watch import Visit
from gnnaccel.dispatch.plan import planner
from gnnaccel.dispatch.plan.planner import Plan
from gnnaccel.dispatch.policy import rules
from gnnaccel.profile.bench.timing import Effort, measure_rounds, peak_extra_bytes
from gnnaccel.profile.frames import who
from gnnaccel.profile.judging import SECOND_LOOK, Draw, Error, errors
from gnnaccel.profile.sides import EXACT, HOST, OURS, Sides
from gnnaccel.profile.undisturbed import undisturbed

EFFORT = Effort(batches=4, batch_ms=2.0, seconds=0.3, patience_s=1.0)
_log = logging.getLogger("gnnaccel")


@dataclass(eq=False)
class Shadow:
    """``verdict``: "same", "mismatch", "native" (nothing to compare) or "not compared". Times are
    of forward, or with ``grad`` of forward and backward; bytes are the device memory at their peak,
    None on a CPU."""

    layer: str
    name: str | None
    route: str
    kernel: str | None
    verdict: str
    grad: bool = False
    errors: list[Error] = field(default_factory=list)
    native_ms: float | None = None
    ours_ms: float | None = None
    native_bytes: int | None = None
    ours_bytes: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def who(self) -> str:
        return who(self.name, self.layer)

    @property
    def worst(self) -> Error | None:
        """The result that is nearest to its limit, or farthest beyond it."""
        return max(self.errors, key=lambda e: (not e.right,
                                               e.ours / e.allowed if e.allowed else 0.0),
                   default=None)

    def opt_out(self, layer: Any) -> None:
        """Keep the layer native from here on, and say so."""
        rules.exclude(layer)
        wrong = ", ".join(f"{e.name} ({e})" for e in self.errors if not e.right)
        self.notes.append(f"wrong in {wrong}; excluded from here on, gnnaccel.include(layer) takes "
                          "that back")
        _log.warning("%s by %s does not agree with the host's own code: %s", self.who, self.kernel,
                     self.notes[-1])


def shadowed(visit: Visit, record: Record | None, upstream: list[Tensor | None] | None,
             name: str | None) -> Shadow:
    """Compare a call that has just run as ``record`` says. What goes wrong in repeating it is told,
    not raised."""
    layer = type(visit.layer).__name__
    if record is None:
        return Shadow(layer, name, "native", None, "not compared",
                      notes=["no decision was recorded"])
    found = Shadow(layer, name, record["route"], record["kernel"], "native")
    if record["route"] == "native":
        found.notes = [f"native: {item['code']} {item['text']} ({item['hint']})"
                       for item in record["rejected"][:1]]
        return found
    found.grad = torch.is_grad_enabled()
    try:
        with undisturbed(visit.layer):
            _compare(visit, _plan(record), found, upstream)
    except torch.cuda.OutOfMemoryError:
        found.verdict, found.notes = "not compared", ["the host's own code ran out of memory"]
    except Exception as problem:  # noqa: BLE001 - a script goes on; what it was is told
        found.verdict, found.notes = "not compared", [f"{type(problem).__name__}: {problem}"]
    return found


def _plan(record: Record) -> Plan:
    """The very kernel that ran."""
    pmf = any(spec.pmf for spec in planner.ATTENTION if spec.name == record["kernel"])
    return Plan(record["route"], record["kernel"], pmf=pmf)


def _compare(visit: Visit, plan: Plan, found: Shadow, upstream: list[Tensor | None] | None) -> None:
    sides = Sides(visit, plan, found.grad)
    sides.once(HOST)
    if sides.drew():
        visit.layer.eval()
        found.notes.append("draws random numbers: compared in eval mode, where dropout is off; its "
                           "masks come from the same distribution but are not the same")
        sides.once(HOST)
        if sides.drew():
            found.verdict, found.notes = ("not compared",
                                          ["it draws random numbers in eval mode as well"])
            return

    def draw(seed: int) -> Draw:
        sent = upstream if seed == 0 else None
        return (sides.once(OURS, seed, sent), sides.once(HOST, seed, sent),
                sides.once(EXACT, seed, sent))

    found.errors = errors([draw(0)])
    if not all(e.right for e in found.errors):
        found.errors = errors(map(draw, range(1, SECOND_LOOK + 1)))
    found.verdict = "same" if all(e.right for e in found.errors) else "mismatch"
    if found.verdict == "same":
        _measure(sides, found)


def both_ms(sides: Sides, calls: dict[str, Callable[[], object]]) -> tuple[float, float]:
    """Milliseconds of the host's call and of ours, in turns."""
    taken = measure_rounds({side: (call, contextlib.nullcontext) for side, call in calls.items()},
                           sides.device, EFFORT, rounds=2)
    return taken[HOST].ms, taken[OURS].ms


def _measure(sides: Sides, found: Shadow) -> None:
    calls = sides.timed()
    found.native_ms, found.ours_ms = both_ms(sides, calls)
    found.native_bytes, found.ours_bytes = (peak_extra_bytes(calls[side], sides.device)
                                            for side in (HOST, OURS))
