"""``to_simple`` of a graph on the GPU.

DGL has it for CPUs alone, also where it was built with CUDA. Its own example of link prediction
asks for it on a GPU, so here the host does it.
"""
from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from gnnaccel.adapters.dgl.bridge.tags import device_of
from gnnaccel.adapters.patching import PatchSet

_WHY = "Removes parallel edges of a graph on the GPU, on the host."


def install(patches: PatchSet) -> None:
    """Replace the function and the method."""
    import dgl
    from dgl.transforms import functional

    native = functional.to_simple
    new = _anywhere(native)
    for name in ("dgl.transforms.functional", "dgl.transforms", "dgl"):
        if getattr(sys.modules[name], "to_simple", None) is native:
            patches.set(sys.modules[name], "to_simple", new, _WHY)
    patches.set(dgl.DGLGraph, "to_simple", _anywhere(dgl.DGLGraph.to_simple), _WHY)


def _anywhere(native: Callable) -> Callable:
    named = inspect.signature(native)

    @functools.wraps(native)
    def to_simple(g: Any, *args: Any, **kwargs: Any) -> Any:
        device = device_of(g._graph)
        if device is None:
            return native(g, *args, **kwargs)
        bound = named.bind(g, *args, **kwargs)
        bound.apply_defaults()
        copies_nodes, bound.arguments["copy_ndata"] = bound.arguments["copy_ndata"], False
        bound.arguments["g"] = g.cpu()
        result = native(*bound.args, **bound.kwargs)
        simple = (result[0] if isinstance(result, tuple) else result).to(device)
        for kind in g.ntypes if copies_nodes else ():
            simple.nodes[kind].data.update(g.nodes[kind].data)
        return (simple, _moved(result[1], device)) if isinstance(result, tuple) else simple

    return to_simple


def _moved(mapping: Any, device: Any) -> Any:
    """The new edge of each old one, on the device; of several relations by relation."""
    if isinstance(mapping, dict):
        return {etype: of_etype.to(device) for etype, of_etype in mapping.items()}
    return mapping.to(device)
