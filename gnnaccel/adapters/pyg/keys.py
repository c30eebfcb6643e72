"""Edge types as PyG's ``ModuleDict`` writes them, each translated back once.

`HeteroConv` goes through its layers by edge type in every call. That each key is compared with the names of all attributes of the
class costs as much as the rest of its loop over small graphs.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.compiler import is_compiling

from gnnaccel.adapters.patching import PatchSet

_NAME = "to_external_key"
_MANY = 4096


def install(patches: PatchSet) -> None:
    """Replace the translation through ``patches``; nothing in versions that have none."""
    from torch_geometric.nn.module_dict import ModuleDict

    own = vars(ModuleDict).get(_NAME)
    if isinstance(own, classmethod):
        patches.set(ModuleDict, _NAME, classmethod(remembering(own.__func__)))


def remembering(native: Callable) -> Callable:
    """``native(cls, key)``, a function of nothing else, with its results kept."""
    known: dict[tuple[type, str], Any] = {}

    @functools.wraps(native)
    def translated(cls: type, key: str) -> Any:
        if is_compiling() or type(key) is not str:
            return native(cls, key)
        found = known.get((cls, key))
        if found is None:
            if len(known) >= _MANY:
                known.clear()
            found = known[cls, key] = native(cls, key)
        return found

    return translated
