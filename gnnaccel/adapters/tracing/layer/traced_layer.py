"""Stand-in for a layer while its ``message`` or its ``aggregate`` is traced."""
from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.jit import ScriptFunction

from gnnaccel.adapters import own
from gnnaccel.adapters.guards import TENSORS
from gnnaccel.adapters.tracing.code import contexts, members, named_attributes, naming, supers
from gnnaccel.adapters.tracing.layer import guarded
from gnnaccel.adapters.tracing.layer.guarded import PLAIN
from gnnaccel.adapters.tracing.layer.traced_modules import module_of, parameter
from gnnaccel.adapters.tracing.layer.traced_records import Record
from gnnaccel.adapters.tracing.message import SPECIAL, _named, codes
from gnnaccel.adapters.tracing.rows import untold
from gnnaccel.adapters.tracing.rows.row_count import ROWS
from gnnaccel.adapters.tracing.rows.specials import COUNTS, IDS, NEVER_NONE, Special
from gnnaccel.adapters.tracing.rows.standins import NUMBERS, Unseen

if TYPE_CHECKING:
    from gnnaccel.adapters.tracing.tracing import Manner


_FUNCTIONS = (types.FunctionType, types.MethodType, types.MethodDescriptorType, staticmethod,
              classmethod)
#: functions whose code runs on stand-ins
_FOLLOWED = (types.FunctionType, ScriptFunction)
_MAY_CHANGE = (list, dict, set)  # as defaults: what they have may be other things in each call


