"""Calls of layers over edge types that may go native before they are read, on a CPU: of layers that gain nothing there, and over
few edges that were not seen before. Reading such a layer takes as long as some relations take natively.
"""
from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from gnnaccel.cuda import driver
from gnnaccel.dispatch import counters, records
from gnnaccel.dispatch.config import Config
from gnnaccel.dispatch.names import IdentityMap
from gnnaccel.dispatch.ops.aggregation_route import checkpointed

_FEW, _RELATIONS = 10_000, 32  # edges (of each basis), and relations: more of them gain at once
_ALWAYS = 4000  # edges of all bases below which these never gain

_last: IdentityMap[weakref.ref] = IdentityMap()


def goes_native(layer: Any, owner: Any, edges: tuple[Any, ...], config: Config, bases: int = 0, gains: bool = True) -> bool:
    """Whether a call of ``layer`` may go native at once; counts it then. ``owner``: what the last call's edges are remembered
    by; ``bases``: 0 where the layer has none; ``gains``: whether it ever gains on a CPU."""
    if config.when != "profitable" or config.on_fallback != "native" or records.listening():
        return False
    first = edges[0] if edges else None
    if type(first) is not Tensor or not first.is_cpu or driver.placed():
        return False
    if not gains:
        counters.count(type(layer).__name__, "native", "GA401")
        return True
    if len(edges) > _RELATIONS or checkpointed():
        return False
    count = sum([t.shape[-1] for t in edges if type(t) is Tensor and t.dim()]) * max(1, bases)
    if not bases or count >= _ALWAYS:
        last = _last.get(owner)
        _last.set(owner, weakref.ref(first))
        if count >= _FEW or (last is not None and last() is first):
            return False
    counters.count(type(layer).__name__, "native", "GA301")
    return True
