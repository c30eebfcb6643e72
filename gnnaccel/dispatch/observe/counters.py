"""Counts of calls by layer, route and the reason against a faster one."""
from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

Key = tuple[str, str, "str | None"]
_OF_THE_CONTEXT = ("GA404", "GA405", "GA501")  # reasons that the next call need not have

_counts: defaultdict[Key, int] = defaultdict(int)
_tallies: dict[tuple, Tally] = {}
_compiled: defaultdict[str, int] = defaultdict(int)
#: at most one `Watch`; for lookups that cannot afford a call
watching: list[Watch] = []


def count(layer: str, route: str, code: str | None = None) -> None:
    """Count one call of a layer of class ``layer`` by ``route`` ("cuda", "torch", "native"),
    because of reason ``code``."""
    key = (layer, route, code)
    # Under the GIL this line is atomic: hashing a tuple of strings and adding ints run no Python
    # code, and CPython switches threads only at loops' ends, on entering functions and after calls.
    # A lock would cost as much again.
    _counts[key] += 1
    if watching:
        note(((key, 1),), False, decided=True)


def again(layer: str, code: str | None) -> None:
    """Count one call that stayed native as the last one did, and will again."""
    key = (layer, "native", code)
    _counts[key] += 1
    if watching:
        note(((key, 1),), True)


def compiled(layer: str) -> None:
    """Count one call of a layer of class ``layer`` as from a compiled model, beside `count`."""
    _compiled[layer] += 1


class Tally:
    """Calls with equal counts. Each adds one to ``calls``, which is atomic as well, and tells
    `note` where somebody is watching; sums are made when they are asked for. ``counts``: of one
    call."""

    __slots__ = ("counts", "calls")

    def __init__(self, counts: tuple[tuple[Key, int], ...]) -> None:
        self.counts, self.calls = counts, 0


def tally(counts: dict[Key, int]) -> Tally:
    """The `Tally` of such counts, shared: layers come and go, the counts of calls hardly differ."""
    items = tuple(counts.items())
    return _tallies.setdefault(items, Tally(items))


def _add_up() -> None:
    for one in list(_tallies.values()):
        calls, one.calls = one.calls, 0
        for key, n in one.counts if calls else ():
            _counts[key] += n * calls


class Watch:
    """Counts of one thread for a while. ``native``: nothing but native calls, none because of where
    it happened, such as within a mode of torch; ``lasting``: all of them will be native again over
    the same tensors; ``decided``: some were decided anew, not by an earlier call."""

    __slots__ = ("thread", "counts", "native", "lasting", "decided")
    counts: defaultdict[Key, int]

    def __init__(self) -> None:
        self.thread, self.counts = threading.get_ident(), defaultdict(int)
        self.native, self.lasting, self.decided = True, True, False


def note(counts: tuple[tuple[Key, int], ...], lasting: bool, decided: bool = False) -> None:
    """Add counts to the `Watch` of this thread, if there is one."""
    for watch in watching:  # a watch may end in another thread at any time
        if threading.get_ident() == watch.thread:
            watch.lasting, watch.decided = watch.lasting and lasting, watch.decided or decided
            for key, n in counts:
                watch.counts[key] += n
                watch.native = (watch.native and key[1] == "native"
                                and key[2] not in _OF_THE_CONTEXT)


@contextlib.contextmanager
def watched() -> Iterator[Watch | None]:
    """A block whose counts are written down besides; None while another such block lasts, here or
    in another thread."""
    if watching:
        yield None
        return
    watch = Watch()
    watching.append(watch)
    try:
        yield watch
    finally:
        watching.remove(watch)


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """A block after which the counts are as before it."""
    _add_up()
    before, compiled_before = dict(_counts), dict(_compiled)
    try:
        yield
    finally:
        reset_stats()
        _counts.update(before)
        _compiled.update(compiled_before)


def stats() -> dict[str, dict[str, Any]]:
    """Calls since the start or `reset_stats`: ``{layer: {"calls": n, "routes": {route: n},
    "reasons": {code: n}}}``, and ``"compiled": n`` of those that came from compiled models, if
    any."""
    _add_up()
    result: dict[str, dict[str, Any]] = {}
    for (layer, route, code), n in sorted(_counts.items(),
                                          key=lambda item: (item[0][0], item[0][1])):
        entry = result.setdefault(layer, {"calls": 0, "routes": {}, "reasons": {}})
        entry["calls"] += n
        entry["routes"][route] = entry["routes"].get(route, 0) + n
        if code is not None:
            entry["reasons"][code] = entry["reasons"].get(code, 0) + n
    for layer, n in _compiled.items():
        if layer in result:
            result[layer]["compiled"] = n
    return result


def reset_stats() -> None:
    """Start counting at zero."""
    _add_up()
    _counts.clear()
    _compiled.clear()