class Layer:
    """Stand-in for the layer: gives what it holds, and notes that (``_traced_read``, by the names
    that lead there). Its methods, and functions that it holds or that are global, run on stand-ins
    as the message does; ``_traced_watched``: what they name, with the places where it stands;
    ``_traced_kept``: what is set on it. ``_traced_path``: the names that lead to it, of the layer
    itself none. ``_traced_edges``: the number of edges, to which tensors with as many rows belong,
    None where no tensor does; ``_traced_counts``: numbers of nodes that receive, as the message
    says; ``_traced_special``: what message passing passes by itself and is not known to be None;
    ``_traced_functions``: what stands for functions of PyG and others; ``_traced_stand_ins``: what
    stands for modules, functions and lists, once for each. No name is one that a layer might
    have."""

    def __init__(self, layer: Any, manner: Manner, edges: int | None = None):
        for name, value in (("_layer", layer), ("_manner", manner), ("_edges", edges),
                            ("_path", ()), ("_read", {}), ("_watched", []), ("_kept", {}),
                            ("_counts", []), ("_special", set(SPECIAL)), ("_stand_ins", {})):
            object.__setattr__(self, "_traced" + name, value)
        functions = None if manner.functions is None else manner.functions(self)
        object.__setattr__(self, "_traced_functions", functions)

    def __getattr__(self, name: str) -> Any:
        if name in self._traced_kept:
            return self._traced_kept[name]
        attribute, place = naming.attribute(self._traced_layer, name), (*self._traced_path, name)
        if attribute is Unseen:
            raise Unseen
        if type(attribute) is property:
            return self._traced_property(name, attribute)
        if hasattr(type(attribute), "__get__") and not isinstance(attribute, _FUNCTIONS):
            raise Unseen  # runs code of the user's
        value = getattr(self._traced_layer, name)
        if type(value) in TENSORS:
            look = guarded.edge_rows(value, self._traced_edges)
            self._traced_read[place] = guarded.seen(value) if look is None else look
            return parameter(value) if look is None else self._traced_edge_rows(value, place)
        self._traced_read[place] = guarded.seen(value)
        if type(value) is types.MethodType and value.__self__ is self._traced_layer:
            self._traced_read[place] = value.__func__
            return self._traced_method(value.__func__)
        return self._traced_shown(value, place)

    def _traced_shown(self, value: Any, place: tuple | None = None) -> Any:
        """Stand-in for a value; ``place``: where it is on the layer, if it is there."""
        if type(value) in PLAIN or members.is_member(value):
            return value
        stand_ins = self._traced_stand_ins
        if id(value) not in stand_ins:  # what has several names is the same under each
            stand_ins[id(value)] = value, self._traced_stand_in(value, place)
        return stand_ins[id(value)][1]

    def _traced_stand_in(self, value: Any, place: tuple | None) -> Any:
        if callable(value) and naming.is_torchs(value, self._traced_manner.names):
            return value
        if type(value) in TENSORS:
            return parameter(value)
        if isinstance(value, nn.Module):
            return module_of(value, functools.partial(self._traced_module_at, place))
        if type(value) in (list, tuple):
            items = [self._traced_lazily(one) for one in value]
            return Listed(items) if type(value) is list else tuple(items)
        if type(value) is dict:
            return untold.Mapping({key: self._traced_lazily(one) for key, one in value.items()})
        if type(value) is functools.partial:
            arguments = [self._traced_shown(one) for one in (*value.args, *value.keywords.values())]
            keywords = dict(zip(value.keywords, arguments[len(value.args):]))
            function = self._traced_shown(value.func)
            return functools.partial(function, *arguments[:len(value.args)], **keywords)
        if type(value) in _FOLLOWED:
            return self._traced_function(value)
        if place is not None and naming.is_record(value):
            return Record(value, functools.partial(self._traced_note, place), self._traced_shown)
        raise Unseen

    def _traced_note(self, place: tuple, name: str, value: Any) -> tuple:
        """The place of what an object that the layer holds has under a name."""
        there = (*place, name)
        self._traced_read[there] = guarded.seen(value)
        return there

    def _traced_of_global(self, value: Any, place: Any = None) -> Any:
        """Stand-in for an object of global values, or for what such an object has."""
        if not naming.is_record(value):
            return self._traced_shown(value)
        attributes = guarded.Attributes(value)

        def note(name: str, found: Any) -> None:
            self._traced_watched.append((attributes, name, guarded.seen(found)))

        return Record(value, note, self._traced_of_global)

    def _traced_lazily(self, value: Any) -> Any:
        """Stand-in for a value in a list: one that refuses to be used where the value is not
        followed."""
        try:
            return self._traced_shown(value)
        except Unseen:
            return Special("")

    def _traced_module_at(self, place: tuple | None, module: nn.Module, *inside: str) -> Inside:
        """What stands for a module of the layer where its code runs."""
        if place is None:
            raise Unseen
        return self._traced_inside(Inside, module, (*place, *inside))

    def _traced_inside(self, cls: type[Inside], module: nn.Module, path: tuple[str, ...]) -> Inside:
        """What stands for a module within another."""
        inside = object.__new__(cls)
        for name, value in (("_layer", module), ("_path", path), ("_kept", {}),
                            *((name, getattr(self, "_traced" + name))
                              for name in ("_manner", "_edges", "_read", "_watched", "_counts",
                                           "_special", "_stand_ins", "_functions"))):
            object.__setattr__(inside, "_traced" + name, value)
        return inside

    def _traced_edge_rows(self, value: Tensor, path: tuple[str, ...]) -> Any:
        """Stand-in for a tensor with a row for each edge, which is read anew in each call."""

        def make(given: Any) -> Tensor:
            return functools.reduce(getattr, path, given.layer)

        meta = torch.empty(ROWS, *value.shape[1:], dtype=value.dtype, device="meta")
        return self._traced_manner.rows("e", make, meta, ".".join(path))

    def _traced_property(self, name: str, found: property) -> Any:
        """Value of a property of the user's: its function runs on stand-ins, as a method does."""
        cls = next(one for one in type(self._traced_layer).__mro__ if name in vars(one))
        self._traced_watched.append((vars(cls), name, found))
        return self._traced_method(found.fget)()

    # --- functions --------------------------------------------------------------------------------

    def _traced_method(self, function: Any) -> Callable:
        function, context = contexts.inside(own.original(function))
        ready = self._traced_ready(function, True)

        def method(*args: Any, **kwargs: Any) -> Any:
            _check_told(function, (self, *args), kwargs, self._traced_special)
            with context():
                return ready(self, *args, **kwargs)

        return untold.Function(method)

    def _traced_function(self, function: types.FunctionType) -> Callable:
        """A function of the user's own, looked at when it is called."""
        function, context = contexts.inside(_uncompiled(function))
        if own.home(function) in ("torch", "torch_geometric", "torch_scatter"):
            raise Unseen

        def called(*args: Any, **kwargs: Any) -> Any:
            ready = self._traced_ready(function, False)
            _check_told(function, args, kwargs, self._traced_special)
            with context():
                return ready(*args, **kwargs)

        return untold.Function(called)

    def _traced_ready(self, function: Any, method: bool) -> Callable:
        """The function to run on stand-ins; what it names is watched."""
        manner = self._traced_manner
        ready = (runnable(function, self if method else None, manner, self, True) if manner.methods
                 else None)
        if ready is None or not {supers.CELL}.issuperset(function.__code__.co_freevars) or any(
            type(one) in _MAY_CHANGE for one in (*(function.__defaults__ or ()),
                                                 *(function.__kwdefaults__ or {}).values())):
            raise Unseen
        attributes = guarded.Attributes(function)
        parts = [(name, attributes.get(name)) for name in own.FUNCTION]
        self._traced_watched.extend([  # of these a dictionary may be written to
            (attributes, name, guarded.seen(part) if type(part) is dict else part)
            for name, part in parts])
        for _, named in (one for code in codes(function.__code__) for one in _named(code)):
            for place in (function.__globals__, *map(vars, naming.PLACES)):
                if named in place:
                    self._traced_watched.append((place, named, guarded.seen(place[named])))
                    if (place is not function.__globals__
                        and type(place[named]) is types.FunctionType
                        and own.home(place[named]) not in ("torch", "torch_geometric")):
                        raise Unseen
        return ready

    def _traced_global(self, place: dict, name: str, value: Any) -> Any:
        """Stand-in for a global value of a function that is traced; None for one that is not
        followed, or stands for itself."""
        if naming.is_users_module(value) and self._traced_functions is not None:
            return _Module(value, self)
        if members.is_class(value) or members.is_member(value):
            self._traced_watched.append((place, name, guarded.seen(value)))
            return members.Members(value) if members.is_class(value) else value
        if type(value) in (*_FOLLOWED, *guarded.HOLDS_OTHERS) or naming.is_record(value):
            if not self._traced_manner.methods:
                return None
            self._traced_watched.append((place, name, guarded.seen(value)))
            try:
                return self._traced_of_global(value)
            except Unseen:
                return None
        return None

    def __setattr__(self, name: str, value: Any) -> None:
        layer = self._traced_layer
        if (self._traced_manner.kept is None or name in _host_attributes(type(layer))
            or hasattr(type(layer), name) or type(layer).__setattr__ is not nn.Module.__setattr__
            or any(name in layer.__dict__[kind]
                   for kind in ("_parameters", "_buffers", "_modules"))):
            raise Unseen
        self._traced_kept[name] = value
        if self._traced_manner.kept is not None:
            from gnnaccel.adapters.tracing import kept_values  # needs this module

            kept_values.note(value)

    def _traced_refuses(self, *args: Any) -> Any:
        raise Unseen

    __str__ = __repr__ = __format__ = _traced_refuses  # its text is another than the layer's


