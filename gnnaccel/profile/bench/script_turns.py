"""Steps natively, enabled and captured that take turns in one process, so that all have the same
core and the same data. One run of a process may be slower throughout than the next by half."""
from __future__ import annotations

import contextlib
from typing import Any

import torch

from gnnaccel import adapters, session
from gnnaccel.dispatch.policy import config as configs
from gnnaccel.profile.bench.script_child import BLOCK, CAPTURE, ENABLED, NATIVE


class Turns:
    """Switches between the ways after each block of steps, and begins natively; ``ways``: of each
    step so far. Captured steps have turns where the script uses a GPU."""

    def __init__(self) -> None:
        self.ways: list[str] = []
        self._way, self._order = NATIVE, [ENABLED]
        self._aside = contextlib.ExitStack()
        self._made: dict[str, Any] = {}

    def stepped(self) -> None:
        """A step has ended."""
        self.ways.append(self._way)
        if len(self.ways) % BLOCK:
            return
        if not self._order:
            self._order = [NATIVE, ENABLED] + [CAPTURE] * torch.cuda.is_initialized()
            if len(self.ways) // BLOCK // len(self._order) % 2:
                self._order.reverse()
        self._put(self._order.pop(0))

    def _put(self, way: str) -> None:
        self._aside.close()
        if not self._made:  # all that the script uses is imported by now
            for one in (CAPTURE, ENABLED):
                session.enable(first_use="wait", capture=one == CAPTURE)
                self._made[one] = configs.active()
        if way == NATIVE:
            self._aside.enter_context(adapters.aside())
            configs.set_active(None)
        else:
            session.again(self._made[way])
        self._way = way
