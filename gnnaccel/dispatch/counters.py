"""How often each layer ran on which route, and why not on a faster one."""
from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

Key = tuple[str, str, "str | None"]

_counts: defaultdict[Key, int] = defaultdict(int)
_watch: Watch | None = None


def count(layer: str, route: str, code: str | None = None) -> None:
    """One call of a layer of class ``layer`` took ``route`` ("cuda", "torch", "native"), because of reason ``code``."""
    key = (layer, route, code)
    # Under the GIL this line is atomic: hashing a tuple of strings and adding ints run no Python code, and CPython
    # switches threads only at loops' ends, on entering functions and after calls. A lock would cost as much again.
    _counts[key] += 1
    watch = _watch  # which may end in another thread at any time
    if watch is not None:
        watch.note(key, False)


def again(layer: str, code: str | None) -> None:
    """One call stayed native as the last one did, and will again."""
    key = (layer, "native", code)
    _counts[key] += 1
    watch = _watch
    if watch is not None:
        watch.note(key, True)


def add(found: Iterable[tuple[Key, int]]) -> None:
    """Calls that were not counted one by one, with how many there were of each."""
    for key, n in found:
        _counts[key] += n


class Watch:
    """What one thread counts for a while. ``native``: nothing but native calls; ``lasting``: all of them by `again`."""

    __slots__ = ("thread", "counts", "native", "lasting")

    def __init__(self) -> None:
        self.thread, self.counts = threading.get_ident(), defaultdict(int)
        self.native = self.lasting = True

    def note(self, key: Key, lasting: bool) -> None:
        if threading.get_ident() == self.thread:
            self.counts[key] += 1
            self.native = self.native and key[1] == "native"
            self.lasting = self.lasting and lasting


@contextlib.contextmanager
def watched() -> Iterator[Watch | None]:
    """A block whose counts are written down besides; None while another such block lasts, here or in another thread."""
    global _watch
    if _watch is not None:
        yield None
        return
    _watch = found = Watch()
    try:
        yield found
    finally:
        _watch = None


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """A block after which the counts are as before it."""
    before = dict(_counts)
    try:
        yield
    finally:
        _counts.clear()
        _counts.update(before)


def stats() -> dict[str, dict[str, Any]]:
    """Calls since the start or `reset_stats`: ``{layer: {"calls": n, "routes": {route: n}, "reasons": {code: n}}}``."""
    result: dict[str, dict[str, Any]] = {}
    for (layer, route, code), n in sorted(list(_counts.items()), key=lambda item: (item[0][0], item[0][1])):
        entry = result.setdefault(layer, {"calls": 0, "routes": {}, "reasons": {}})
        entry["calls"] += n
        entry["routes"][route] = entry["routes"].get(route, 0) + n
        if code is not None:
            entry["reasons"][code] = entry["reasons"].get(code, 0) + n
    return result


def reset_stats() -> None:
    """Start counting at zero."""
    _counts.clear()
