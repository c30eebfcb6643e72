"""Decisions that ``gnnaccel.autotune`` measured, kept in the user's cache for the environment they
were measured in.

Each decision is of calls that the planner cannot tell apart: the same computation (Program, heads,
widths, dtypes, with or without gradients) of the same class of layers over graphs of the same
magnitude.
"""
from __future__ import annotations

import functools
import hashlib
import platform
import sys
from collections.abc import Mapping
from typing import Any

from gnnaccel._version import __version__
from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.policy import pins

NAME = "autotune.json"
SCHEMA = 2


class Tuned:
    """The decisions measured in this environment, if any. All instances are equal: the file is
    looked up at each decision."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tuned)

    def __hash__(self) -> int:
        return hash(Tuned)

    def __repr__(self) -> str:
        return "Tuned()"

    def of(self, request: Any) -> pins.Pinned | None:
        """The decision for a `Request`, `RelationalRequest` or `PlainRequest`. None over a graph
        seen for the first time: the cost of its structure was not timed."""
        return None if request.fresh else kept(environment(request.device)).get(key_of(request))


class Only(Tuned):
    """Calls of one key go one way, whatever is kept: for timing that way."""

    def __init__(self, key: str, pinned: pins.Pinned):
        self._held = key, pinned

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Only) and self._held == other._held

    def __hash__(self) -> int:
        return hash(self._held)

    def of(self, request: Any) -> pins.Pinned | None:
        key, pinned = self._held
        return pinned if key_of(request) == key else None


def key_of(request: Any) -> str:
    """Key of a request's calls, 24 hex digits: all of the request but whether the graph is new."""
    return hashlib.sha256(repr(request._replace(fresh=False)).encode()).hexdigest()[:24]


def environment(device: str) -> str:
    """Text of all that times on a device of this type depend on besides the call."""
    import torch

    if device == "cuda":
        # imports CuPy, so that its version does not depend on when this is asked
        driver.available()
        name = torch.cuda.get_device_name()
    else:
        name = (f"{device} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}, "
                f"{torch.get_num_threads()} threads")
    cupy = getattr(sys.modules.get("cupy"), "__version__", None)
    return f"{name}, torch {torch.__version__}, CuPy {cupy}, gnnaccel {__version__}"


@functools.lru_cache(maxsize=8)
def kept(where: str) -> dict[str, pins.Pinned]:
    """The decisions of an environment, by `key_of`; none where the file has none or cannot be
    understood."""
    # not at import: `store` needs `env`, and that the options, of which this module is part
    from gnnaccel import store

    held = store.read(NAME) or {}
    entries = held.get("environments", {}).get(where, {}) if held.get("schema") == SCHEMA else {}
    try:
        return {key: pins.pinned(f"{NAME}: entry {key}", entry) for key, entry in entries.items()}
    except (AttributeError, ValueError):  # a file of another version, or an edited one
        return {}


def keep(where: str, decisions: Mapping[str, dict[str, Any]]) -> None:
    """Add decisions of an environment by `key_of`, in the place of those of the same keys: each
    {route, kernel}, and for a reader a description of the calls. Raises as `store.update`."""
    from gnnaccel import store

    def change(held: dict[str, Any]) -> dict[str, Any]:
        environments = held.get("environments", {}) if held.get("schema") == SCHEMA else {}
        return {"schema": SCHEMA,
                "environments": {**environments,
                                 where: {**environments.get(where, {}), **decisions}}}

    store.update(NAME, change)
    kept.cache_clear()
