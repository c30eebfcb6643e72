"""`Gain`: what both ways took, which layers gained, what kept others, and what to try."""
from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gnnaccel.profile.frames import who
from gnnaccel.profile.pieces import duration
from gnnaccel.profile.tables import milliseconds, size, table, times

#: differences below this share are none, however well several runs agree; and where each way ran
#: once
_LEAST, _LEAST_ONCE = 0.03, 0.1
_SHOWN = 3  # of what to try


@dataclass
class Side:
    """One way of running. ``runs_ms``: the median step of each run or block; ``loop_ms``: from the
    end of a step to the end of the next on average, with all that lies between; ``memory_bytes``:
    the peak, of the device on a GPU and of the process without one; ``losses``: by the number of
    the step."""

    runs_ms: list[float]
    steps: int
    loop_ms: float | None = None
    memory_bytes: int | None = None
    losses: dict[int, float] = field(default_factory=dict)

    @property
    def step_ms(self) -> float:
        return statistics.median(self.runs_ms)

    @property
    def spread(self) -> tuple[float, float]:
        """The fastest and the slowest run's milliseconds; of four runs and more, the second of
        either end, as one may have been disturbed."""
        found = sorted(self.runs_ms)
        return (found[1], found[-2]) if len(found) >= 4 else (found[0], found[-1])


@dataclass
class Layer:
    """Milliseconds of one call, forward and backward; None where it was not measured that way."""

    name: str
    layer: str
    kernel: str | None
    native_ms: float | None
    ours_ms: float | None


@dataclass
class Kept:
    """Calls that ran natively: why, and how many of which layers."""

    code: str
    text: str
    calls: int
    layers: list[str]


@dataclass(repr=False)
class Gain:
    """The result of a comparison. ``str()`` and ``repr()`` of it are for people, ``as_dict()`` is
    for programs.
    ``what``: what was timed, such as "training step"; ``captured``: with ``capture=True``, where
    calls were replayed."""

    what: str
    native: Side
    ours: Side
    captured: Side | None = None
    layers: list[Layer] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    to_try: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def times(self) -> float:
        """How often a step of ours fits into a native one: above 1 is a gain."""
        return self.native.step_ms / self.ours.step_ms

    @property
    def verdict(self) -> str:
        """"faster", "slower", or "no difference" where runs of either way overlap, or differ by
        less than 3 %, or by less than 10 % where each way ran once."""
        (low, high), (ours_low, ours_high) = self.native.spread, self.ours.spread
        once = len(self.native.runs_ms) == len(self.ours.runs_ms) == 1
        least = _LEAST_ONCE if once else _LEAST
        if abs(self.times - 1) < least or (low <= ours_high and ours_low <= high):
            return "no difference"
        return "faster" if self.times > 1 else "slower"

    @property
    def loss(self) -> tuple[int, float, float] | None:
        """(number of the step, native loss, our loss) of the last step that both sides made and
        noted."""
        both = self.native.losses.keys() & self.ours.losses.keys()
        return (max(both), self.native.losses[max(both)],
                self.ours.losses[max(both)]) if both else None

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data that JSON can hold."""
        return {**asdict(self), "verdict": self.verdict, "times": self.times,
                "native_ms": self.native.step_ms, "ours_ms": self.ours.step_ms,
                "loss": self.loss, "loss_difference": _difference(self.loss)}

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        text = table(self._headline(), ("", "native", "gnnaccel", ""), self._rows(),
                     right=("native", "gnnaccel"))
        if self.layers:
            text += table("layers, one call, forward and backward",
                          ("layer", "ran by", "native ms", "gnnaccel ms", "faster"),
                          [(who(one.name, one.layer), one.kernel or "native",
                            milliseconds(one.native_ms), milliseconds(one.ours_ms),
                            times(one.native_ms, one.ours_ms) if one.kernel else None)
                           for one in self.layers],
                          right=("native ms", "gnnaccel ms", "faster"))
        if self.kept:
            text += table("kept native", ("calls", "layers", "why"),
                          [(one.calls, ", ".join(one.layers[:4]), f"{one.code} {one.text}")
                           for one in self.kept], right=("calls",))
        if self.to_try:
            text += "what to try next\n\n" + "".join(
                f" {number}. {one}\n" for number, one in enumerate(self.to_try[:_SHOWN], 1))
        return text + "".join(f"\n{note}" for note in self.notes) + "\n" * bool(self.notes)

    def _headline(self) -> str:
        if self.verdict == "no difference":
            return f"gnnaccel makes no difference to this {self.what} (within what runs differ by)"
        factor = self.times if self.verdict == "faster" else 1 / self.times
        return f"gnnaccel makes this {self.what} {factor:.2f}x {self.verdict}"

    def _rows(self) -> list[Sequence[object]]:
        rows: list[Sequence[object]] = [
            (self.what, _each(self.native), _each(self.ours), f"{self.times:.2f}x as fast; "
             f"{self.native.steps} and {self.ours.steps} steps")]
        if self.captured is not None:
            rows.append(("with capture=True", "", _each(self.captured),
                         f"{self.native.step_ms / self.captured.step_ms:.2f}x as fast; "
                         f"{self.captured.steps} steps"))
        loop, ours = self.native.loop_ms, self.ours.loop_ms
        if loop and ours:
            rows.append(("step to step", duration(loop), duration(ours),
                         f"{loop / ours:.2f}x as fast; with evaluation, loading and so on"))
        memory, taken = self.native.memory_bytes, self.ours.memory_bytes
        if memory and taken:
            rows.append(("peak memory, MiB", size(memory), size(taken),
                         f"{taken / memory - 1:+.0%}"))
        if self.loss is not None:
            step, native, mine = self.loss
            rows.append((f"loss of step {step}", f"{native:.5g}", f"{mine:.5g}",
                         f"relative difference {_difference(self.loss):.1e}"))
        return rows


def _each(side: Side) -> str:
    low, high = side.spread
    if len(side.runs_ms) == 1:
        return duration(side.step_ms)
    return f"{duration(side.step_ms)} ({duration(low)} to {duration(high)})"


def _difference(loss: tuple[int, float, float] | None) -> float | None:
    if loss is None:
        return None
    _, native, ours = loss
    return abs(ours - native) / abs(native) if native else abs(ours)
