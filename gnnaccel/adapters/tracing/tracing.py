"""Tracing a ``message``: it runs once on stand-ins, what it reads of the layer is noted, and looked
at again in each later call.

What it may do is limited to what stand-ins see: global names of torch's modules and functions, and
numbers; names of tensors' methods that a `Manner` lists; attributes of the layer.
"""
from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters.guards import TENSORS, context_reason
from gnnaccel.adapters.tracing.attention.traced import Make, Param
from gnnaccel.adapters.tracing.code.defaults import default_of
from gnnaccel.adapters.tracing.expressed import Effect
from gnnaccel.adapters.tracing.layer import conditions, devices, guarded
from gnnaccel.adapters.tracing.layer.traced_layer import Layer, runnable
from gnnaccel.adapters.tracing.message import SPECIAL
from gnnaccel.adapters.tracing.nodes.nodes_read import argument
from gnnaccel.adapters.tracing.noted import followed
from gnnaccel.adapters.tracing.rows.row_count import ROWS
from gnnaccel.adapters.tracing.rows.specials import COUNTS, special
from gnnaccel.adapters.tracing.rows.standins import NUMBERS, Unseen, rows
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.policy.names import IdentityMap

_TRACES = 32  # kept for each layer, as of one that is called for each kind of edges
_WHOLE = (torch.int64, torch.int32, torch.bool)
_GIVEN = ("message", "aggregate")  # the functions that get arguments of `propagate`
_NUMBERS = (*NUMBERS, str)  # as arguments: another value is another trace
#: errors that a run on stand-ins may end with where it is not followed
ENDS = (Unseen, AttributeError, TypeError, ValueError, LookupError, RuntimeError, AssertionError)


class Manner(NamedTuple):
    """How messages of one kind are traced.

    ``names``: what a message may name of modules, tensors and stand-ins; anything else may have
    effects. ``prepared(function, layer)``: the function to run on stand-ins, among them this of the
    layer; None where it may do more than compute. ``rows(end, make, meta, name)``: what stands for
    the argument ``name`` at the ``end`` "i", "j" or "e". ``found(out, layer)``: the message, None
    where it is not of this kind. ``methods``: whether methods of the layer, and functions of the
    user's own, may be called. ``then(out, layer, kwargs, given, ends, edges, edge_index)``: what
    goes on with what the message gave for the stand-ins ``given``; it adds to the lists of a
    `Trace`. ``kept(values)``: how a `Trace` keeps what the message sets on the layer, if it may set
    any. ``functions(layer)``: what stands for functions of PyG and others. ``stacked(rows,
    place)``: what stands for rows that are in another dimension than the first, if any may be.
    ``wholes``: whether arguments may be whole numbers or truth values.
    """

    names: frozenset[str]
    prepared: Callable[[types.FunctionType, Layer], types.FunctionType | None]
    rows: Callable[[str, Make, Tensor, str], Any]
    found: Callable[[Any, Any], Any]
    methods: bool = False
    then: Callable[[Any, Layer, dict, dict, list, list, Any], Any] | None = None
    kept: Callable[[Any], Any] | None = None
    functions: Callable[[Layer], Any] | None = None
    stacked: Callable[[Any, int], Any] | None = None
    wholes: bool = False


