"""The time of a call in reduced precision against fp32, measured once on a GPU without waiting,
to check the estimates."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gnnaccel.dispatch.policy import config
from gnnaccel.dispatch.quantized.settings import Entry

_AT = 10  # the call at which it is measured: kernels are compiled and structures built by then


class Stopwatch:
    """Runs both ways once more at one call, forward, and keeps the ratio in ``entry.measured`` when
    the device has told. Once for a layer, however often it is decided anew."""

    __slots__ = ("entry", "calls", "events")
    events: tuple[torch.cuda.Event, ...] | None

    def __init__(self, entry: Entry):
        self.entry, self.calls, self.events = entry, 0, None

    def compare(self, stored: Callable[[], Any], plain: Callable[[], Any]) -> None:
        self.calls += 1
        if self.events is not None:
            if self.events[2].query():
                first, second, third = self.events
                self.judge(second.elapsed_time(third) / max(first.elapsed_time(second), 1e-6))
                self.events, self.calls = None, _AT + 1
        elif self.calls == _AT and self.entry.measured is None and torch.cuda.is_available():
            events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(3))
            with torch.no_grad():
                events[0].record()
                stored()
                events[1].record()
                plain()
                events[2].record()
            self.events = events

    def judge(self, gain: float) -> None:
        """Keep the ratio. Where it is a loss, decisions from estimates no longer hold
        (`settings.wanted`)."""
        previous, self.entry.measured = self.entry.measured, gain
        if gain < 1 and previous is None:
            config.bump()
