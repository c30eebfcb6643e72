"""Tracing a ``message``: it runs once on stand-ins, what it reads of the layer is noted, and looked
at again in each later call.

What it may do is limited to what stand-ins see: global names of torch's modules and functions, and
numbers; names of tensors' methods that a `Manner` lists; attributes of the layer.
"""
from __future__ import annotations

import builtins
import dis
import functools
import inspect
import math
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnnaccel.adapters import own
from gnnaccel.adapters.pyg.propagate import reading
from gnnaccel.adapters.pyg.propagate.message import SPECIAL, _named, special_read
from gnnaccel.adapters.pyg.propagate.row_count import ROWS
from gnnaccel.adapters.pyg.propagate.standins import Refuses, Unseen, rows
from gnnaccel.adapters.pyg.propagate.traced import Make
from gnnaccel.adapters.pyg.propagate.traced_modules import looks, module_of, parameter
from gnnaccel.dispatch.policy.names import IdentityMap

MODULES = (torch, torch.nn, torch.nn.functional, math)
BUILTINS = (float, int, len, range, enumerate, zip, reversed, tuple, list)
_TRACES = 4  # kept for each layer
_PLAIN = (int, float, bool, str, type(None))
_CATCHES = frozenset(("SETUP_FINALLY", "SETUP_WITH", "PUSH_EXC_INFO"))
_COMPARES = frozenset(("IS_OP", "COMPARE_OP", "CONTAINS_OP"))
_NEVER_NONE = ("index", "edge_index_i", "edge_index_j")
_NUMBERS = (int, float, bool)  # as arguments: another value is another trace
NOT_PLAIN_CODE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Manner(NamedTuple):
    """How messages of one kind are traced.

    ``names``: what a message may name of modules, tensors and stand-ins; anything else may have
    effects. ``prepared(function)``: the function to run on stand-ins, None where it may do more
    than compute. ``rows(end, make, meta, name)``: what stands for the argument ``name`` at the
    ``end`` "i", "j" or "e". ``found(out, layer)``: the message, None where it is not of this kind.
    ``methods``: whether methods of the layer may be called. ``then(out, layer, kwargs, ends,
    edges)``: what goes on with what the message gave; it adds to the lists of a `Trace`.
    ``kept(value)``: how a `Trace` keeps what the message sets on the layer, if it may set any.
    """

    names: frozenset[str]
    prepared: Callable[[types.FunctionType], types.FunctionType | None]
    rows: Callable[[str, Make, Tensor, str], Any]
    found: Callable[[Any, Any], Any]
    methods: bool = False
    then: Callable[[Any, Layer, dict, list, list], Any] | None = None
    kept: Callable[[Any], Any] | None = None


class Trace(NamedTuple):
    """A message, understood. ``ends``: the arguments that are features of nodes, with their end of
    the edge, in the order of the message; ``edges``: those with a row for each edge; ``read``: what
    was read of the layer and its modules, by the names that lead there; ``cells``: variables of
    functions around it, with what they held; ``watched``: what its methods name, with the places
    where that stands; ``kept``: what it sets on the layer, by name."""

    message: Any
    ends: tuple[tuple[str, str], ...]
    edges: tuple[str, ...]
    read: dict[tuple[str, ...], Any]
    cells: tuple[tuple[types.CellType, Any], ...] = ()
    watched: tuple[tuple[Any, str, Any], ...] = ()
    kept: dict[str, Any] = {}

    def holds(self, layer: Any) -> bool:
        """Whether all that was read is still so."""
        for names, seen in self.read.items():
            if not _as_read(layer, names, seen):
                return False
        for cell, seen in self.cells:
            if not _same(cell.cell_contents, seen):
                return False
        for place, name, seen in self.watched:
            if not _same(place.get(name, Unseen), seen):
                return False
        return True


