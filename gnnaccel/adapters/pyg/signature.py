"""Signatures of PyG's calls.

Most calls are plain ones, ``layer(x, edge_index)``, of which little has to be looked at; calls with
more arguments, pairs and dictionaries have the longer signatures of `adapters.signature`.
"""
from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gnnaccel.adapters.contract import Contract
from gnnaccel.adapters.own import Paths
from gnnaccel.adapters.pyg import guards
from gnnaccel.adapters.signature import Signature, none

_autocast_on, _autocast_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
_grad_on, _deterministic = torch.is_grad_enabled, torch.are_deterministic_algorithms_enabled
_HOOKS = itemgetter(*guards.HOOKS)
_SETTINGS = ("training", "_explain", "_decomposed_layers", "flow", "node_dim")
_MODULE_HOOKS = itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks",
                           "_backward_pre_hooks")


class PlainSignature(Signature):
    """Signatures of layers with ``WATCHED`` submodules."""

    def __init__(self, contract: Contract, paths: Paths):
        super().__init__(contract, paths, _SETTINGS, _HOOKS)
        self._watched, self._linear = contract.WATCHED or (), contract.LINEAR
        self._other = self.whole if contract.again else none

    def __call__(self, layer: Any, args: tuple, kwargs: dict) -> tuple | None:
        if kwargs or len(args) != 2:
            return self._other(layer, args, kwargs)
        x, edge_index = args
        if type(x) is not Tensor or type(edge_index) is not Tensor or x.is_meta or x.is_neg():
            return self._other(layer, args, kwargs)
        own, grad = layer.__dict__, _grad_on()
        if grad and x.is_inference():
            return None
        if any(_HOOKS(own)) or guards.context_reason() is not None:
            return None
        path = self._paths.of(type(layer))
        if path.why is not None or not own.keys().isdisjoint(path.names):
            return None
        modules, parameters = own["_modules"], own["_parameters"]
        if "aggr_module" not in modules:
            return None
        of_aggregation = modules["aggr_module"].__dict__
        if (any(_MODULE_HOOKS(of_aggregation))
            or not of_aggregation.keys().isdisjoint(guards.REDUCING)):
            return None
        weights: list = []  # their objects stay where `.data` is replaced, or `Module.to` is called
        for name in parameters:
            weight = parameters[name]
            kind = type(weight)
            if kind is Parameter or kind is Tensor:
                weights += weight.dtype, weight.shape
            elif kind not in guards.ORDINARY:
                return None
        for name in self._watched:
            if modules.get(name) is not None:
                inside = guards.plain_linears(map(modules.get, self._watched))
                if inside is None:
                    return None
                weights += inside
                break
        for buffer in own["_buffers"].values():
            if buffer is not None:
                weights += buffer.dtype, buffer.shape
        device = x.device
        return (x.shape[:1], self._values(own), x.shape[1:], x.dtype, device, x.layout, weights,
                _autocast_dtype(device.type) if _autocast_on(device.type) else None, grad,
                _deterministic(), *map(id, modules.values()), *map(id, parameters.values()),
                *map(_of_linear, map(modules.get, self._linear)))


def of(contract: Contract, paths: Paths, passes_messages: bool) -> Callable[..., tuple | None]:
    """The function that gives the signatures of a layer class; ``passes_messages``: it is a
    MessagePassing."""
    if contract.FIELDS is None:
        return none
    if contract.WATCHED is not None:
        return PlainSignature(contract, paths)
    if contract.again is None:
        return none
    return (Signature(contract, paths, _SETTINGS, itemgetter(*guards.HOOKS)).whole
            if passes_messages else Signature(contract, paths).whole)


def _of_linear(module: Any) -> tuple | None:
    """Parameters of a linear map that a bound call makes, by identity; None if it is more than
    that."""
    if not guards.plain_linear(module):
        return None
    weight = module._parameters.get("weight")
    return (*map(id, module._parameters.values()),
            weight.shape if type(weight) is Parameter else None)