class Listed(list):
    """Stand-in for a list that the layer holds: equal to the same lists, but not to be changed."""

    def _refuses(self, *args: Any, **kwargs: Any) -> Any:
        raise Unseen

    append = extend = insert = pop = remove = clear = sort = reverse = _refuses
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuses


def by_name(held: Any, name: Any, *default: Any) -> Any:
    """Stand-in for `getattr`, of a layer or of one of its modules. That it has no such attribute
    is noted, too."""
    if isinstance(held, naming.Torch) and type(name) is str and not name.startswith("_"):
        return held._traced_by_name(name)
    if not isinstance(held, Layer) or type(name) is not str or name.startswith(("__", "_traced")):
        raise Unseen
    layer = held._traced_layer
    if not default or name in held._traced_kept or naming.attribute(layer, name) is not Unseen:
        return getattr(held, name)
    if naming.finds_by_code(type(layer)):
        raise Unseen
    place = (*held._traced_path, name)
    held._traced_read[place] = Unseen
    return default[0]


def has_name(held: Any, name: Any) -> bool:
    """Stand-in for `hasattr`, likewise."""
    return by_name(held, name, Unseen) is not Unseen


class Inside(Layer):
    """Stands for a module of the layer, or of one of its modules."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise Unseen


class _Module:
    """Stand-in for a module of the user's own: for its numbers and functions."""

    def __init__(self, module: types.ModuleType, layer: Layer):
        self._traced_module, self._traced_layer = module, layer

    def __getattr__(self, name: str) -> Any:
        place, layer = vars(self._traced_module), self._traced_layer
        if name not in place:
            raise Unseen
        value = place[name]
        layer._traced_watched.append((place, name, guarded.seen(value)))
        stand_in = layer._traced_functions.instead(value)
        stand_in = layer._traced_global(place, name, value) if stand_in is None else stand_in
        if type(value) is np.ufunc:
            return functools.partial(_of_numbers, value)
        if stand_in is None and naming.is_known(value, layer._traced_manner.names):
            stand_in = value
        if stand_in is None and value is not None:
            raise Unseen
        return stand_in


