"""What a plain call ``layer(x, edge_index)`` depends on, in one tuple: two calls with equal signatures take the same route.

This is what makes a repeated call cheap. Whatever is not plain (keywords, pairs, edge features, hooks) has no signature and
is stated anew each time.
"""
from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.pyg import guards

_autocast_on, _autocast_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
_common = itemgetter("training", "_explain", "_decomposed_layers", "flow", "node_dim")


class Signature:
    """Signatures of the calls of one layer class. ``fields``: the attributes of a layer that its Program depends on;
    ``methods``: those that must not be replaced on the layer object."""

    def __init__(self, fields: tuple[str, ...], methods: tuple[str, ...]):
        self._fields = itemgetter("flow", *fields)
        self._hooks = itemgetter(*guards.HOOKS)
        self._methods = guards.METHODS + methods

    def __call__(self, layer: Any, args: tuple, kwargs: dict) -> tuple | None:
        if kwargs or len(args) != 2:
            return None
        x, edge_index = args
        if type(x) is not Tensor or type(edge_index) is not Tensor:
            return None
        own = layer.__dict__
        if any(self._hooks(own)) or guards.context_reason() is not None:
            return None
        for name in self._methods:
            if name in own:
                return None
        modules = own["_modules"]
        for module in modules.values():  # a hook on a submodule may change what may be skipped
            if module is not None and (module._forward_hooks or module._forward_pre_hooks):
                return None
        kind = x.device.type
        return (x.shape, x.dtype, x.device, x.layout, edge_index.shape, edge_index.dtype, edge_index.layout,
                _autocast_dtype(kind) if _autocast_on(kind) else None, torch.is_grad_enabled(),
                torch.are_deterministic_algorithms_enabled(), self._fields(own), _common(own),
                tuple(map(id, modules.values())), tuple(map(id, own["_parameters"].values())))
