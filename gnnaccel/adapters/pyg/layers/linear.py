"""PyG's own linear maps (`torch_geometric.nn.Linear`): of many rows by kernels, as torch's own, and
inside quantized layers in int8.

Their class is replaced only while there is such a layer, and once there is a large graph: every
other model calls its maps as without gnnaccel.
"""
from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from gnnaccel.adapters import linear
from gnnaccel.adapters.own import home
from gnnaccel.adapters.patching import PatchSet
from gnnaccel.dispatch.policy import rules
from gnnaccel.dispatch.policy.reasons import reason
from gnnaccel.dispatch.quantized import settings
from gnnaccel.dispatch.uncompiled import uncompiled

_lock = threading.Lock()


def install(patches: PatchSet) -> None:
    """Wrap the class's ``forward``."""
    from torch_geometric.nn import Linear

    patches.set(Linear, "forward", _routed(Linear.forward, patches),
                "Maps many rows by a kernel, as of `torch.nn.Linear`, and runs the linear maps "
                "inside quantized layers in int8. Replaced only once a graph with at least 131,072 "
                "edges came, or while a model is quantized.")


def update_on_demand(patches: PatchSet) -> None:
    """`gnnaccel.adapters.update_on_demand` for linear maps."""
    from torch_geometric.nn import Linear

    with _lock:
        if _wanted() and not patches.holds(Linear, "forward"):
            install(patches)
    _release(patches)


def _release(patches: PatchSet) -> None:
    """Put the class's ``forward`` back where no quantized layer is left, nor was a large graph."""
    from torch_geometric.nn import Linear

    with _lock:  # who quantizes a model between the two waits, and puts ours back
        if not _wanted():
            patches.undo(Linear, "forward")


def _wanted() -> bool:
    return linear.wanted or settings.maps_asked()


def maps(layer: Any) -> Iterator[tuple[str, Any]]:
    """(name, module) of the linear maps inside a layer that may be quantized. Not those of GATConv:
    attention's scores are made of their results, and stay fp32."""
    from torch_geometric.nn import GATConv, Linear

    if not isinstance(layer, GATConv):
        yield from ((name, module) for name, module in layer.named_modules()
                    if type(module) is Linear)


def _routed(native: Callable, patches: PatchSet) -> Callable:
    from torch.compiler import is_compiling

    from gnnaccel.adapters.guards import context_reason
    from gnnaccel.dispatch.policy.config import current
    from gnnaccel.dispatch.quantized import projection

    replaced = (None
                if home(native) == "torch_geometric"
                else reason("GA504", "forward of Linear was replaced"))
    for decides in (_release, settings.maps_asked, settings.map_entry, rules.verdict,
                    projection.mapped):
        uncompiled(decides)

    many = native if replaced else linear.routed(native, linear.of_many)

    @functools.wraps(native)
    def forward(self: Any, x: Any) -> Any:
        if is_compiling():
            return native(self, x)
        if not settings.maps_asked():
            if not linear.wanted:  # the last quantized layer is gone
                _release(patches)
            return many(self, x)
        entry = settings.map_entry(self)
        if entry is None:
            return many(self, x)
        config = current()
        if config is None:
            return native(self, x)
        layer = entry.owner()  # type: ignore[misc]  # a map's entry
        verdict = rules.verdict(self if layer is None else layer, config)
        why = replaced or context_reason() if verdict.inside else verdict.reason
        return projection.mapped(self, entry, config, x, lambda: native(self, x), why)

    return forward
