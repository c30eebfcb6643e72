"""Tracing a ``message``: it runs once on stand-ins, what it reads of the layer is noted, and looked
at again in each later call.

What it may do is limited to what stand-ins see: global names of torch's modules and functions, and
numbers; names of tensors' methods that a `Manner` lists; attributes of the layer.
"""
from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnnaccel.adapters import own
from gnnaccel.adapters.pyg.propagate import reading
from gnnaccel.adapters.pyg.propagate.expressed import Effect, noting_effects
from gnnaccel.adapters.pyg.propagate.message import SPECIAL, _named
from gnnaccel.adapters.pyg.propagate.naming import (attribute, catches, is_torchs, names_known,
                                                    special_as_arguments)
from gnnaccel.adapters.pyg.propagate.nodes_read import argument
from gnnaccel.adapters.pyg.propagate.row_count import ROWS
from gnnaccel.adapters.pyg.propagate.standins import Refuses, Unseen, rows
from gnnaccel.adapters.pyg.propagate.traced import Make
from gnnaccel.adapters.pyg.propagate.traced_modules import looks, module_of, parameter
from gnnaccel.dispatch.policy.names import IdentityMap

_TRACES = 4  # kept for each layer
_PLAIN = (int, float, bool, str, type(None))
_NEVER_NONE = ("index", "edge_index_i", "edge_index_j")
_FUNCTIONS = (types.FunctionType, types.MethodType, types.MethodDescriptorType, staticmethod,
              classmethod)
_NUMBERS = (int, float, bool)  # as arguments: another value is another trace


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
    where that stands; ``kept``: what it sets on the layer, by name; ``effects``: what it computes
    once in each call, in this order, whether or not anything is made of it: what draws numbers or
    keeps statistics."""

    message: Any
    ends: tuple[tuple[str, str], ...]
    edges: tuple[str, ...]
    read: dict[tuple[str, ...], Any]
    cells: tuple[tuple[types.CellType, Any], ...] = ()
    watched: tuple[tuple[Any, str, Any], ...] = ()
    kept: dict[str, Any] = {}
    effects: tuple[Effect, ...] = ()

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
        found, place = attribute(self._traced_layer, name), (*self._traced_path, name)
        if found is Unseen:
            raise Unseen
        if type(found) is property:
            return self._property(name, found)
        if hasattr(type(found), "__get__") and not isinstance(found, _FUNCTIONS):
            raise Unseen  # runs code of the user's
        value = getattr(self._traced_layer, name)
        self._traced_read[place] = value
        if type(value) in _PLAIN:
            return value
        if callable(value) and is_torchs(value, self._traced_manner.names):
            return value
        if type(value) in reading.TENSORS:
            self._traced_read[place] = Look(value, _look(value))
            return parameter(value)
        if isinstance(value, nn.Module):
            self._traced_read[place] = Look(value, looks(value))
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

    def _property(self, name: str, found: property) -> Any:
        """What a property of the user's gives: its function runs on stand-ins, as a method does."""
        cls = next(one for one in type(self._traced_layer).__mro__ if name in vars(one))
        self._traced_watched.append((vars(cls), name, found))
        return self._method(found.fget)()

    def _method(self, function: Any) -> Callable:
        manner = self._traced_manner
        ready = _runnable(function, self._traced_layer, manner) if manner.methods else None
        if ready is None or function.__code__.co_freevars:
            raise Unseen
        self._traced_watched.extend([(_Attributes(function), name, getattr(function, name))
                                     for name in reading.FUNCTION])
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

class Special(Refuses):
    """Stands for what message passing passes by itself."""

    def __init__(self, name: str):
        object.__setattr__(self, "name", name)

    def __getattribute__(self, name: str) -> Any:
        if name in ("name", "__class__"):
            return object.__getattribute__(self, name)
        raise Unseen


def _trace(layer: Any, kwargs: dict, manner: Manner) -> Trace:
    with noting_effects() as effects:
        found = _followed(layer, kwargs, manner)
    return found._replace(effects=tuple(effects))


def _followed(layer: Any, kwargs: dict, manner: Manner) -> Trace:
    function = type(layer).message
    proxy, ends, edges = Layer(layer, manner), [], []
    message = _runnable(function, layer, manner)
    if message is None:
        return Trace(None, (), (), {})
    given: dict[str, Any] = {}
    cells = tuple((cell, cell.cell_contents) for cell in function.__closure__ or ())
    found, kept = None, {}
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
        if manner.kept is not None:
            kept = {name: manner.kept(value) for name, value in proxy._traced_kept.items()}
    except (Unseen, AttributeError, TypeError, ValueError, LookupError, RuntimeError,
            AssertionError):
        found = None  # it is none
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
    return manner.rows(end, argument(key, end), meta, key), end


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
    if type(seen) is Look:
        return value is seen.value and seen.look == (
            looks(value) if isinstance(value, nn.Module) else _look(value))
    return _same(getattr(value, "__func__", value), seen)


class _Attributes:
    """Those of an object, as of a dictionary."""

    def __init__(self, of: Any):
        self.get = functools.partial(getattr, of)


class Look(NamedTuple):
    """A module or a tensor, and how it looked when it was read."""

    value: Any
    look: tuple


def _look(t: Tensor) -> tuple:
    """Of a tensor what its ``data`` may change."""
    return t.shape, t.dtype


def _same(value: Any, seen: Any) -> bool:
    return value is seen or (type(value) is type(seen) and type(value) in _PLAIN and value == seen)