class Trace(NamedTuple):
    """A message, understood. ``ends``: the arguments that are features of nodes, with their end of
    the edge, in the order of the message; ``edges``: those with a row for each edge; ``guards``:
    what was read of the layer and its modules, and by name; ``kept``: what it sets on the layer, by
    name; ``effects``: what it computes once in each call, in this order, whether or not anything is
    made of it: what draws numbers or keeps statistics; ``whole``: the arguments that belong to no
    node or edge, with their shapes; ``rows``: those that seemed to belong to the edges as they had
    as many rows; ``most``: how many nodes may receive, as the message says by numbers of its own
    how many there are, or as tables have rows; ``sends``: how many may send, likewise;
    ``up_to_edges``: whether no more may receive than there are edges; ``listed``:
    the arguments that are the list of edges itself; ``dtype``: torch's default, of what it makes
    by that, or None; ``devices``: those that it names, as `devices.here` takes them; ``placed``:
    other arguments that are where the rows are;
    ``conditions``: the answers about numbers."""

    message: Any
    ends: tuple[tuple[str, str], ...]
    edges: tuple[str, ...]
    guards: guarded.Guards
    kept: dict[str, Any] = {}
    effects: tuple[Effect, ...] = ()
    whole: tuple[tuple[str, torch.Size], ...] = ()
    rows: tuple[str, ...] = ()
    most: float = math.inf
    sends: float = math.inf
    up_to_edges: bool = False
    listed: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    devices: tuple[Any, ...] = ()
    placed: tuple[str, ...] = ()
    conditions: tuple[conditions.Condition, ...] = ()

    def holds(self, layer: Any, edges: int | None = None, kwargs: dict | None = None) -> bool:
        """Whether all that was read is still so, in a call over so many edges; and ``kwargs``, if
        these are given, belong to what they belonged to."""
        if kwargs is not None and not self.suits(kwargs, edges):
            return False
        return self.guards.hold(layer, edges)

    def counts(self, graph: OpGraph) -> bool:
        """Whether a graph has no more nodes than the message says."""
        return (graph.num_dst <= self.most and graph.num_src <= self.sends
                and not (self.up_to_edges and graph.num_dst > graph.num_edges))

    def lists(self, kwargs: dict, edge_index: Any) -> bool:
        """Whether the arguments that were the list of edges are this one."""
        return all([kwargs[name] is edge_index for name in self.listed])

    def suits(self, kwargs: dict, edges: int | None) -> bool:
        """Whether arguments belong to what they belonged to, in a call over so many edges."""
        for name, shape in self.whole:
            if kwargs[name].shape != shape:
                return False
        for name in self.rows:
            if kwargs[name].shape[:1] != (edges,):
                return False
        return not self.devices or self.at_devices(kwargs)

    def met(self, given: Any) -> bool:
        """Whether the rows of a call are where the message says, and its questions have the same
        answers."""
        return not (self.devices and not self.at_devices(given)) and (
            conditions.hold(self.conditions, given))

    def at_devices(self, kwargs: dict) -> bool:
        """Whether the rows are where the message says."""
        return devices.here(self.devices, kwargs, self.ends, (*self.edges, *self.placed))


# --- tracing --------------------------------------------------------------------------------------

def _trace(layer: Any, kwargs: dict, manner: Manner, edge_index: Any) -> Trace:
    edges = None if edge_index is None else edge_index.shape[1]
    first = _run(layer, kwargs, manner, edge_index, None)
    if first.message is None and manner.methods and edges and edges > 1 and any(
        guarded.may_have_edges(one, edges) for one in first.guards.read.values()):
        # a tensor that the layer holds may have a row for each edge
        with_edges = _run(layer, kwargs, manner, edge_index, edges)
        return first if with_edges.message is None else with_edges
    return first


def _run(layer: Any, kwargs: dict, manner: Manner, edge_index: Any, edges: int | None) -> Trace:
    result, notes = followed(
        functools.partial(_followed, layer, kwargs, manner, edge_index, edges),
        None if manner.kept is None else kwargs)
    result = result._replace(effects=tuple(notes.effects), devices=tuple(notes.devices or ()),
                             conditions=tuple(notes.conditions or ()), dtype=notes.dtype)
    if result.devices and not result.at_devices(kwargs):
        return result._replace(message=None, devices=())
    return result