def _uncompiled(function: Any) -> types.FunctionType:
    """The function around which `torch.compiler.disable` stands, if it does, or which
    `torch.jit.script` compiled."""
    if type(function) is ScriptFunction:
        function = getattr(function, "_torchdynamo_inline", None)
        if type(function) is not types.FunctionType:  # made by `torch.jit.trace`
            raise Unseen
        return function
    inner = vars(function).get("_torchdynamo_orig_callable")
    disabled = own.home(function) == "torch" and vars(function).get("_torchdynamo_disable") is True
    return inner if disabled and type(inner) is types.FunctionType else function


def _of_numbers(function: np.ufunc, *args: Any) -> Any:
    """A function of numpy's, such as `np.sqrt`, of numbers."""
    if not all(type(one) in NUMBERS for one in args):
        raise Unseen
    return function(*args)


def _host_attributes(cls: type) -> frozenset[str]:
    """Attributes of any layer of a host, which a message had better not set."""
    return _stored(next((one for one in cls.__mro__ if one.__name__ == "MessagePassing"
                         and own.home(vars(one).get("__init__")) == "torch_geometric"), None))


@functools.cache
def _stored(base: Any) -> frozenset[str]:
    """Attributes of any module, and of any of this class. None of it is made: PyG would write a
    ``propagate`` for it, which all others inherit."""
    named = () if base is None else _named(base.__init__.__code__)
    return frozenset(vars(nn.Module())).union(name for kind, name in named if kind == "STORE_ATTR")


def runnable(function: Any, layer: Any, manner: Manner, proxy: Layer, told: bool = False) -> Any:
    """The function to run on stand-ins; None where it may do more than compute. ``layer``:
    its first argument, None for no method; ``told``: its arguments are looked at in each call."""
    if type(function) is not types.FunctionType or naming.catches(function.__code__):
        return None
    # `_check_told` looks at the arguments of other functions
    asked = proxy._traced_special - IDS - (
        set(inspect.signature(function).parameters) if told else set())
    if layer is not None and not naming.special_as_arguments(function.__code__, asked):
        return None
    own_layer = None if layer is None else proxy._traced_layer
    global_values = function.__globals__ if proxy._traced_functions is not None else None
    if not named_attributes.names_known(function.__code__, own_layer, manner.names,
                                        layer is not None, global_values):
        return None
    return manner.prepared(function, proxy)


def _check_told(function: Any, args: tuple, kwargs: dict, asked: set[str]) -> None:
    """Unseen where a function may ask whether something is None that message passing passes by
    itself; ``asked``: what is not known to be None or something else."""

    def known(one: Any) -> bool:
        return one.name in NEVER_NONE or one.name in COUNTS and one.name not in asked

    if all(known(one) for one in (*args, *kwargs.values()) if type(one) is Special):
        return
    bound = inspect.signature(function).bind(*args, **kwargs).arguments
    names = frozenset(name for name, one in bound.items() if type(one) is Special
                      and not known(one))
    if not naming.special_as_arguments(function.__code__, names):
        raise Unseen
