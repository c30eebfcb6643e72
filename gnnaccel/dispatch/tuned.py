"""Decisions that ``gnnaccel.autotune`` measured, kept in the user's cache for the environment they were measured in."""
from __future__ import annotations

import functools
import platform
import sys
from typing import Any

from gnnaccel._version import __version__
from gnnaccel.dispatch import pins

NAME = "autotune.json"
SCHEMA = 1


class Tuned:
    """What was measured here; nothing where nothing was. One is like another: what is kept is looked up at each decision."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tuned)

    def __hash__(self) -> int:
        return hash(Tuned)

    def __repr__(self) -> str:
        return "Tuned()"

    def of(self, request: Any) -> pins.Pinned | None:
        """For a `Request` or `RelationalRequest`. None over a graph seen for the first time: what its structure costs was not
        timed."""
        return None if request.fresh else kept(environment(request.device)).get(pins.kind_of(request))


def environment(device: str) -> str:
    """What times on a device of this type depend on besides the call."""
    import torch

    if device == "cuda":
        name = torch.cuda.get_device_name()
    else:
        name = f"{device} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    cupy = getattr(sys.modules.get("cupy"), "__version__", None)
    return f"{name}, torch {torch.__version__}, CuPy {cupy}, gnnaccel {__version__}"


@functools.lru_cache(maxsize=8)
def kept(where: str) -> dict[pins.Kind, pins.Pinned]:
    """The decisions of an environment; none where the file has none or cannot be understood."""
    from gnnaccel import store  # which needs the variables, and those the options, of which this module is part

    held = store.read(NAME) or {}
    found = held.get("environments", {}).get(where, []) if held.get("schema") == SCHEMA else []
    try:
        return pins.entries(NAME, found)
    except ValueError:  # of another version, or edited
        return {}


def keep(where: str, decisions: list[dict[str, Any]]) -> None:
    """Add decisions of an environment, in the place of those of the same kinds. Raises as `store.update`."""
    from gnnaccel import store

    new = {key: entry for key, entry in zip(pins.entries(NAME, decisions), decisions)}

    def change(held: dict[str, Any]) -> dict[str, Any]:
        environments = held.get("environments", {}) if held.get("schema") == SCHEMA else {}
        before = environments.get(where, [])
        others = [entry for key, entry in zip(pins.entries(NAME, before), before) if key not in new]
        return {"schema": SCHEMA, "environments": {**environments, where: [*others, *new.values()]}}

    store.update(NAME, change)
    kept.cache_clear()