class Layer:
    """Stands for the layer: gives what it holds, and notes that (``_traced_read``, by where it is:
    the names that lead there). Its methods run on stand-ins as the message does;
    ``_traced_watched``: what they name, with the places where it stands; ``_traced_kept``: what is
    set on it. ``_traced_path``: the names that lead to it, of the layer itself none. No name is one
    that a layer might have."""

    def __init__(self, layer: Any, manner: Manner):
        object.__setattr__(self, "_traced_layer", layer)
        object.__setattr__(self, "_traced_manner", manner)
        object.__setattr__(self, "_traced_path", ())
        object.__setattr__(self, "_traced_read", {})
        object.__setattr__(self, "_traced_watched", [])
        object.__setattr__(self, "_traced_kept", {})

    def __getattr__(self, name: str) -> Any:
        if name in self._traced_kept:
            return self._traced_kept[name]
        value, place = getattr(self._traced_layer, name), (*self._traced_path, name)
        self._traced_read[place] = value
        if type(value) in _PLAIN:
            return value
        if callable(value) and is_torchs(value, self._traced_manner.names):
            return value
        if type(value) in reading.TENSORS:
            return parameter(value)
        if isinstance(value, nn.Module):
            self._traced_read[place] = value, looks(value)
            return module_of(value, lambda module, *inside: self._module(module, (*place, *inside)))
        if type(value) is types.MethodType and value.__self__ is self._traced_layer:
            self._traced_read[place] = value.__func__
            return self._method(value.__func__)
        raise Unseen

    def _module(self, module: nn.Module, path: tuple[str, ...]) -> Callable:
        """A module of the user's own: its ``forward`` runs on stand-ins."""
        inside = _Inside(module, self._traced_manner)
        for name, value in (("_path", path), ("_read", self._traced_read),
                            ("_watched", self._traced_watched)):
            object.__setattr__(inside, "_traced" + name, value)
        return inside._method(type(module).forward)

    def _method(self, function: Any) -> Callable:
        manner = self._traced_manner
        ready = _runnable(function, self._traced_layer, manner) if manner.methods else None
        if ready is None or function.__code__.co_freevars:
            raise Unseen
        for _, named in _named(function.__code__):
            for place in (function.__globals__, *map(vars, (torch, F, Tensor))):
                if named in place:
                    self._traced_watched.append((place, named, place[named]))
                    if (place is not function.__globals__
                        and type(place[named]) is types.FunctionType
                        and own.home(place[named]) not in ("torch", "torch_geometric")):
                        raise Unseen

        def method(*args: Any, **kwargs: Any) -> Any:
            # what may be None it might ask for under another name
            if any(type(one) is Special and one.name not in _NEVER_NONE
                   for one in (*args, *kwargs.values())):
                raise Unseen
            return ready(self, *args, **kwargs)

        return method

    def __setattr__(self, name: str, value: Any) -> None:
        layer = self._traced_layer
        if (self._traced_manner.kept is None or name in _host_attributes()
            or hasattr(type(layer), name) or type(layer).__setattr__ is not nn.Module.__setattr__
            or any(name in layer.__dict__[kind]
                   for kind in ("_parameters", "_buffers", "_modules"))):
            raise Unseen
        self._traced_kept[name] = value


