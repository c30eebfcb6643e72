"""Signatures: all that a call depends on, in one tuple. Calls of a layer with equal signatures take
the same route. They make a repeated call cheap, and are made and compared at every call, hence the
plainness. The graph is not in it: integer tensors, and the arrays of a host's own graph, are
compared by `layer_memory`, as the very tensors of the earlier call, unwritten since.

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
from torch import Tensor
from torch.nn import Parameter

from gnnaccel.adapters.contract import Contract
from gnnaccel.adapters.guards import WEIGHTS, context_reason
from gnnaccel.adapters.own import Paths, called
from gnnaccel.dispatch.distributed import state as active
from gnnaccel.dispatch.memory.native_cache import GRAPHS


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
        self._reads, self._parts = contract.reads, contract.parts or of_modules

    def whole(self, layer: Any, args: tuple, kwargs: dict) -> tuple | None:
        """The signature of any call, with the looks of all that the layer is made of."""
        if context_reason() is not None:
            return None
        own = layer.__dict__
        arguments = of_arguments((*args, *kwargs.values()) if kwargs else args)
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
                active.own_rows, [get(module) for get, module in called],
                None if self._reads is None else self._reads(layer, args, kwargs))


def none(layer: Any, args: tuple, kwargs: dict) -> None:
    """The signature of layers whose calls are never repeated."""


# --- the forms of arguments and of modules, for layers of any host --------------------------------

_NUMBERS = frozenset((type(None), bool, int, float, str))
_REPLACED = frozenset(("forward", "reduce"))


def of_arguments(given: tuple) -> tuple[list, list, torch.device] | None:
    """(numbers of rows of the arguments, their forms beside that, the device of one of them); None
    where one is not understood.

    Understood are plain tensors, numbers, strings, None, pairs and dictionaries of these, and a
    host's graphs: of a graph the names of its types count, its structure is in `layer_memory`.
    """
    rows: list = []
    forms: list = []
    device, todo, grad = None, list(given), _grad_on()
    for a in todo:  # which grows by what is in pairs and dictionaries
        kind = type(a)
        if kind is Tensor or kind is Parameter:
            device = a.device
            if not a.is_floating_point():
                forms += ("index",)
            elif a.is_meta or a.is_neg() or (grad and a.is_inference()):
                return None
            else:
                rows += a.shape[:1]
                forms += a.ndim, a.shape[1:], a.dtype, device, a.layout
        elif kind in _NUMBERS:
            forms += kind, a
        elif kind is dict:
            forms += kind, tuple(a)
            todo += a.values()
        elif kind is tuple:  # a pair of one tensor is another call than one of two equal ones
            forms += kind, len(a), bool(a) and a[0] is a[-1]
            todo += a
        elif kind in GRAPHS:
            forms += kind, GRAPHS[kind].names(a)
        else:
            return None
    return None if device is None else (rows, forms, device)


def of_modules(layer: Any, args: tuple = (), options: tuple[str, ...] = ()) -> list | None:
    """The forms of the layer, its modules and their parameters; None where one of its modules is
    watched, or has functions of its own.

    ``args``: of the call, which do not matter here; ``options``: attributes of the modules inside
    that count, too.
    """
    forms: list = []
    modules = [layer]
    for module in modules:
        own = module.__dict__
        if module is not layer:
            if (own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"]
                    or own["_backward_pre_hooks"] or not own.keys().isdisjoint(_REPLACED)):
                return None
            if options:
                forms += map(own.get, options)
        cls, inside = type(module), own["_modules"]
        forms += cls, cls.forward, own["training"]
        for tensors in (own["_parameters"], own["_buffers"]):
            for t in tensors.values() if tensors else ():
                kind = type(t)
                if kind is Parameter or kind is Tensor:
                    forms += kind, t.dtype, t.shape, t.device
                else:
                    forms += (kind,)
        for name in WEIGHTS:
            if name in own:  # a plain attribute in the place of a parameter
                forms += name, type(own[name])
        if inside:
            children = [one for one in inside.items() if one[1] is not None]
            forms += ([name for name, _ in children],)
            modules += [m for _, m in children]
    return forms
