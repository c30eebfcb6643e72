"""Standing around calls: who measures or compares them is called in their place, with the call to
run.

Asked only while somebody listens to records, so it costs nothing otherwise.
"""
from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from gnnaccel.dispatch.observe import records


class Visit(NamedTuple):
    """One call about to be decided. ``layer``: the host's layer, or the name of a single operation;
    then ``adapter`` is None, ``args`` holds what `ops.route.run` was given, and ``native``, without
    arguments, may be None. Of a layer without an adapter the call is that of its message passing,
    with what stands for an adapter of that."""

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
_repeating: tuple[Watcher, ...] = ()  # those of them that run calls several times


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
        _watchers = tuple(known for known in _watchers if known != watcher)
        _repeating = tuple(known for known in _repeating if known != watcher)
    records.unsubscribe(sink)