def _followed(layer: Any, kwargs: dict, manner: Manner, edge_index: Any,
              edges: int | None) -> Trace:
    function = type(layer).message
    proxy, ends, at_edges, whole = Layer(layer, manner, edges), [], [], []
    if edge_index is not None:
        proxy._traced_special.remove("ptr")  # which the host has of sorted edges alone
        if _of_nodes(layer, kwargs, _GIVEN):  # which the host counts
            proxy._traced_special.difference_update(COUNTS)
    if proxy._traced_functions is not None:
        proxy._traced_functions.square = square(layer, kwargs)
    message = runnable(function, layer, manner, proxy)
    if message is None:
        return Trace(None, (), (), guarded.Guards({}))
    arguments: dict[str, Any] = {}
    cells = tuple((cell, cell.cell_contents) for cell in function.__closure__ or ())
    traced: Any = None
    attributes: dict[str, Any] = {}
    try:
        for parameter in list(inspect.signature(function).parameters.values())[1:]:
            one, end = stand_in(parameter, kwargs, manner, proxy, edge_index)
            arguments[parameter.name] = one
            if end == "e":
                at_edges.append(parameter.name)
            elif type(one) is Param:
                whole.append((parameter.name, kwargs[parameter.name].shape))
            elif end:
                ends.append((parameter.name[:-2], end))
        out = message(proxy, **arguments)
        if manner.then is not None:
            out = manner.then(out, proxy, kwargs, arguments, ends, at_edges, edge_index)
        attributes = {} if manner.kept is None else manner.kept(proxy._traced_kept)
        traced = manner.found(out, layer)  # made of what is kept
    except ENDS:
        traced, attributes = None, {}  # it is none
    guards = guarded.Guards(proxy._traced_read, cells, tuple(proxy._traced_watched))
    return Trace(traced, tuple(ends), tuple(at_edges), guards, attributes, whole=tuple(whole),
                 rows=() if edge_index is None or manner.kept is None or stacked(layer, kwargs)
                 else tuple(at_edges),
                 most=min(proxy._traced_counts, default=math.inf),
                 sends=min(getattr(proxy._traced_functions, "sending", ()), default=math.inf),
                 up_to_edges=getattr(proxy._traced_functions, "up_to_edges", False))


def stand_in(parameter: inspect.Parameter, kwargs: dict, manner: Manner, layer: Layer,
             edge_index: Any) -> tuple[Any, str]:
    """Stand-in for an argument, and the end of the edge that it belongs to, "" for none."""
    name = parameter.name
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise Unseen
    if name in SPECIAL:
        if name == "adj_t":  # the host does not give it
            raise Unseen
        if name == "ptr" and name not in layer._traced_special:
            return None, ""
        return special(name, kwargs, lambda: layer.flow, edge_index, layer._traced_functions), ""
    end = name[-1] if name[-2:] in ("_i", "_j") and name[:-2] in kwargs else "e"
    key = name if end == "e" else name[:-2]
    if key not in kwargs:
        if end != "e" and parameter.default is not None:
            raise Unseen
        return default_of(layer._traced_layer, parameter), ""
    value = rows(kwargs, key, end) if end != "e" else kwargs[key]
    if end == "e" and value is edge_index is not None and manner.wholes:
        return special("edge_index", kwargs, lambda: layer.flow, edge_index,
                       layer._traced_functions), ""
    if value is None or (end == "e" and type(value) in _NUMBERS):
        return value, ""
    if type(value) not in TENSORS:
        raise Unseen
    if not value.is_floating_point() and not (manner.wholes and value.dtype in _WHOLE):
        raise Unseen
    of_nodes = stacked(layer._traced_layer, kwargs)
    if end == "e" and manner.kept and not of_nodes and not _of_edges(value, edge_index):
        make: Make = itemgetter(key)
        return Param(make, torch.empty_like(value, device="meta"), (make,)), ""
    if value.dim() < 1:
        raise Unseen
    if not of_nodes:
        make = itemgetter(key) if end == "e" else argument(key, end)
        meta = torch.empty(ROWS, *value.shape[1:], dtype=value.dtype, device="meta")
        return manner.rows(end, make, meta, key), end
    return _stand_in_of_stacks(manner, key, end, value,
                               _place(layer._traced_layer, value, end, edge_index)), end


def _of_edges(value: Tensor, edge_index: Tensor | None) -> bool:
    """Whether a tensor has a row for each edge, as far as can be told."""
    return edge_index is None or (value.dim() > 0 and value.shape[0] == edge_index.shape[1])


def _stand_in_of_stacks(manner: Manner, key: str, end: str, value: Tensor, place: int) -> Any:
    if manner.stacked is None:
        raise Unseen
    make = itemgetter(key) if end == "e" else argument(key, end, place)
    sizes = (*value.shape[:place], *value.shape[place + 1:])
    meta = torch.empty(ROWS, *sizes, dtype=value.dtype, device="meta")
    return manner.stacked(manner.rows(end, lambda given: make(given).movedim(place, 0), meta, key),
                          place)


