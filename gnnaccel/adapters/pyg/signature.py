"""What a call depends on, in one tuple: calls of a layer with equal signatures take the same route.

This is what makes a repeated call cheap, and it runs at every call, hence its plainness. Most calls
are plain ones, ``layer(x, edge_index)``; those of more arguments, pairs and dictionaries have
longer signatures (`Signature.whole`). The graph is in neither: integer tensors are compared by
`layer_memory`, as the very tensors of the earlier call, unwritten since.

What is no tensor, number or dictionary of tensors, and a layer that somebody watches by hooks, has
no signature. Its calls are stated anew each time.
"""
from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gnnaccel.adapters.own import Paths
from gnnaccel.adapters.pyg import guards

_autocast_on, _autocast_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
_grad_on, _deterministic = torch.is_grad_enabled, torch.are_deterministic_algorithms_enabled
_SETTINGS = ("training", "_explain", "_decomposed_layers", "flow", "node_dim")
_MODULE_HOOKS = itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks",
                           "_backward_pre_hooks")
_NUMBERS = frozenset((type(None), bool, int, float, str))
_REPLACED = frozenset(("forward", "reduce"))


class Signature:
    """Signatures of the calls of one layer class, from what its ``adapter`` module says.

    ``FIELDS``: the attributes of a layer that its Program depends on; ``reads``, if there is one:
    ``reads(layer)``, what else it depends on; ``parts``, if there is one: ``parts(layer, args)``,
    how all looks that the layer is made of, None where that cannot be said; ``WATCHED``: submodules
    that the adapter may leave out of a plain call, so they must be linear maps and nothing else;
    ``LINEAR``: those that a bound call leaves out; ``again``: that other calls than plain ones can
    be repeated. ``paths``: what the class runs, which must be the host's; ``passes_messages``: it
    is a MessagePassing.
    """

    def __init__(self, adapter: Any, paths: Paths, passes_messages: bool):
        settings = _SETTINGS if passes_messages else ("training",)
        self._values = itemgetter(*adapter.FIELDS, *settings)
        self._hooks = itemgetter(*guards.HOOKS) if passes_messages else _no_hooks
        self._paths = paths
        self._watched = getattr(adapter, "WATCHED", ())
        self._linear = getattr(adapter, "LINEAR", ())
        self._general = hasattr(adapter, "again")
        self._reads = getattr(adapter, "reads", None)
        self._parts = getattr(adapter, "parts", _parts)

    def __call__(self, layer: Any, args: tuple, kwargs: dict) -> tuple | None:
        if kwargs or len(args) != 2:
            return self.whole(layer, args, kwargs)
        x, edge_index = args
        if type(x) is not Tensor or type(edge_index) is not Tensor or x.is_meta or x.is_neg():
            return self.whole(layer, args, kwargs)
        own = layer.__dict__
        if any(self._hooks(own)) or guards.context_reason() is not None:
            return None
        path = self._paths.of(type(layer))
        if path.why is not None or not own.keys().isdisjoint(path.names):
            return None
        modules, parameters = own["_modules"], own["_parameters"]
        of_aggregation = modules["aggr_module"].__dict__
        if (any(_MODULE_HOOKS(of_aggregation))
            or not of_aggregation.keys().isdisjoint(guards.REDUCING)):
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
                _autocast_dtype(device.type) if _autocast_on(device.type) else None, _grad_on(),
                _deterministic(), *map(id, modules.values()), *map(id, parameters.values()),
                *map(_of_linear, map(modules.get, self._linear)))

    def whole(self, layer: Any, args: tuple, kwargs: dict) -> tuple | None:
        """The signature of any call, with the looks of all that the layer is made of."""
        if not self._general or guards.context_reason() is not None or guards._any_global_hook():
            return None
        own, found = layer.__dict__, _look((*args, *kwargs.values()) if kwargs else args)
        if found is None or any(self._hooks(own)):
            return None
        given, device = found
        path = self._paths.of(type(layer))
        if path.why is not None or not own.keys().isdisjoint(path.names):
            return None
        parts = self._parts(layer, args)
        if parts is None:
            return None
        return (self._values(own), len(args), tuple(kwargs), given, parts,
                _autocast_dtype(device.type) if _autocast_on(device.type) else None, _grad_on(),
                _deterministic(), torch.get_default_dtype(),
                None if self._reads is None else self._reads(layer))


def of(adapter: Any, paths: Paths, passes_messages: bool) -> Callable[..., tuple | None]:
    """What gives the signatures of a layer class; as `Signature` takes it."""
    if not hasattr(adapter, "FIELDS"):
        return none
    found = Signature(adapter, paths, passes_messages)
    return found if hasattr(adapter, "WATCHED") else found.whole


def none(layer: Any, args: tuple, kwargs: dict) -> None:
    """The signature of layers whose calls are never repeated."""


def _no_hooks(own: dict) -> tuple:
    return ()


def _of_linear(module: Any) -> tuple | None:
    """Of a linear map that a bound call makes: its own parameters, None if it is more than that."""
    return tuple(map(id, module._parameters.values())) if guards.plain_linear(module) else None


def _look(given: tuple) -> tuple[list, torch.device] | None:
    """How these arguments look, and the device of one of them; None where one is not understood."""
    found: list = []
    device, todo = None, list(given)
    for a in todo:  # which grows by what is in pairs and dictionaries
        kind = type(a)
        if kind is Tensor or kind is Parameter:
            device = a.device
            if not a.is_floating_point():
                found.append("index")
            elif a.is_meta or a.is_neg():
                return None
            else:
                found += a.shape, a.dtype, device, a.layout
        elif kind in _NUMBERS:
            found += kind, a
        elif kind is dict:
            found += kind, tuple(a)
            todo += a.values()
        elif kind is tuple:  # a pair of one tensor is another call than one of two equal ones
            found += kind, len(a), bool(a) and a[0] is a[-1]
            todo += a
        else:
            return None
    return None if device is None else (found, device)


def _parts(layer: Any, args: tuple) -> list | None:
    """How the layer, its modules and their parameters look; None where one of its modules is
    watched, or has functions of its own."""
    found: list = []
    modules = [layer]
    for module in modules:
        own = module.__dict__
        if module is not layer and (
                own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"]
                or own["_backward_pre_hooks"] or not own.keys().isdisjoint(_REPLACED)):
            return None
        cls, inside = type(module), own["_modules"]
        found += cls, cls.forward, own["training"]
        for tensors in (own["_parameters"], own["_buffers"]):
            for t in tensors.values():
                kind = type(t)
                if kind is Parameter or kind is Tensor:
                    found += kind, t.dtype, t.shape, t.device
                else:
                    found.append(kind)
        if inside:
            found.append([name for name, m in inside.items() if m is not None])
            modules += [m for m in inside.values() if m is not None]
    return found
