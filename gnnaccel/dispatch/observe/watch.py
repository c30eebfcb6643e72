"""Watchers around calls: functions that measure or compare calls. They are called in place of a
call, with the function that runs it.

Watchers are asked only while somebody listens to records, so they cost nothing otherwise.
"""
from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from gnnaccel.dispatch.observe import records


class Visit(NamedTuple):
    """A call about to be decided. ``layer``: the host's layer, or the name of a single operation;
    then ``adapter`` is None, ``args`` holds the arguments of `ops.route.run`, and ``native``,
    without arguments, may be None. For a layer without an adapter the call is that of its message
    passing, and ``adapter`` stands for one of that."""

    layer: Any
    adapter: Any
    native: Any
    args: tuple
    kwargs: dict
    config: Any


Run = Callable[[Visit], Any]
Watcher = Callable[[Visit, Run], Any]

_lock = threading.Lock()
_watchers: tuple[Watcher, ...] = ()  # replaced, never changed in place
_repeating: tuple[Watcher, ...] = ()  # the watchers that run calls several times


def around(visit: Visit, run: Run) -> Any:
    """The result of the call, through every watcher; the last one added is the outermost."""
    for watcher in _watchers:
        run = functools.partial(_call, watcher, run)
    return run(visit)


def _call(watcher: Watcher, run: Run, visit: Visit) -> Any:
    return watcher(visit, run)


def repeating() -> bool:
    """Whether somebody runs calls several times, with copies of their tensors."""
    return bool(_repeating)


def add(watcher: Watcher, sink: records.Sink, repeats: bool = False) -> None:
    """Let ``watcher(visit, run)`` stand around every call: it returns what ``run(visit)`` does.
    ``sink`` gets the records. ``repeats``: it may run a call several times."""
    global _watchers, _repeating
    with _lock:
        _watchers = (*_watchers, watcher)
        _repeating = (*_repeating, *[watcher] * repeats)
    records.subscribe(sink)


def remove(watcher: Watcher, sink: records.Sink) -> None:
    """The opposite of `add`."""
    global _watchers, _repeating
    with _lock:
        # bound methods are made anew each time
        _watchers = tuple(each for each in _watchers if each != watcher)
        _repeating = tuple(each for each in _repeating if each != watcher)
    records.unsubscribe(sink)
