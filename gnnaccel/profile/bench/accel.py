"""gnnaccel itself, as the benchmark uses it."""
from __future__ import annotations

import collections


def native():
    """A context in which the host's own code runs, inside `accelerated` too."""
    import gnnaccel

    return gnnaccel.disabled()


def accelerated(**options):
    """A context in which gnnaccel takes over whatever it decides to. ``options`` are more of
    ``gnnaccel.enabled``'s."""
    import gnnaccel

    return gnnaccel.enabled(backend="auto", first_use="wait", **options)


def clear_cache() -> None:
    """Drop cached graph structures, so that each cell builds, and is charged for, its own."""
    from gnnaccel.dispatch.graph import cache

    cache.clear()


def reset_routes() -> None:
    import gnnaccel

    gnnaccel.reset_stats()


def routes(stats: dict[str, dict] | None = None) -> dict[str, dict[str, int]]:
    """Which routes calls took, and why not a faster one: {"routes": {"cuda": 12}, "reasons":
    {"GA301": 3}}. ``stats``: of another process, as ``gnnaccel.stats`` has them."""
    import gnnaccel

    counts = (gnnaccel.stats() if stats is None else stats).values()
    return {field: dict(sum((collections.Counter(entry.get(field, {})) for entry in counts),
                            collections.Counter()))
            for field in ("routes", "reasons")}


CONTEXTS = {"native": native, "gnnaccel": accelerated}
