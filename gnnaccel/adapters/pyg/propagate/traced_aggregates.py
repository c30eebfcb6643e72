"""Tracing a user's ``aggregate`` after the ``message`` whose result it gets: which rows it reduces,
and what it makes of the results (`node_values`).

It reduces by ``scatter`` of torch_geometric.utils or of torch_scatter, or by the layer's own
aggregation, and may hand on what message passing passes by itself to these alone.
"""
from __future__ import annotations

import builtins
import functools
import inspect
import types
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from torch import Tensor

from gnnaccel.adapters import own
from gnnaccel.adapters.pyg.propagate import own_aggregations, reading, reductions
from gnnaccel.adapters.tracing import manners, tracing
from gnnaccel.adapters.tracing.attention.traced import Make, Param
from gnnaccel.adapters.tracing.code import kinds, named_attributes, naming, supers
from gnnaccel.adapters.tracing.graph_functions import GraphFunctions
from gnnaccel.adapters.tracing.layer import guarded
from gnnaccel.adapters.tracing.layer.traced_layer import Layer
from gnnaccel.adapters.tracing.message import _named, codes
from gnnaccel.adapters.tracing.nodes.node_values import Given, NAMES as OF_NODES, NodeValue
from gnnaccel.adapters.tracing.rows import pointwise, zero_rows
from gnnaccel.adapters.tracing.rows.row_count import ROWS
from gnnaccel.adapters.tracing.rows.specials import IDS, Special
from gnnaccel.adapters.tracing.rows.standins import Unseen
from gnnaccel.dispatch.generated.tree import leaves

_NAMES = manners.OF_MESSAGES | OF_NODES | zero_rows.NAMES | {"aggregate", "aggr_module"}
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "STORE_ATTR")


def aggregated(sent: Any, message_layer: Layer, kwargs: dict, before: dict[str, Any],
               ends: list[tuple[str, str]], edges: list[str],
               edge_index: Any) -> tuple[Any, Any, Traced]:
    """Result of ``aggregate`` for messages ``sent``; the messages, and its steps. ``before``: the
    stand-ins for the message's arguments, which may have changed them in place. Adds to ``ends``
    the arguments that are features of nodes; Unseen where it is not followed."""
    traced: Traced = message_layer._traced_functions
    traced.begin(message_layer)
    function = type(traced.layer).aggregate
    ready = traced.prepared(function)
    arguments: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[2:]:
        if parameter.name == "aggr":  # the host does not give it
            if type(parameter.default) not in guarded.PLAIN:
                raise Unseen
            arguments["aggr"] = parameter.default
            continue
        if _is_changed(before.get(parameter.name)):
            raise Unseen
        one, end = tracing.stand_in(parameter, kwargs, _OF_AGGREGATE, traced.proxy, edge_index)
        arguments[parameter.name] = one
        if isinstance(one, pointwise.Rows):
            one.of_caller = True  # the messages may lie in its memory
        if type(one) is Special and one.end == "i":
            object.__setattr__(one, "steps", traced)
        if end in ("i", "j"):
            traced.ends.append((parameter.name[:-2], end))
    ends += traced.ends
    pointwise.hold(sent if type(sent) in (tuple, list) else [sent])
    out = ready(traced.proxy, _handed_on(sent, kwargs, before), **arguments)
    del traced.layer, traced.proxy  # what is kept by layer must not hold it
    return out, sent, traced


def _is_changed(argument: Any) -> bool:
    """Whether the message changed in place what it was given."""
    return isinstance(argument, (pointwise.Changed, pointwise.Deferred)) or (
        isinstance(argument, pointwise.Rows) and argument.written)


def _handed_on(sent: Any, kwargs: dict, before: dict[str, Any]) -> Any:
    """The messages, where arguments of ``propagate`` that the message hands on as they are, such as
    features of the nodes that receive, are what the ``aggregate`` itself would get."""
    if type(sent) in (tuple, list):
        return type(sent)([_handed_on(one, kwargs, before) for one in sent])
    name = next((name for name, one in before.items() if one is sent), None)
    if type(sent) is not Param or name is None or not sent.meta.dim():
        return sent
    meta = sent.meta.new_empty(ROWS, *sent.meta.shape[1:])
    return _rows("e", itemgetter(name), meta, name)


def _rows(end: str, make: Make, meta: Tensor, name: str) -> pointwise.Rows:
    stand_in = pointwise.rows(end, make, meta, name)
    if end != "e":
        return stand_in
    leaf = leaves(stand_in.tree)[0]
    leaf.names = leaf.names | {pointwise.NODES_TOO}
    return Given(stand_in, make, name)


_OF_AGGREGATE = tracing.Manner(_NAMES, manners.prepared, _rows, lambda out, layer: None, True,
                               wholes=True)


