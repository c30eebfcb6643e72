"""A user's function, opened: its parts, whether it can do nothing but compute, and what a run on
stand-ins depends on.

A function may be a lambda, a named function or a method, a module, which stands for its method
``forward``, or a ``functools.partial`` of one. It may
read numbers and functions of its module, torch's functions, variables of functions around it, and
attributes of objects that it holds: of ``self`` of a method, or of a variable around it, which is
most often ``self`` as well. All values read are parts of a `Guard`, and compared again at each
call.
"""
from __future__ import annotations

import functools
import types
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gnnaccel.adapters import own
from gnnaccel.adapters.dgl.udf import counts
from gnnaccel.adapters.guards import TENSORS
from gnnaccel.adapters.tracing import expressing, manners, tracing
from gnnaccel.adapters.tracing.attention.traced import Param
from gnnaccel.adapters.tracing.code import named_attributes, naming
from gnnaccel.adapters.tracing.layer import guarded
from gnnaccel.adapters.tracing.layer.traced_layer import Layer
from gnnaccel.adapters.tracing.layer.traced_modules import (Looks, _runs_own_code, functions,
                                                            module_of)
from gnnaccel.adapters.tracing.message import _named, codes
from gnnaccel.adapters.tracing.nodes import node_values
from gnnaccel.adapters.tracing.rows import pointwise
from gnnaccel.adapters.tracing.rows.standins import Unseen

#: names of batches, tensors and torch that a function may use
NAMES = manners.NAMES | node_values.NAMES | counts.NAMES | {
    "src", "dst", "data", "mailbox", "softmax", "max", "min", "values", "pop", "canonical_etype",
    "_etype"}
_MANNER = tracing.Manner(NAMES, manners.prepared, pointwise.rows, expressing.found, True,
                         functions=counts.Functions)
_PLAIN = guarded.PLAIN
_ARGUMENTS = 0x04 | 0x08  # of code: *args and **kwargs
_GIVEN = "="  # before names of arguments, which no variable has
#: exceptions that end a run on stand-ins
ENDS = tracing.ENDS


class Opened(NamedTuple):
    """The parts of a function. ``bound``: the object of a method, else None; ``cells``: variables
    of functions around it, by name, and arguments that a ``functools.partial`` gives, by their
    place or name behind `_GIVEN`.
    """

    function: types.FunctionType
    bound: Any
    cells: dict[str, Any]

    @property
    def key(self) -> tuple:
        """Its code and plain variables: of functions that are alike otherwise, as of the kinds of
        edges, each has one of its own."""
        return id(self.function.__code__), *[one for one in self.cells.values()
                                             if type(one) in _PLAIN]

    @property
    def owner(self) -> Any:
        """The object with whose lifetime results for the function are kept: one that it reads from,
        or its code where there is none."""
        objects = (self.bound, *self.cells.values())
        return next((one for one in objects if _is_held(one)), self.function.__code__)


def opened(function: Any) -> Opened | None:
    """The parts of a user's function; None where it is of another kind."""
    bound: Any = None
    arguments: dict[str, Any] = {}
    if type(function) is functools.partial:  # one of another is made as one
        items = [*enumerate(function.args), *function.keywords.items()]
        arguments, function = {f"{_GIVEN}{key}": value for key, value in items}, function.func
    if isinstance(function, nn.Module):
        function = forward_of(function)
    if type(function) is types.MethodType:
        function, bound = function.__func__, function.__self__
        if not _is_held(bound):
            return None
    if type(function) is not types.FunctionType:
        return None
    names, closure = function.__code__.co_freevars, function.__closure__ or ()
    try:
        return Opened(function, bound, {**{name: cell.cell_contents for name, cell
                                           in zip(names, closure)}, **arguments})
    except ValueError:  # nothing is in it yet
        return None


def forward_of(module: nn.Module) -> types.MethodType | None:
    """The method that a call of the module runs; None where a call does more than that."""
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    return (None if compiled or not _runs_own_code(module)
            else types.MethodType(type(module).forward, module))


def _is_held(value: Any) -> bool:
    """Whether ``value`` is an object whose attributes a function may read."""
    return not (type(value) in _PLAIN or isinstance(value, (Tensor, types.ModuleType))
                or callable(value) and not isinstance(value, nn.Module)
                or not type(value).__weakrefoffset__)


class _Nobody:
    """An object without attributes."""


_NOBODY = _Nobody()  # stands for the owner of a module's functions


class Held(Layer):
    """Stand-in of an object that a function reads from; a module may be called as well
    (``_traced_called``)."""

    def __init__(self, held: Any):
        super().__init__(held, _MANNER)
        object.__setattr__(self, "_traced_called", [])

    def __call__(self, x: Any) -> Any:
        if not isinstance(self._traced_layer, nn.Module):
            raise Unseen
        self._traced_called.append(_as_called(self._traced_layer))
        return module_of(self._traced_layer, self._traced_unknown)(x)

    def _traced_unknown(self, module: nn.Module, *names: str) -> Any:
        raise Unseen


def _as_called(module: nn.Module) -> tuple:
    """The state that the result of a call of the module depends on."""
    return functions(), Looks(module)


class _Seen(NamedTuple):
    """The values read of an object. ``called``: its state when it was called, if it was."""

    held: weakref.ref
    read: guarded.Guards
    called: tuple | None

    def holds(self) -> bool:
        held = self.held()
        return (held is not None and self.read.hold(held)
                and (self.called is None or functions() == self.called[0]
                     and self.called[1].holds(held)))


