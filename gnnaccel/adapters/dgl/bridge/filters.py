"""DGL's filters of ids in torch operations: DGL's own code for them is for GPUs alone.

Samplers leave out edges by these filters.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.dgl.bridge.tags import is_bridged
from gnnaccel.adapters.patching import PatchSet

_IDS = "_gnnaccel_ids"


def install(patches: PatchSet) -> None:
    """Replace the class's methods, for ids on the device."""
    from dgl.utils.filter import Filter

    patches.set(Filter, "__init__", _made(Filter.__init__),
                "Keeps ids that are on the GPU for the methods below.")
    for name, included in (("find_included_indices", True), ("find_excluded_indices", False)):
        patches.set(Filter, name, _found(getattr(Filter, name), included),
                    "Filters ids on the GPU by torch operations.")


def _made(native: Callable) -> Callable:
    @functools.wraps(native)
    def __init__(self: Any, ids: Tensor) -> None:
        if is_bridged(ids.device):
            setattr(self, _IDS, ids.clone())
        else:
            native(self, ids)

    return __init__


def _found(native: Callable, included: bool) -> Callable:
    @functools.wraps(native)
    def indices(self: Any, test: Tensor) -> Tensor:
        ids = getattr(self, _IDS, None)
        if ids is None:
            return native(self, test)
        return torch.isin(test, ids, invert=not included).nonzero().squeeze(1).to(test.dtype)

    return indices
