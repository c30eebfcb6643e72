"""How many calls of modules were replayed, and why others were not captured."""
from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from torch import nn

_log = logging.getLogger("gnnaccel")
_refused: Counter[tuple[str, str]] = Counter()
_replays: Counter[str] = Counter()


def summary() -> dict[str, Any]:
    """``replays``: {class of the module: calls that were replayed}; ``refused``: {class: {why a
    call was not captured: times}}."""
    refused: dict[str, dict[str, int]] = {}
    for (name, why), n in _refused.items():
        refused.setdefault(name, {})[why] = n
    return {"replays": dict(_replays), "refused": refused}


def counted(name: str) -> None:
    """Count one replayed call of a module of that class."""
    _replays[name] += 1


def told(module: nn.Module | str, why: str) -> str:
    """``why``, after it was counted, and logged the first time."""
    name = module if isinstance(module, str) else type(module).__name__
    if not _refused[name, why]:
        _log.info("gnnaccel: calls of %s are not captured: %s", name, why)
    _refused[name, why] += 1
    return why


def reset() -> None:
    """Start at zero."""
    _refused.clear()
    _replays.clear()