class _Inside(Layer):
    """Stands for a module of the layer, or of one of its modules."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise Unseen


@functools.cache
def _host_attributes() -> frozenset[str]:
    """What any layer has, which a message had better not set. No layer of the base class is made:
    PyG would write a ``propagate`` for it, which all others inherit."""
    return frozenset(vars(nn.Module())).union(
        name for kind, name in _named(reading.base().__init__.__code__) if kind == "STORE_ATTR")


# --- tracing --------------------------------------------------------------------------------------

def globals_in_place(function: types.FunctionType, names: frozenset[str],
                     instead: Callable[[Any], Any]) -> dict[str, Any] | None:
    """What to put in place of global names of ``function``, by ``instead(value)``, None for those
    to keep; None where the function may do more than compute."""
    code, known = function.__code__, function.__globals__
    if code.co_cellvars or code.co_flags & NOT_PLAIN_CODE:
        return None
    if any(isinstance(c, types.CodeType) for c in code.co_consts):
        return None
    found = {}
    for kind, name in _named(code):
        if kind == "LOAD_GLOBAL":
            value = known.get(name, getattr(builtins, name, None))
            other = instead(value)
            if other is not None:
                found[name] = other
            elif not (any(value is one for one in (*MODULES, *BUILTINS))
                      or is_torchs(value, names)):
                return None
        elif kind not in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"):
            return None
    return found


def with_globals(function: types.FunctionType, more: dict[str, Any]) -> types.FunctionType:
    """``function`` with other values of some global names."""
    made = types.FunctionType(function.__code__, {**function.__globals__, **more},
                              function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def is_torchs(value: Any, names: frozenset[str]) -> bool:
    """Whether it is one of the functions ``names`` of torch or of `math`."""
    module = getattr(value, "__module__", None) or "torch"
    return getattr(value, "__name__", "") in names and module.partition(".")[0] in ("torch", "math")


class Special(Refuses):
    """Stands for what message passing passes by itself."""

    def __init__(self, name: str):
        object.__setattr__(self, "name", name)

    def __getattribute__(self, name: str) -> Any:
        if name in ("name", "__class__"):
            return object.__getattribute__(self, name)
        raise Unseen


def _trace(layer: Any, kwargs: dict, manner: Manner) -> Trace:
    function = type(layer).message
    proxy, ends, edges = Layer(layer, manner), [], []
    message = _runnable(function, layer, manner)
    if message is None:
        return Trace(None, (), (), {})
    given: dict[str, Any] = {}
    cells = tuple((cell, cell.cell_contents) for cell in function.__closure__ or ())
    found = None
    try:
        for parameter in list(inspect.signature(function).parameters.values())[1:]:
            one, end = stand_in(parameter, kwargs, manner)
            given[parameter.name] = one
            if end == "e":
                edges.append(parameter.name)
            elif end:
                ends.append((parameter.name[:-2], end))
        out = message(proxy, **given)
        if manner.then is not None:
            out = manner.then(out, proxy, kwargs, ends, edges)
        found = manner.found(out, layer)
        kept = {} if manner.kept is None else {
            name: manner.kept(value) for name, value in proxy._traced_kept.items()}
    except (Unseen, AttributeError, TypeError, ValueError, LookupError, RuntimeError,
            AssertionError):
        found, kept = None, {}  # it is none
    return Trace(found, tuple(ends), tuple(edges), proxy._traced_read, cells,
                 tuple(proxy._traced_watched), kept)


def _runnable(function: Any, layer: Any, manner: Manner) -> types.FunctionType | None:
    """What to run of a function on stand-ins; None where it may do more than compute."""
    if (type(function) is not types.FunctionType or catches(function.__code__)
        or not special_as_arguments(function.__code__)):
        return None
    if not names_known(function.__code__, layer, manner.names):
        return None
    return manner.prepared(function)


def catches(code: types.CodeType) -> bool:
    """Whether the function may catch what a stand-in raises, and go another way."""
    return any(step.opname in _CATCHES for step in dis.get_instructions(code))


def special_as_arguments(code: types.CodeType) -> bool:
    """Whether the function does no more with what message passing passes by itself than hand it to
    functions. Whether ``ptr is None`` a stand-in cannot answer."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    cells = {*code.co_cellvars, *code.co_freevars}  # their values by LOAD_DEREF alone
    for at, step in enumerate(steps[:-1]):
        if special_read(step) and (step.opname == "LOAD_DEREF" or step.argval not in cells):
            if not steps[at + 1].opname.startswith(("LOAD_", "CALL", "PRECALL", "KW_NAMES")):
                return False
            if any(one.opname in _COMPARES for one in steps[at + 1:at + 3]):
                return False
    return True