def _place(layer: Any, value: Tensor, end: str, edge_index: Any) -> int:
    """The dimension that nodes are in, or edges. Of several that may be edges one is taken; where
    that is the wrong one, the message does not fit together."""
    if end != "e":
        return layer.node_dim % value.dim()
    edges = None if edge_index is None else edge_index.shape[1]
    places = [at for at, size in enumerate(value.shape) if size == edges]
    if not places:
        raise Unseen
    likely = layer.node_dim % value.dim()
    return likely if likely in places else places[0]


def stacked(layer: Any, kwargs: dict) -> bool:
    """Whether features of nodes that the message gets have these in another dimension than the
    first."""
    return any([layer.node_dim % value.dim()
                for value in _of_nodes(layer, kwargs, ("message",))])


def _of_nodes(layer: Any, kwargs: dict, functions: tuple[str, ...]) -> list[Tensor]:
    """The features of nodes that these functions get, as `rows` gives them."""
    features: list[Tensor] = []
    for function in functions:
        for name, at in _gathered(getattr(getattr(type(layer), function), "__code__", None)):
            value: Any = kwargs.get(name)
            if isinstance(value, (tuple, list)):
                value = value[at] if len(value) == 2 else None
            if type(value) in TENSORS and value.dim():
                features.append(value)
    return features


@functools.lru_cache(maxsize=512)
def _gathered(code: types.CodeType | None) -> tuple[tuple[str, bool], ...]:
    """The arguments of ``propagate`` that a function with this code takes at an end of the edges,
    and whether that is the destination."""
    names = () if code is None else code.co_varnames[1:code.co_argcount + code.co_kwonlyargcount]
    return tuple([(name[:-2], name[-1] == "i") for name in names if name[-2:] in ("_i", "_j")])


def square(layer: Any, kwargs: dict) -> bool:
    """Whether the arguments say that there are as many nodes at both ends of the edges."""
    size, node_dim, counts = kwargs.get("size"), layer.node_dim, set()
    if isinstance(size, (tuple, list)):
        counts = set(size) - {None}
        if len(counts) == 1 and None not in size:
            return True
    for value in _of_nodes(layer, kwargs, _GIVEN):
        shape = value.shape
        if -len(shape) <= node_dim < len(shape):
            counts.add(shape[node_dim])
    return len(counts) < 2


_traces: IdentityMap[list[tuple]] = IdentityMap()  # by layer
_EDGES = object()  # in place of the form of an argument that is the list of edges


def trace(layer: Any, known: Any, kwargs: dict, manner: Manner,
          edge_index: Any = None) -> Trace:
    """Trace of the layer's message for such arguments, made anew where anything that it read has
    changed. ``known``: its class; ``edge_index``: where that is a plain tensor."""
    if (type(edge_index) is not Tensor or edge_index.layout != torch.strided
        or edge_index.dim() != 2):
        edge_index = None
    size = kwargs.get("size")
    key = (id(manner), known, edge_index is None, torch.get_default_dtype(),
           square(layer, kwargs), layer.node_dim,
           tuple([one is None for one in size] if isinstance(size, (tuple, list)) else ()),
           tuple([(name, _EDGES if value is edge_index is not None else _form(value))
                  for name, value in kwargs.items() if name != "size"]),
           _shapes(kwargs) if manner.stacked is not None and stacked(layer, kwargs) else None)
    edges = None if edge_index is None else edge_index.shape[1]
    traces = _traces.get(layer)
    if traces is None:
        traces = []
        _traces.set(layer, traces)
    for entry_key, result in traces:
        if entry_key == key and result.holds(layer, edges, kwargs):
            return result
    # whoever looks at all operations would see those on stand-ins; such a call is native anyway
    if context_reason() is not None:
        return Trace(None, (), (), guarded.Guards({}))
    listed = tuple([name for name, value in kwargs.items() if value is edge_index is not None])
    result = _trace(layer, kwargs, manner, edge_index)._replace(listed=listed)
    traces[:] = [(key, result), *(one for one in traces if one[0] != key)][:_TRACES]
    return result


def _shapes(kwargs: dict) -> tuple:
    """The shapes of all tensors."""
    return tuple([one.shape for value in kwargs.values()
                  for one in (value if isinstance(value, (tuple, list)) else (value,))
                  if isinstance(one, Tensor)])


def _form(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_form, value))
    if type(value) in _NUMBERS:
        return type(value), value
    return ((value.shape[1:], value.dtype, value.device) if isinstance(value, Tensor)
            else type(value))