class Guard(NamedTuple):
    """All that a run of a function depended on, but for the tensors of the call. ``cells``:
    descriptions of the variables around it (`_look`); ``named``: the values that it names, with
    their places."""

    code: types.CodeType
    namespace: dict[str, Any]
    bound: weakref.ref | None
    cells: dict[str, Any]
    named: tuple[tuple[dict, str, Any], ...]
    seen: tuple[_Seen, ...]

    def holds(self, function: Opened) -> bool:
        """Whether this function, with what it would read now, is the one that ran."""
        now, bound, cells = function
        if now.__code__ is not self.code or now.__globals__ is not self.namespace:
            return False
        if bound is not (None if self.bound is None else self.bound()):
            return False
        if cells.keys() != self.cells.keys():
            return False
        for name, value in cells.items():
            if not _looks_like(value, self.cells[name]):
                return False
        for place, name, was in self.named:
            if not guarded.same(place.get(name, Unseen), was):
                return False
        return all([one.holds() for one in self.seen])


def _look(value: Any) -> Any:
    """The description of a variable: a tensor's form, a weak reference to an object, the type of a
    value that nobody may read."""
    if type(value) in TENSORS:
        return value.shape, value.dtype, value.device
    if type(value) in _PLAIN:
        return value
    return weakref.ref(value) if type(value).__weakrefoffset__ else type(value)


def _looks_like(value: Any, seen: Any) -> bool:
    if type(seen) is weakref.ref:
        return value is seen()
    if type(value) in TENSORS:
        return type(seen) is tuple and seen == _look(value)
    return type(value) is seen or guarded.same(value, seen)


class Run:
    """One run of a function on stand-ins. ``prefix``: of the names of its variables among a call's
    arguments."""

    def __init__(self, function: Opened, prefix: str):
        self.function, self.prefix, self._held = function, prefix, []  # type: ignore[var-annotated]

    def result(self, batch: Any) -> Any:
        """The result of the function for a stand-in ``batch``. Raises one of `ENDS` where it is not
        followed."""
        function, bound, cells = self.function
        namespace = naming.globals_in_place(function, NAMES, self._instead)
        if namespace is None or not _may_run(self.function):
            raise Unseen
        closure = tuple(types.CellType(self._stand_in(name, cells[name]))
                        for name in function.__code__.co_freevars)
        ready = types.FunctionType(function.__code__, {**function.__globals__, **namespace},
                                   function.__name__, None, closure)
        first = [] if bound is None else [self._object(bound)]
        arguments = {name.removeprefix(_GIVEN): self._stand_in(name, value)
                     for name, value in cells.items() if name.startswith(_GIVEN)}
        places = [arguments.pop(str(place)) for place in range(len(arguments))
                  if str(place) in arguments]
        return ready(*first, *places, batch, **arguments)

    def _instead(self, name: str, value: Any) -> Any:
        """The stand-in of a global value; None for one that is not followed, or stands for
        itself."""
        function, *_ = self.function
        nobody = self._object(_NOBODY)
        stand_in = nobody._traced_functions.instead(value)
        return (nobody._traced_global(function.__globals__, name, value) if stand_in is None
                else stand_in)

    def _object(self, value: Any) -> Held:
        for one in self._held:
            if one._traced_layer is value:
                return one
        self._held.append(Held(value))
        return self._held[-1]

    def _stand_in(self, name: str, value: Any) -> Any:
        if type(value) in _PLAIN or any(value is one for one in naming.MODULES) or (
            callable(value) and naming.is_torchs(value, NAMES)):
            return value
        if type(value) in TENSORS:
            key = f"{self.prefix}.{name}"

            def make(given: dict) -> Tensor:
                return given[key]

            return Param(make, torch.empty_like(value, device="meta"), (make,))
        # a function that a call defines itself is another one in the next
        if type(value) is types.FunctionType and "<locals>" not in value.__qualname__:
            return self._object(_NOBODY)._traced_shown(value)
        if not _is_held(value):
            raise Unseen
        return self._object(value)

    def guard(self) -> Guard:
        """The guard of all that the run depended on, whether or not it came to an end."""
        function, bound, cells = self.function
        objects = tuple(_Seen(weakref.ref(one._traced_layer),
                              guarded.Guards(one._traced_read, (), tuple(one._traced_watched)),
                              one._traced_called[-1] if one._traced_called else None)
                        for one in self._held
                        if one._traced_read or one._traced_watched or one._traced_called)
        return Guard(function.__code__, function.__globals__,
                     None if bound is None else weakref.ref(bound),
                     {name: _look(value) for name, value in cells.items()},
                     tuple(_named_places(function)), objects)


def _named_places(function: types.FunctionType) -> list[tuple[dict, str, Any]]:
    return [(place, name, place[name]) for _, name in _named(function.__code__)
            for place in (function.__globals__, *map(vars, naming.PLACES)) if name in place]


def _may_run(opened: Opened) -> bool:
    """Whether the function takes one batch and can do nothing but compute."""
    function, bound, cells = opened
    code = function.__code__
    expected = 1 + (bound is not None) + sum(name.startswith(_GIVEN) for name in cells)
    if (code.co_argcount + code.co_kwonlyargcount != expected or code.co_flags & _ARGUMENTS
        or naming.catches(code)):
        return False
    objects = [one for one in (bound, *cells.values()) if _is_held(one)]
    names = NAMES | {name for each in codes(code) for name in each.co_names if any(
        naming.attribute(one, name) is not Unseen for one in objects)}
    return named_attributes.names_known(code, None, names) and all(
        type(value) is not types.FunctionType or own.home(value) == "torch"
        for place, _, value in _named_places(function) if place is not function.__globals__)