def names_known(code: types.CodeType, layer: Any, names: frozenset[str]) -> bool:
    """Whether all attributes that are named are known, and methods of tensors torch's own. Those of
    the layer need not be there: a branch that is not taken may name others. Only the layer's may be
    set."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    if not all(_loads_first(before, code) for before, step in zip([steps[0], *steps], steps)
               if step.opname == "STORE_ATTR"):
        return False
    return all((step.argval in names and _method_is_torchs(step.argval))
               or hasattr(layer, step.argval) or _loads_first(before, code)
               for before, step in zip([steps[0], *steps], steps)
               if step.opname in ("LOAD_ATTR", "LOAD_METHOD"))


def _loads_first(step: dis.Instruction, code: types.CodeType) -> bool:
    """Whether the instruction gives the first argument of a method, which is the layer."""
    names = step.argval if type(step.argval) is tuple else (step.argval,)  # some load two
    return (step.opname.startswith("LOAD_FAST") and code.co_argcount > 0
            and names[-1] == code.co_varnames[0])


def _method_is_torchs(name: str) -> bool:
    """Whether nobody has put a function of their own in the place of a tensor's method."""
    found = vars(Tensor).get(name)
    return type(found) is not types.FunctionType or own.home(found) == "torch"


def stand_in(parameter: inspect.Parameter, kwargs: dict, manner: Manner) -> tuple[Any, str]:
    """What stands for an argument, and the end of the edge that it belongs to, "" for none."""
    name = parameter.name
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise Unseen
    if name in SPECIAL:
        if name == "adj_t":  # the host does not give it
            raise Unseen
        return Special(name), ""
    end = name[-1] if name[-2:] in ("_i", "_j") and name[:-2] in kwargs else "e"
    key = name if end == "e" else name[:-2]
    if key not in kwargs:
        if parameter.default is None:
            return None, ""
        raise Unseen
    value = rows(kwargs, key, end) if end != "e" else kwargs[key]
    if value is None or (end == "e" and type(value) in _NUMBERS):
        return value, ""
    if type(value) not in reading.TENSORS or value.dim() < 1:
        raise Unseen
    if not value.is_floating_point() and not (manner.kept and value.dtype == torch.int64):
        raise Unseen
    meta = torch.empty(ROWS, *value.shape[1:], dtype=value.dtype, device="meta")
    if end == "e":
        return manner.rows("e", lambda given: given[key], meta, key), "e"
    return manner.rows(end, lambda given: rows(given, key, end), meta, key), end


_traces: IdentityMap[list[tuple]] = IdentityMap()  # by layer


def trace(layer: Any, known: reading.Known, kwargs: dict, manner: Manner) -> Trace:
    """What the layer's message computes of such arguments, looked at again where anything that it
    read has changed. ``known``: its class."""
    key = (id(manner), known,
           tuple([(name, _form(value)) for name, value in kwargs.items() if name != "size"]))
    kept = _traces.get(layer)
    if kept is None:
        kept = []
        _traces.set(layer, kept)
    for seen, found in kept:
        if seen == key and found.holds(layer):
            return found
    found = _trace(layer, kwargs, manner)
    kept[:] = [(key, found), *(one for one in kept if one[0] != key)][:_TRACES]
    return found


def _form(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_form, value))
    if type(value) in _NUMBERS:
        return type(value), value
    return (value.shape[1:], value.dtype) if isinstance(value, Tensor) else type(value)


def _as_read(layer: Any, names: tuple[str, ...], seen: Any) -> bool:
    value = layer
    for name in names:
        value = getattr(value, name, Unseen)
    if type(seen) is tuple and isinstance(seen[0], nn.Module):
        return value is seen[0] and looks(value) == seen[1]
    return _same(getattr(value, "__func__", value), seen)


def _same(value: Any, seen: Any) -> bool:
    return value is seen or (type(value) is type(seen) and type(value) in _PLAIN and value == seen)
