"""The guard: now and then compares sampled rows of a quantized layer with fp32, and sends the
layer back to fp32 when their error is too large.

Nothing waits for the device: numbers are copied to the host while work goes on and read at a later
call of the layer.
"""
from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from gnnaccel.dispatch.policy import config
from gnnaccel.suggest import did_you_mean

_log = logging.getLogger("gnnaccel")
#: numbers that a check measures, in their order
NUMBERS = ("error", "zero_rows", "outlier_rows", "not_finite", "gradients_not_finite")


@dataclass(frozen=True)
class Guard:
    """``every``: calls of a layer between two checks, the first call is one; ``rows``: how many
    destinations are sampled; ``error``: the median relative L2 error of their results above which
    the layer goes back to fp32; ``outliers``: the share of sampled source rows whose scale is made
    by so few large numbers that more than 80 % of the others became zero, likewise."""

    every: int = 100
    rows: int = 64
    error: float = 0.05
    outliers: float = 0.25

    def __post_init__(self) -> None:
        for name in ("every", "rows"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(
                    f"guard: {name}={getattr(self, name)!r}; use a whole number from 1")
        for name in ("error", "outliers"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                raise ValueError(
                    f"guard: {name}={value!r}; use a number from 0, such as {getattr(Guard, name)}")


def options(given: Any) -> Guard | None:
    """``guard`` of `gnnaccel.quantize`: True, False or None for none, or a dict of `Guard`'s
    fields. ValueError for others."""
    if given is None or given is False:
        return None
    if given is True:
        return Guard()
    if not isinstance(given, dict):
        raise ValueError(f"guard={given!r}; use True, False, or a dict such as {asdict(Guard())}")
    names = [f.name for f in fields(Guard)]
    for name in given:
        if name not in names:
            raise ValueError(f"guard has no option {name!r}; it has "
                             f"{', '.join(names)}.{did_you_mean(str(name), names)}")
    return Guard(**given)


class Watch:
    """The guard's checks of a layer. ``failure``: why the layer went back to fp32, or None."""

    def __init__(self, guard: Guard | None, name: str):
        self.guard, self.name = guard, name
        self.calls = self.checks = 0
        self.last: dict[str, float] | None = None
        self.worst = 0.0
        self.failure: str | None = None
        self._flags: Tensor | None = None  # int32 [2] on the device: of values, of gradients
        self._pending: tuple[Tensor, torch.cuda.Event | None] | None = None

    def flags(self, device: torch.device) -> Tensor | None:
        """int32 [2]: whether values and gradients had a number that is not finite; stays on the
        device."""
        if self.guard is None:
            return None
        if self._flags is None or self._flags.device != device:
            with torch.inference_mode(False):
                self._flags = torch.zeros(2, dtype=torch.int32, device=device)
        return self._flags

    def state(self) -> str:
        if self.guard is None:
            return "off"
        return "failed" if self.failure else "passed" if self.checks else "waiting"

    def begin(self, device: torch.device, still: bool) -> bool:
        """Start a call: read numbers that are in. Whether to check this call; no if ``still``
        (nothing may change between a checkpointed call and its repetition, nor be waited for while
        a CUDA graph is captured)."""
        if self.guard is None or still:
            return False
        if self._pending is not None and (self._pending[1] is None or self._pending[1].query()):
            self._judge(self._pending[0].tolist())
            self._pending = None
        due = self.calls % self.guard.every == 0 and self._pending is None
        self.calls += 1
        return due and self.failure is None

    def check(self, measure: Callable[[int, int], Tensor]) -> None:
        """Take a check's numbers: ``measure(rows, turn)`` gives the first three of `NUMBERS` on the
        device."""
        assert self.guard is not None
        with torch.no_grad():
            numbers = measure(self.guard.rows, self.checks)
            numbers = torch.cat([numbers.float(),
                                 self.flags(numbers.device).float()])  # type: ignore[union-attr]
        self.checks += 1
        if not numbers.is_cuda:
            self._pending = numbers, None
            return
        pinned = torch.empty(numbers.shape, dtype=torch.float32, device="cpu", pin_memory=True)
        pinned.copy_(numbers, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending = pinned, event

    def settle(self) -> None:
        """Read the numbers still under way; waits for the device. For reports."""
        if self._pending is not None:
            numbers, event = self._pending
            if event is not None:
                event.synchronize()
            self._judge(numbers.tolist())
            self._pending = None

    def _judge(self, numbers: list[float]) -> None:
        measured = self.last = dict(zip(NUMBERS, numbers))
        if math.isfinite(measured["error"]):
            self.worst = max(self.worst, measured["error"])
        why = self._why(measured)
        if why is not None and self.failure is None:
            self.failure = why
            _log.warning("%s goes back to fp32: %s", self.name, why)
            config.bump()  # decisions that are remembered no longer hold

    def _why(self, found: dict[str, float]) -> str | None:
        guard = self.guard
        assert guard is not None
        if found["not_finite"]:
            return "a row to be quantized had a number that is not finite"
        if not found["error"] <= guard.error:
            return (f"sampled rows are off by {found['error']:.3g} in relative L2, more than "
                    f"{guard.error:g}")
        if found["outlier_rows"] > guard.outliers:
            return (f"{found['outlier_rows']:.0%} of the sampled rows have so "
                    "large outliers that most of their other numbers "
                    f"become zero, more than {guard.outliers:.0%}")
        return None
