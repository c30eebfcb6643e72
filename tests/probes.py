"""What tests ask gnnaccel's memories that has no public answer: how often calls were decided anew,
and how much is kept. All such questions stand here, so that a memory can change without its tests.
"""
from __future__ import annotations

from typing import Any

from gnnaccel.adapters.pyg.fx import models
from gnnaccel.dispatch import router
from gnnaccel.dispatch.graph import cache
from gnnaccel.dispatch.memory import layer_memory
from gnnaccel.dispatch.observe import decisions
from gnnaccel.dispatch.plan import planner
from gnnaccel.dispatch.policy import names


def decided(monkeypatch: Any) -> list[str]:
    """The classes of the layers whose calls were decided from scratch, as they come from now on."""
    found: list[str] = []
    decide = router._decide

    def watched(layer: Any, *rest: Any) -> Any:
        found.append(type(layer).__name__)
        return decide(layer, *rest)

    monkeypatch.setattr(router, "_decide", watched)
    return found


def kept() -> dict[str, int]:
    """How many entries each table has that outlives a call."""
    return {"structures": len(cache._entries), "plans": len(planner._memo),
            "warnings": len(decisions._warned), "names": len(names._names),
            "HeteroConv layers": sum(memory.inner is not None for _, memory
                                     in layer_memory.memories.entries.values()),
            "layers": len(layer_memory.memories), "fx models": len(models._codes)}


def structures_of_captures() -> int:
    """How many structures belong to a CUDA graph that is, or was, being captured."""
    return sum(bool(key[-1]) for key in cache._entries)


def count_structures_anew() -> None:
    """Set the hits and misses of `cache.info` to zero."""
    cache._counts.update(hits=0, misses=0)


def warn_again() -> None:
    """Forget which warnings were given."""
    decisions._warned.clear()


def drop_late(monkeypatch: Any) -> None:
    """Let the cache hear nothing of tensors that have gone."""
    monkeypatch.setattr(cache, "_drop", lambda key, view, ref: None)
