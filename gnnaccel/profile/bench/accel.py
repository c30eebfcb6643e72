"""gnnaccel itself, as the benchmark uses it."""
from __future__ import annotations

import collections
import contextlib
import inspect


def native():
    """A context in which the host's own code runs, inside `accelerated` too."""
    import gnnaccel

    return gnnaccel.disabled()


def accelerated(**options):
    """A context in which gnnaccel takes over whatever it decides to. Raises when there is no such
    API yet.

    ``options`` are more of ``gnnaccel.enabled``'s.
    """
    import gnnaccel

    enabled = getattr(gnnaccel, "enabled", None)
    if enabled is None:
        raise NotImplementedError("gnnaccel.enabled is missing")
    return enabled(backend="auto", first_use="wait", **options)


def has_option(name: str) -> bool:
    """Does ``gnnaccel.enabled`` know this option?"""
    import gnnaccel

    return name in inspect.signature(gnnaccel.enabled).parameters


def clear_cache() -> None:
    """Drop cached graph structures, so that each cell builds, and is charged for, its own."""
    with contextlib.suppress(ImportError):
        from gnnaccel.dispatch.graph import cache

        cache.clear()


def reset_routes() -> None:
    """Start counting calls at zero."""
    import gnnaccel

    gnnaccel.reset_stats()


def routes() -> dict[str, dict[str, int]]:
    """Which routes calls took, and why not a faster one: {"routes": {"cuda": 12}, "reasons":
    {"GA301": 3}}."""
    import gnnaccel

    counts = gnnaccel.stats().values()
    return {field: _added(entry.get(field, {}) for entry in counts)
            for field in ("routes", "reasons")}


def _added(counts) -> dict[str, int]:
    total: collections.Counter = collections.Counter()
    for count in counts:
        total.update(count)
    return dict(total)


CONTEXTS = {"native": native, "gnnaccel": accelerated}
