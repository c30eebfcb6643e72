"""Which record belongs to which call: calls of one thread lie on a stack, and a record belongs to the innermost that has none."""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from gnnaccel.dispatch.records import Record
from gnnaccel.dispatch.watch import Visit


class Frame:
    """A call that is running. ``record``: of its decision, once made; ``outer``: the call inside which it runs."""

    __slots__ = ("visit", "outer", "record")

    def __init__(self, visit: Visit, outer: Frame | None):
        self.visit, self.outer, self.record = visit, outer, None


class Frames(threading.local):
    """The calls that run in this thread, one inside the other."""

    def __init__(self) -> None:
        self._stack: list[Frame] = []

    @contextlib.contextmanager
    def inside(self, visit: Visit) -> Iterator[Frame]:
        frame = Frame(visit, self._stack[-1] if self._stack else None)
        self._stack.append(frame)
        try:
            yield frame
        finally:
            self._stack.pop()

    def sink(self, record: Record) -> None:
        """A sink for `dispatch.records`."""
        if self._stack and record["direction"] == "forward" and self._stack[-1].record is None:
            self._stack[-1].record = record
