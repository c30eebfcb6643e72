"""Reasons why a DGL layer stays native whatever its kernels could do: replaced methods, and
submodules that are not the layer's own."""
from __future__ import annotations

import functools
from typing import Any

import torch

from gnnaccel.adapters import own
from gnnaccel.adapters.guards import (any_global_hook, declared, has_hooks, module_reason,
                                      ordinary)
from gnnaccel.dispatch.policy.reasons import Reason, reason


@functools.cache
def _graph_paths() -> tuple[type, own.Paths]:
    """(`DGLGraph`, paths of its methods that layers call)."""
    from dgl import DGLGraph

    return DGLGraph, own.Paths(DGLGraph, ("update_all", "apply_edges"), follow=False)


def graph_reason() -> Reason | None:
    """Why no layer is taken over: a graph does not pass messages as DGL's own does."""
    graph, paths = _graph_paths()
    return paths.of(graph).why


def layer_reason(layer: Any, path: own.Path, absorbed: dict[str, type]) -> Reason | None:
    """Why this layer object, as it is now, must run the host's own code; None when nothing speaks
    against it.

    ``path``: what its class runs; ``absorbed``: submodules whose work goes into the Program, by
    name, and the class that each must be.
    """
    why = module_reason(layer, path) or graph_reason()
    if why is not None or not absorbed:
        return why
    if any_global_hook():
        return reason("GA501", "hooks on all modules are registered")
    for name, cls in absorbed.items():
        module = layer._modules.get(name)
        if type(module) is not cls or "forward" in module.__dict__ or not own.forward_is_own(cls):
            return reason("GA205",
                          f"{name} is a {type(module).__name__}, or has a forward of its own")
        if has_hooks(module):
            return reason("GA501", f"{name} has hooks")
        if not ordinary(module):
            return reason("GA208", f"{name} has a weight of another type than Parameter")
    return None


def dtype_reason(x: torch.Tensor, *parameters: Any) -> Reason | None:
    """Why features and parameters do not go together; DGL's own code then raises, or casts in its
    own way.

    On a CPU, DGL knows nothing of autocast and refuses the dtypes that come of it.
    """
    if torch.is_autocast_enabled(x.device.type):
        return (None
                if x.device.type == "cuda"
                else reason("GA203", f"autocast is on, which DGL lacks on the {x.device.type}"))
    for p in parameters:
        if p is not None and p.dtype != x.dtype:
            return reason("GA203", f"features are {x.dtype}, parameters {p.dtype}")
    return None


def weights(layer: Any, *names: str) -> tuple | Reason:
    """The weights of these maps of the layer, as `guards.declared`, or which has none."""
    found = tuple([declared(layer._modules[name]) for name in names])
    for name, weight in zip(names, found):
        if not isinstance(weight, torch.Tensor):  # a quantized map's `weight` is a method
            return reason("GA208", f"{name} is a {type(layer._modules[name]).__name__} without a "
                                   "weight as a tensor", f"use the layer's own {name}")
    return found


def dropout(module: torch.nn.Dropout) -> float:
    """The probability with which an absorbed dropout drops now."""
    return module.p if module.training else 0.0


def dtypes(x: torch.Tensor) -> tuple[torch.dtype, torch.dtype]:
    """(of the rows, of the host's sums over edges). Under autocast on CUDA, DGL casts what enters a
    sum, and so its result."""
    row = x.dtype
    if row != torch.float64 and x.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        row = torch.get_autocast_dtype("cuda")
    return row, row
