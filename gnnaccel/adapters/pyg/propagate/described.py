"""Description of a call of ``propagate``: all that its route depends on but its graph.

`described` gives that of the arguments, once in a call, for all that is remembered of earlier
calls, over the same edges (`repeated_calls`) or new ones (`new_graphs_taken`, `new_graphs_native`).
`Alike` holds, of a call by kernels, what the layer was like as well; `Described` states others like
it.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch

from gnnaccel.adapters import guards
from gnnaccel.adapters.pyg.guards import REDUCING
from gnnaccel.adapters.pyg.propagate import reading, reductions
from gnnaccel.adapters.tracing.rows.standins import NUMBERS
from gnnaccel.dispatch.generated.messages import Part
from gnnaccel.dispatch.ops.aggregation import Aggregation, Reduce
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.reasons import Reason

#: Keyword arguments of a call: names, types, dtypes and the like; shapes of the tensors, and
#: in the place of one each number of nodes in "size"; values of what is no tensor.
Arguments = tuple[list, list, list]

_VALUES = frozenset((*NUMBERS, str))
_grad = torch.is_grad_enabled
#: a shape without its number of rows
width = itemgetter(slice(1, None))


def described(kwargs: dict) -> Arguments:
    """The arguments, without their tensors. If two descriptions are equal, so is the route over the
    same edges. What is not understood equals nothing, itself included."""
    kinds: list[Any] = []
    shapes: list[tuple[int, ...]] = []
    values: list[Any] = []
    grad = _grad()
    for name, value in kwargs.items():
        kinds.append(name)
        kind, parts = type(value), (value,)
        if kind is tuple or kind is list:
            kinds.append((kind, len(value)))
            parts = value
            if len(value) == 2 and value[0] is value[1] and name != "size":
                parts = value[:1]  # features of both ends, as a rule
        for one in parts:
            kind = type(one)
            if kind in reading.TENSORS and not (grad and one.is_inference()):
                shape = one.shape
                kinds.append((len(shape), one.dtype, one.device, one.layout,
                              grad and one.requires_grad))
                shapes.append(shape)
            elif one is None:
                kinds.append(None)
            elif kind is int and name == "size":
                kinds.append(kind)
                shapes.append((one,))
            else:
                kinds.append(kind)
                values.append(one if kind in _VALUES else Unknown())
    return kinds, shapes, values


class Unknown:
    """A value that is not understood."""


def understood(arguments: Arguments) -> bool:
    """Whether nothing in there is unknown."""
    return Unknown not in map(type, arguments[2])


def rows_like(arguments: Arguments, edges: int) -> list[tuple[bool, bool, bool]]:
    """For each tensor, whether it has as many rows as there are ``edges``, as the first one, and
    as the one before."""
    rows = [shape[0] for shape in arguments[1] if shape]
    return [(n == edges, n == rows[0], n == before) for n, before in zip(rows, [-1, *rows])]


def _nothing() -> None:
    """Stand-in for a reference to the aggregation of a layer that has none."""


class Alike:
    """A call by kernels, and how its layer was, as others may be.

    ``arguments``: as `described`; ``settings``, ``stamp``: of the layer, as `reading` has them;
    ``module``, ``module_class``, ``module_paths``: the aggregation, its class, and what it runs.
    """

    __slots__ = ("epoch", "arguments", "cls", "settings", "known", "stamp", "module",
                 "module_class", "module_paths")
    module: Callable[[], Any]
    module_paths: tuple[Any, ...]

    def __init__(self, layer: Any, kwargs: dict, known: reading.Known, config: Config):
        self.epoch, self.arguments = config.epoch, described(kwargs)
        self.cls, self.settings = type(layer), reading.SETTINGS(layer.__dict__)
        self.known, module = known, layer.aggr_module
        # what was traced depends on nothing of the layer but its aggregation, looked at below
        settled = known.traced and (module is None or reductions.settled(module))
        self.stamp = None if settled else known.stamp(layer)
        self.module_class = type(module)
        self.module, self.module_paths = (
            (_nothing, ()) if module is None
            else (weakref.ref(module), reductions.paths(module)))

    def holds(self, layer: Any, config: Config) -> bool:
        """Whether the layer is what it was, and all else outside the call."""
        own = layer.__dict__
        module = own["_modules"].get("aggr_module")
        if (self.epoch != config.epoch or module is not self.module()
            or type(module) is not self.module_class):
            return False
        if module is not None:
            within = module.__dict__
            if any(guards.MODULE_HOOKS(within)) or not REDUCING.isdisjoint(within):
                return False
        if (self.settings != reading.SETTINGS(own) or any(reading.HOOKS(own))
            or not reading.OVERRIDES.isdisjoint(own)):
            return False
        if (type(layer) is not self.cls or not self.known.path.same(*self.module_paths)
            or guards.context_reason() is not None):
            return False
        return self.stamp is None or self.stamp == self.known.stamp(layer)


class Described(Alike):
    """An `Alike` call that is an aggregation.

    ``form``: of the message; ``reduce``: as of `Aggregation`, None where its numbers may be others
    at the next call; ``shape``: as of `Aggregation` where messages are rows of the features as
    they are, or these with weights over the same edges, else None; ``layout``: as of `Aggregation`;
    ``bare``: nothing is done before the aggregation or after it; ``rows``: `reading.prepared` gives
    the features as they are, without weights.
    """

    __slots__ = ("form", "reduce", "shape", "layout", "bare", "rows")
    layout: tuple[int, int, str] | None
    reduce: Reduce | None

    def __init__(self, layer: Any, kwargs: dict, call: reading.Read, config: Config):
        super().__init__(layer, kwargs, call.known, config)
        aggregation, self.form = call.given, call.form
        self.reduce = aggregation.reduce if type(aggregation.reduce) in (str, Part) else None
        plain = (type(self.reduce) is str and len(call.reduces) == 1 and aggregation.more is None
                 and self.form.more is None and self.form.apply is None
                 and aggregation.x is reading.source(kwargs, self.form.source))
        self.rows = (self.reduce is not None and self.form.weight is None
                     and aggregation.weight is None and aggregation.x is reading.source(
                         kwargs, self.form.source) and not reading.stacked(layer, aggregation.x))
        self.shape = aggregation.shape if plain else None
        self.layout = None
        self.bare = (plain and not self.form.unfinished and call.known.aggregate is None
                     and not call.known.updates)

    def stated(self, layer: Any, kwargs: dict, edges: int) -> Aggregation | Reason:
        """The aggregation over so many edges, as `reading.prepared` gives it."""
        x: Any = kwargs[self.form.source]
        if type(x) is tuple or type(x) is list:
            x = x[0]
        weight = None if self.form.weight is None else self.form.weight(kwargs)
        if self.shape is not None and not x.is_neg() and (weight is None or (
                self.layout is not None and weight.dtype is x.dtype and not weight.is_neg())):
            return Aggregation(self.reduce,  # type: ignore[arg-type]  # named, as there is a shape
                               x, weight, self.shape, None, self.layout)
        if self.rows and not x.is_neg():
            return Aggregation(self.reduce, x, None,  # type: ignore[arg-type]  # not None
                               tuple(x.shape[1:]))
        reduce = self.reduce or reductions.mean_of(layer.aggr_module)
        return reading.prepared(reduce, layer, x, weight, edges)
