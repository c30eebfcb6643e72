"""Repeated calls of DGL's layers: what they depend on, and where their operands are found.

The operands of a call are a NamedTuple of the adapter's, which holds the call's arguments, weights
of the layer, objects of the graph, and numbers. So the place of each is found once, and a repeated
call puts its own in the same places. A value made of an argument, such as a slice of it, stands
nowhere else: such a call is stated anew each time.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters.contract import Contract
from gnnaccel.adapters.dgl import graphs, guards
from gnnaccel.adapters.guards import replaceable
from gnnaccel.adapters.own import Paths, forward_is_own
from gnnaccel.adapters.signature import Signature, none, of_modules
from gnnaccel.dispatch.memory.layer_memory import UNREPEATABLE
from gnnaccel.dispatch.memory.native_cache import GRAPHS

#: attributes of the modules inside that Programs depend on: of dropouts and activations that they
#: take in, and of a TypedLinear
_OPTIONS = ("p", "negative_slope", "regularizer", "num_types", "num_bases", "in_size", "out_size",
            "submat_in", "submat_out", "get_weight")
_CONSTANTS = (type(None), bool, int, float, str, torch.device, torch.dtype)


def signature(contract: Contract, paths: Paths) -> Callable[..., tuple | None]:
    """The function that gives the signatures of a layer class; `none` for layers without
    ``FIELDS``."""
    return none if contract.FIELDS is None else _Signature(contract, paths).whole


class _Signature(Signature):
    def __init__(self, contract: Contract, paths: Paths):
        super().__init__(contract, paths)
        names = (*(contract.FIELDS or ()), "training")
        # an activation may be a module, which is not among the attributes
        self._values = lambda own: tuple(map(own.get, names))
        self._absorbed = tuple(dict.fromkeys(contract.ABSORBED.values()))
        self._parts = self._of_modules

    def _of_modules(self, layer: Any, args: tuple) -> list | None:
        """The state of all modules and weights of the layer; None where message passing itself was
        replaced, or the forward of a module whose work goes into the Program."""
        if guards.graph_reason() is not None or not all(map(forward_is_own, self._absorbed)):
            return None
        return of_modules(layer, args, _OPTIONS)


class _Kept(NamedTuple):
    """Places of operands. ``form``: a `_Form`; ``names``: of the layer's own weights, any of which
    may be among them; ``held``: objects of the graph; ``constants``: the rest."""

    form: _Form
    names: tuple[str, ...]
    held: list[weakref.ref]
    constants: list


class _Form(NamedTuple):
    """The form of a tuple of operands. ``make``: of its type; ``parts``: for each, its place among
    the `_values` of the call, or another form."""

    make: Callable[..., Any]
    parts: list


def keep(layer: Any, args: tuple, kwargs: dict, spec: Any, inputs: Any) -> Any:
    """`router.Adapter.keep` of DGL's layers."""
    if replaceable(layer):
        return UNREPEATABLE
    arguments = (*args, *kwargs.values())
    own = layer.__dict__["_parameters"]
    names = tuple(name for name, t in own.items() if t is not None)
    held = [part for a in arguments if type(a) in GRAPHS for part in graphs.parts(a)]
    values = _values(arguments, own, names, held, [])
    places: dict[int, int] = {}
    for at, value in enumerate(values):
        first = places.setdefault(id(value), at)
        # of a tensor in two places nobody can tell which of them an operand came from; that a pair
        # is one tensor twice is known to signatures
        if first != at and isinstance(value, Tensor) and not _a_pair(arguments, value):
            return UNREPEATABLE
    constants: list[Any] = []
    form = _form(inputs, places, len(values), constants)
    return (UNREPEATABLE if type(form) is not _Form
            else _Kept(form, names, list(map(weakref.ref, held)), constants))


def again(layer: Any, args: tuple, kwargs: dict, kept: _Kept) -> Any:
    """`router.Adapter.again` of DGL's layers."""
    return _made(kept.form, _values((*args, *kwargs.values()) if kwargs else args,
                                    layer.__dict__["_parameters"], kept.names,
                                    [ref() for ref in kept.held], kept.constants))


def _values(arguments: tuple, parameters: dict, names: tuple[str, ...], held: list,
            constants: list) -> list:
    """The values that the operands of a call are taken from: its arguments, pairs among them
    opened, the layer's own weights, objects of the graph, and constants."""
    values: list[Any] = []
    for a in arguments:
        values.append(a)
        if type(a) is tuple:
            values += a
    values += map(parameters.get, names)
    return values + held + constants


def _a_pair(arguments: tuple, tensor: Tensor) -> bool:
    """Whether a tensor is both ends of a pair, and no other argument."""
    pairs = [a for a in arguments if type(a) is tuple and any(end is tensor for end in a)]
    return len(pairs) == 1 and len(pairs[0]) == 2 and not any(a is tensor for a in arguments)


def _form(value: Any, places: dict[int, int], first: int, constants: list) -> _Form | int | None:
    """The form of an operand, or its place; None where it is not among the values. ``first``: the
    place of the first of ``constants``, which grows."""
    if isinstance(value, _CONSTANTS) or value == ():
        constants.append(value)
        return first + len(constants) - 1
    at = places.get(id(value))
    if at is not None:
        return at
    if not isinstance(value, tuple):
        return None
    parts = [_form(part, places, first, constants) for part in value]
    return (None if any(part is None for part in parts)
            else _Form(getattr(type(value), "_make", tuple), parts))


def _made(form: _Form, values: list) -> Any:
    return form.make([values[part] if type(part) is int else _made(part, values)
                      for part in form.parts])
