"""What a plain call ``layer(x, edge_index)`` depends on, in one tuple: two calls with equal signatures take the same route.

This is what makes a repeated call cheap, and it runs at every call, hence its plainness. Whatever is not plain (keywords,
pairs, edge features, hooks) has no signature and is stated anew each time. The graph is not in it: the router compares that
by itself.
"""
from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.own import Paths
from gnnaccel.adapters.pyg import guards

_autocast_on, _autocast_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
_grad_on, _deterministic = torch.is_grad_enabled, torch.are_deterministic_algorithms_enabled
_SETTINGS = ("training", "_explain", "_decomposed_layers", "flow", "node_dim")
_MODULE_HOOKS = itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def none(layer: Any, args: tuple, kwargs: dict) -> None:
    """The signature of layers that have no plain calls."""


def of(adapter: Any, paths: Paths) -> "Signature":
    """From what an adapter module says of its layer class; ``paths``: of that class."""
    return Signature(adapter.FIELDS, paths, adapter.WATCHED, getattr(adapter, "LINEAR", ()))


def repeats(adapter: Any, paths: Paths) -> "Repeats":
    """Of a relational layer class, from what its adapter module says."""
    return Repeats(adapter, paths)


class Signature:
    """Signatures of the calls of one layer class. ``fields``: the attributes of a layer that its Program depends on;
    ``paths``: what it runs, which must be the host's; ``watched``: submodules that the adapter may
    leave out, so they must be linear maps and nothing else; ``linear``: those that a bound call leaves out."""

    def __init__(self, fields: tuple[str, ...], paths: Paths, watched: tuple[str, ...], linear: tuple[str, ...]):
        self._values = itemgetter(*fields, *_SETTINGS)
        self._hooks = itemgetter(*guards.HOOKS)
        self._paths = paths
        self._watched, self._linear = watched, linear

    def __call__(self, layer: Any, args: tuple, kwargs: dict) -> tuple | None:
        if kwargs or len(args) != 2:
            return None
        x, edge_index = args
        if type(x) is not Tensor or type(edge_index) is not Tensor or x.is_meta or x.is_neg():
            return None
        own = layer.__dict__
        if any(self._hooks(own)) or guards.context_reason() is not None:
            return None
        path = self._paths.of(type(layer))
        if path.why is not None or not own.keys().isdisjoint(path.names):
            return None
        modules, parameters = own["_modules"], own["_parameters"]
        of_aggregation = modules["aggr_module"].__dict__
        if any(_MODULE_HOOKS(of_aggregation)) or not of_aggregation.keys().isdisjoint(guards.REDUCING):
            return None
        for name in self._watched:
            module = modules.get(name)
            if module is not None and not guards.plain_linear(module):
                return None
        dtype = None  # Module.to changes the dtype of parameters and leaves the objects the same
        for tensor in (*parameters.values(), *own["_buffers"].values()):
            if tensor is not None:
                dtype = tensor.dtype
                break
        device = x.device
        return (self._values(own), x.shape, x.dtype, device, x.layout, dtype,
                _autocast_dtype(device.type) if _autocast_on(device.type) else None, _grad_on(), _deterministic(),
                *map(id, modules.values()), *map(id, parameters.values()), *map(_of_linear, map(modules.get, self._linear)))


def _of_linear(module: Any) -> tuple | None:
    """Of a linear map that a bound call makes: its own parameters, None if it is more than a linear map."""
    return tuple(map(id, module._parameters.values())) if guards.plain_linear(module) else None


class Repeats(Signature):
    """Signatures of the calls ``layer(x, edge_index, edge_type)`` of a relational layer class, with features."""

    def __init__(self, adapter: Any, paths: Paths):
        super().__init__(adapter.REPEATED, paths, (), ())
        self._outside = adapter.outside

    def __call__(self, layer: Any, args: tuple, kwargs: dict) -> tuple | None:
        if kwargs or len(args) != 3 or type(args[2]) is not Tensor or type(args[0]) is not Tensor:
            return None
        found = super().__call__(layer, args[:2], kwargs) if args[0].is_floating_point() else None
        if found is None or any(m is not None and any(_MODULE_HOOKS(m.__dict__)) for m in layer.__dict__["_modules"].values()):
            return None
        parameters = [None if p is None else (p.dtype, p.device) for p in layer.__dict__["_parameters"].values()]
        return type(layer), *found, *parameters, *self._outside()
