"""Signatures: all that a call depends on, in one tuple. Calls of a layer with equal signatures take
the same route. They make a repeated call cheap, and are made at every call, hence the plainness.
The graph is not in it: integer tensors, and the arrays of a host's own graph, are compared by
`layer_memory`, as the very tensors of the earlier call, unwritten since.

The numbers of rows come first: calls of a layer whose signatures are equal in all else differ in
their graphs alone, as those over mini-batches do (`Contract.resized`).

An argument that is no tensor, number, graph or dictionary of tensors, and a layer that somebody
watches by hooks, have no signature. Such calls are stated anew each time.
"""
from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch

from gnnaccel.adapters import looks
from gnnaccel.adapters.contract import Contract
from gnnaccel.adapters.guards import context_reason
from gnnaccel.adapters.own import Paths
from gnnaccel.dispatch.distributed import state as active

_autocast_on, _autocast_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
_grad_on, _deterministic = torch.is_grad_enabled, torch.are_deterministic_algorithms_enabled


class Signature:
    """Signatures of the calls of one layer class, of a ``contract`` with ``FIELDS``.

    ``paths``: the functions that the class runs, which must be the host's; ``settings``: attributes
    that count for every class; ``hooks``: hooks that must not be set, by the layer's attributes.
    """

    def __init__(self, contract: Contract, paths: Paths, settings: tuple[str, ...] = ("training",),
                 hooks: Callable[[dict], tuple] | None = None):
        self._values: Callable[[dict], Any] = itemgetter(*(contract.FIELDS or ()), *settings)
        self._paths, self._hooks = paths, hooks
        self._reads, self._parts = contract.reads, contract.parts or looks.of_modules

    def whole(self, layer: Any, args: tuple, kwargs: dict) -> tuple | None:
        """The signature of any call, with the looks of all that the layer is made of."""
        if context_reason() is not None:
            return None
        own, arguments = layer.__dict__, looks.of_arguments((*args, *kwargs.values())
                                                            if kwargs else args)
        if arguments is None or (self._hooks is not None and any(self._hooks(own))):
            return None
        rows, forms, device = arguments
        path = self._paths.of(type(layer))
        if path.why is not None or not own.keys().isdisjoint(path.names):
            return None
        parts = self._parts(layer, args)
        if parts is None:
            return None
        return (rows, self._values(own), len(args), tuple(kwargs), forms, parts,
                _autocast_dtype(device.type) if _autocast_on(device.type) else None, _grad_on(),
                _deterministic(), torch.get_default_dtype(), active.leading is None,
                active.own_rows,
                None if self._reads is None else self._reads(layer, args, kwargs))


def none(layer: Any, args: tuple, kwargs: dict) -> None:
    """The signature of layers whose calls are never repeated."""