class _Layer(Layer):
    """Stand-in for the layer in ``aggregate``: has its aggregations, too. What is read is noted
    with what the message read."""

    def __init__(self, message_layer: Any, traced: Traced):
        super().__init__(message_layer._traced_layer, _OF_AGGREGATE, message_layer._traced_edges)
        for name in ("_traced_read", "_traced_watched", "_traced_kept",
                     "_traced_special"):  # set before, some
            object.__setattr__(self, name, getattr(message_layer, name))
        object.__setattr__(self, "_traced_functions", traced)

    def __getattr__(self, name: str) -> Any:
        module = naming.attribute(self._traced_layer, name)
        if not own_aggregations.is_aggregation(module):
            return super().__getattr__(name)
        self._traced_read[name,] = guarded.seen(module)
        if own_aggregations.is_users(module) or own_aggregations.is_softmax(module):
            inside = self._traced_inside(own_aggregations.Within, module, (name,))
            return inside._traced_method(type(module).forward)
        reduces = reductions.of_module(module)
        if reduces not in (("sum",), ("mean",), ("max",), ("min",)) or (
            type(module).__name__ == "MultiAggregation"):  # others are in it, which may change
            raise Unseen
        return functools.partial(self._traced_functions.by_module, reduces[0])


class Traced(GraphFunctions):
    """The `Steps` of one message and its ``aggregate``. ``ends``: of the arguments of the
    ``aggregate``, as of `tracing.Trace`."""

    def __init__(self, message_layer: Any):
        super().__init__(message_layer)
        self.ends: list[tuple[str, str]] = []

    def begin(self, message_layer: Any) -> None:
        """Begin with the ``aggregate``."""
        self.counts_results = True
        self.layer, self.names = message_layer._traced_layer, _NAMES
        self.proxy = _Layer(message_layer, self)

    # --- what reduces -----------------------------------------------------------------------------

    def by_module(self, reduce: str, x: Any, index: Any = None, ptr: Any = None,
                  dim_size: Any = None, dim: Any = -2) -> NodeValue:
        """The layer's own aggregation."""
        if ptr is not None and (type(ptr) is not Special or ptr.name != "ptr"):
            raise Unseen
        return self.scatter(x, index, dim, dim_size, reduce)

    # --- what it names ----------------------------------------------------------------------------

    def prepared(self, function: Any) -> types.FunctionType:
        """``function`` with stand-ins for what it names; Unseen where it may do more than
        compute."""
        if type(function) is not types.FunctionType or (
            function.__code__.co_flags & naming.NOT_PLAIN_CODE
            or not {"__class__"}.issuperset(function.__code__.co_freevars)):
            raise Unseen
        replacements = naming.importing(function, self.imported)
        if replacements is None:
            raise Unseen
        for code in codes(function.__code__):
            if code is not function.__code__ and code.co_name not in naming.COMPREHENSIONS:
                raise Unseen
            if naming.catches(code) or not naming.special_as_arguments(
                code, self.proxy._traced_special - IDS):
                raise Unseen
            if not named_attributes.names_known(code, self.layer, _NAMES, True,
                                                function.__globals__):
                raise Unseen
            for kind, name in _named(code):
                if kind == "LOAD_GLOBAL":
                    value = function.__globals__.get(name, getattr(builtins, name, None))
                    replacements[name] = (self._super(function) if value is super
                                          else self._named(function, name, value))
                elif kind not in (*_ATTRIBUTES, "IMPORT_NAME", "IMPORT_FROM"):
                    raise Unseen
        return naming.with_globals(function, replacements)

    def _named(self, function: types.FunctionType, name: str, value: Any) -> Any:
        """Stand-in for a global value: itself, where it is torch's; Unseen for what is not
        known."""
        stands = kinds.INT if value is int else zero_rows.instead(value, self.names)
        if stands is not None:
            return stands
        if any(value is one for one in (*naming.MODULES, *naming.BUILTINS)) or (
            naming.is_error(value)
            or callable(value) and naming.is_torchs(value, self.names)):
            return value
        if isinstance(value, type) and value in type(self.layer).__mro__:
            return _Class(value, self.proxy)
        stand_in = self.instead(value)
        if stand_in is None:
            stand_in = self.proxy._traced_global(function.__globals__, name, value)
        if stand_in is None and value is not None:
            return Special("")  # a branch that is not taken may name it
        return stand_in

    def _super(self, function: types.FunctionType) -> Callable[..., Any]:
        """Stand-in for ``super``, where the next ``aggregate`` is the host's."""
        cell = function.__closure__[0].cell_contents if function.__closure__ else None

        def of(cls: Any = None, layer: Any = None) -> Any:
            if cls is None:
                return self._above(cell)
            if type(cls) is not _Class or layer is not self.proxy:
                raise Unseen
            return self._above(cls.cls)

        return of

    def _above(self, cls: Any) -> Any:
        base, order = reading.base(), type(self.layer).__mro__
        if cls not in order:
            raise Unseen
        between = order[order.index(cls) + 1:order.index(base)]
        if any("aggregate" in vars(one) for one in between) or not own.is_method(
            base.aggregate, base, "aggregate", "torch_geometric"):
            raise Unseen
        self.watched += [(vars(one), "aggregate", Unseen) for one in between]
        self.watched.append((vars(base), "aggregate", base.aggregate))

        def aggregate(inputs: Any, index: Any, ptr: Any = None, dim_size: Any = None) -> NodeValue:
            return self.proxy.aggr_module(inputs, index, ptr=ptr, dim_size=dim_size,
                                          dim=self.proxy.node_dim)

        return types.SimpleNamespace(aggregate=aggregate)


class _Class(supers.Class):
    """Stand-in for one of the layer's classes: to ask what is above it, or for its methods."""

    @property
    def cls(self) -> type:
        return self._traced_class
