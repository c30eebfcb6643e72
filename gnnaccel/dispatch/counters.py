"""How often each layer ran on which route, and why not on a faster one."""
from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

_counts: defaultdict[tuple[str, str, str | None], int] = defaultdict(int)


def count(layer: str, route: str, code: str | None = None) -> None:
    """One call of a layer of class ``layer`` took ``route`` ("cuda", "torch", "native"), because of reason ``code``."""
    key = (layer, route, code)
    # Under the GIL this line is atomic: hashing a tuple of strings and adding ints run no Python code, and CPython
    # switches threads only at loops' ends, on entering functions and after calls. A lock would cost as much again.
    _counts[key] += 1


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
