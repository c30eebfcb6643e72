"""When calls and their backward began and ended, without making anybody wait.

On a GPU by CUDA events, read once the device has passed them; elsewhere by the clock. Backward is
seen by hooks on the nodes that the call left in autograd's graph: its first node marks the
beginning, each node on its rim the end so far.
"""
from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_sequence = torch._C._autograd._get_sequence_nr


class Clock:
    """Marks for one device. Events are used again, since making one takes as long as recording
    it."""

    def __init__(self) -> None:
        self._free: deque[Any] = deque()

    def mark(self, device: torch.device, again: Any = None) -> Any:
        """A mark at this moment of the device's current stream; ``again``: an earlier mark, moved
        here."""
        if device.type != "cuda":
            return time.perf_counter_ns()
        event = again or (self._free.pop() if self._free else torch.cuda.Event(enable_timing=True))
        event.record(torch.cuda.current_stream(device))
        return event

    def milliseconds(self, start: Any, end: Any) -> float:
        """Between two marks that have been passed; they are given back."""
        if isinstance(start, int):
            return (end - start) / 1e6
        taken = start.elapsed_time(end)
        self._free.extend((start, end))
        return taken


class Interval:
    """``done(milliseconds)`` is called once its length is known. ``task``: the backward in which it
    lies, -1 for none; ``read``: its marks may belong to another interval by now."""

    __slots__ = ("start", "end", "task", "done", "read")

    def __init__(self, start: Any, task: int, done: Callable[[float], None]):
        self.start, self.end, self.task, self.done, self.read = start, None, task, done, False

    def passed(self) -> bool:
        if self.end is None or (self.task != -1 and self.task == torch._C._current_graph_task_id()):
            return False
        return isinstance(self.end, int) or self.end.query()


class Timeline:
    """Intervals that are not read yet, in order."""

    def __init__(self) -> None:
        self.clock = Clock()
        self._open: deque[Interval] = deque()

    def add(self, interval: Interval) -> None:
        self._open.append(interval)

    def drain(self) -> None:
        """Read what the device has passed; waits for nothing."""
        while self._open:
            try:
                first = self._open.popleft()
            except IndexError:  # another thread was here
                return
            if not first.passed():
                self._open.appendleft(first)
                return
            self._read(first)

    def finish(self) -> None:
        """Read everything, waiting for the device. Backwards that never ended are dropped."""
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        rest, self._open = list(self._open), deque()
        for interval in rest:
            if interval.end is not None:
                self._read(interval)

    def _read(self, interval: Interval) -> None:
        interval.read = True
        interval.done(self.clock.milliseconds(interval.start, interval.end))


class Backward:
    """Makes an interval of each backward through the nodes that one call made."""

    __slots__ = ("_timeline", "_device", "_done", "_interval")

    def __init__(self, timeline: Timeline, device: torch.device, done: Callable[[float], None]):
        self._timeline, self._device, self._done = timeline, device, done
        self._interval: Interval | None = None

    def follow(self, outs: list[Tensor], since: int) -> None:
        """``outs``: what the call made; ``since``: autograd's sequence number before it."""
        roots = [t.grad_fn for t in outs if t.grad_fn is not None
                 and since <= t.grad_fn._sequence_nr() < _sequence()]
        for node in roots:
            node.register_prehook(self._start)
        for node in _rim(roots, since, _sequence()):
            node.register_hook(self._end)

    def _start(self, gradients: Any) -> None:
        task = torch._C._current_graph_task_id()
        if self._interval is None or self._interval.task != task:
            self._interval = Interval(self._timeline.clock.mark(self._device), task, self._done)
            self._timeline.add(self._interval)

    def _end(self, given: Any, taken: Any) -> None:
        interval = self._interval
        if (interval is not None and not interval.read
            and interval.task == torch._C._current_graph_task_id()):
            interval.end = self._timeline.clock.mark(self._device, interval.end)


def _rim(roots: list[Any], since: int, until: int) -> Iterator[Any]:
    """The nodes with a number in [since, until) from which a gradient leaves the call: the last one
    of them ends it."""
    seen, todo = set(roots), list(roots)
    while todo:
        node = todo.pop()
        outside = not node.next_functions
        for successor, _ in node.next_functions:
            if successor is None or not since <= successor._sequence_nr() < until:
                outside = True
            elif successor not in seen:
                seen.add(successor)
                todo.append(successor)
        if outside:
            yield node


def sequence() -> int:
    """Autograd's sequence number in this thread: nodes made from here on have at least this one."""
    return _sequence()
