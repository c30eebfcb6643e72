"""DGL layers stated as Programs. None yet: DGL scripts run natively."""
from __future__ import annotations

from gnnaccel.adapters.patching import PatchSet


def install(patches: PatchSet) -> list[str]:
    """Replace the ``forward`` of known DGL layers. Returns what was replaced: nothing so far."""
    return []
