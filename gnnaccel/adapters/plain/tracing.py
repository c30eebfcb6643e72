"""Tracing the ``forward`` of a plain module: it runs once on the stand-ins on which PyG's messages
and aggregates are traced.

An argument with a row for each node is a value per node, of which an end of the edges picks rows;
one with a row for each edge is rows of the edges. Which end the edges go to, the first or the
second, is the one by which the module sums.
"""
from __future__ import annotations

import math
import types
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters.plain import derived
from gnnaccel.adapters.plain.arguments import COUNT, EDGES, NODES, ONE, Given
from gnnaccel.adapters.plain.effects import settled
from gnnaccel.adapters.plain.several import OfDerived
from gnnaccel.adapters.plain.steps import Forward, Ways
from gnnaccel.adapters.pyg.propagate import aggregates, generated
from gnnaccel.adapters.tracing import manners, tracing
from gnnaccel.adapters.tracing.attention.traced import Param
from gnnaccel.adapters.tracing.derived import names as edge_names
from gnnaccel.adapters.tracing.derived import values as of_edges
from gnnaccel.adapters.tracing.expressed import Once
from gnnaccel.adapters.tracing.layer import guarded
from gnnaccel.adapters.tracing.layer.traced_layer import Layer
from gnnaccel.adapters.tracing.nodes import node_values
from gnnaccel.adapters.tracing.nodes.node_values import NodeCount, NodeValue
from gnnaccel.adapters.tracing.nodes.straight import combined
from gnnaccel.adapters.tracing.noted import followed, notes
from gnnaccel.adapters.tracing.rows import pointwise, zero_rows
from gnnaccel.adapters.tracing.rows.row_count import ROWS, RowCount
from gnnaccel.adapters.tracing.rows.specials import Special, Turned
from gnnaccel.adapters.tracing.rows.standins import Unseen
from gnnaccel.cuda.runtime import capture
from gnnaccel.dispatch.ops.aggregation import Reduce
from gnnaccel.dispatch.policy.names import IdentityMap

_TRACES = 32  # kept for each module
_GRAPHS = 4
_MOST = 24  # made for each module: what it reads may be something else in each call
_NAMES = manners.OF_MESSAGES | node_values.NAMES | node_values.OF_WHOLES | zero_rows.NAMES


class Found(NamedTuple):
    """A ``forward``, understood. ``trace``: what was read; ``messages``: what is reduced, by
    ``reduces``; ``sizes``, ``sized``: as of `GraphFunctions`; ``flipped``: whether the edges go to
    the first of their ends; ``sends``: whether rows of nodes are picked at the other end, so that
    it has no ids beyond; ``combine``: the result, of those of the reductions and the arguments of a
    call; ``derived``: how it makes the list of edges, if not the one given is it."""

    trace: tracing.Trace
    messages: tuple[generated.Message, ...]
    reduces: tuple[Reduce, ...]
    sizes: frozenset[str | int]
    sized: bool
    flipped: bool
    sends: bool
    combine: Callable[[list[Tensor], dict], Any]
    derived: derived.Derived | None = None

    def result(self, out: Any, kwargs: dict) -> Any:
        """The result of the module, of that of its aggregations."""
        return self.combine(out if type(out) is list else [out], kwargs)


_MANNER = tracing.Manner(_NAMES, manners.prepared, pointwise.rows, lambda out, layer: None, True,
                         functions=Forward, wholes=True)
_OF_DERIVED = _MANNER._replace(names=_NAMES | edge_names.NAMES, functions=OfDerived)

class _Kept:
    """The last traces of a module: (key, what was read, the `Found`). ``made``: how many there have
    been; ``graphs``: how many of its graphs are still to be looked at for negative ids, which pick
    rows from behind; None once one had some."""

    graphs: int | None = _GRAPHS

    def __init__(self) -> None:
        self.traces: list[tuple[tuple, guarded.Guards, Found | None]] = []
        self.made = 0


_kept: IdentityMap[_Kept] = IdentityMap()  # by module


def found(module: Any, function: types.FunctionType, given: Given) -> Found | None:
    """The module's ``function`` for such arguments, traced anew where anything that it read has
    changed; None where it is not followed."""
    edges = given.edge_index.shape[1]
    key = (function, given.key, torch.get_default_dtype())
    kept = _kept.get(module)
    if kept is None:
        kept = _Kept()
        _kept.set(module, kept)
    for entry_key, guards, result in kept.traces:
        if entry_key == key and guards.hold(module, edges) and (
            result is None or result.trace.suits(given.values, edges)):
            return result
    if kept.made >= _MOST:
        return None
    kept.made += 1
    guards, result = (guarded.Guards({}), None) if given.others else (
        _either_way(module, function, given, _MANNER))
    if result is None:
        guards, result = _either_way(module, function, given, _OF_DERIVED)
    kept.traces[:] = [(key, guards, result),
                      *(one for one in kept.traces if one[0] != key)][:_TRACES]
    return result


def counts_from_behind(module: Any, edge_index: Tensor) -> bool:
    """Whether a traced module is given negative ids. The device is asked over its first graphs."""
    kept: Any = _kept.get(module)
    if kept.graphs and not capture.capturing():
        kept.graphs = kept.graphs - 1 if int(edge_index.amin()) >= 0 else None
    return kept.graphs is None


class _OtherWay(NamedTuple):
    """In place of a result: the ``ways`` in which the module may be followed."""

    ways: Ways


def _either_way(module: Any, function: types.FunctionType, given: Given,
                manner: tracing.Manner) -> tuple[guarded.Guards, Any]:
    """`_traced`, with the edges to either of their ends."""
    ways = Ways()
    while True:
        guards, result = _traced(module, function, given, manner, ways)
        if type(result) is not _OtherWay:
            return guards, result
        ways = result.ways


def _traced(module: Any, function: types.FunctionType, given: Given, manner: tracing.Manner,
            ways: Ways) -> tuple[guarded.Guards, Any]:
    """What was read in a run on stand-ins, and the `Found`, None where it is not followed."""
    (layer, result), notes = followed(lambda: _run(module, function, given, manner, ways),
                                      given.values)
    guards = guarded.Guards(layer._traced_read, (), tuple(layer._traced_watched))
    if isinstance(result, Found):
        result = result._replace(trace=_trace(result.messages, given, layer._traced_functions,
                                              notes, guards))
    return guards, result


def _run(module: Any, function: types.FunctionType, given: Given, manner: tracing.Manner,
         ways: Ways) -> tuple[Layer, Any]:
    """One run on stand-ins: that of the module, and as of `_traced`."""
    layer = Layer(module, manner)
    layer._traced_special.clear()  # stand-ins are told by what they are, not by names
    steps: Forward = layer._traced_functions
    notes().wholes = True
    try:
        arguments = _stand_ins(steps, given, ways)
        out = layer._traced_method(function)(**arguments)
        others = steps.other_ways(ways, out)
        return layer, (_found(out, module, steps, arguments, 0 in ways.flipped) if others is None
                       else _OtherWay(others))
    except tracing.ENDS:
        others = steps.other_ways(ways)
        return layer, None if others is None else _OtherWay(others)


def _trace(messages: Any, given: Given, steps: Forward, notes: Any,
           guards: guarded.Guards) -> tracing.Trace:
    """What was read, in the form of that of a message."""
    edges = () if isinstance(steps, OfDerived) else tuple(
        name for name, kind in given.kinds.items() if kind is EDGES)
    whole = tuple((name, given.values[name].shape) for name, kind in given.kinds.items()
                  if kind is ONE)
    return tracing.Trace(
        messages, tuple(steps.gathered), edges, guards, {}, tuple(notes.effects), whole, edges,
        most=min(steps.counts, default=math.inf), sends=min(steps.sending, default=math.inf),
        up_to_edges=steps.up_to_edges, dtype=notes.dtype,
        devices=tuple(notes.devices or ()), placed=_nodes(given)[:1],
        conditions=tuple(notes.conditions or ()))


def _stand_ins(steps: Forward, given: Given, ways: Ways) -> dict[str, Any]:
    """What stands for the arguments."""
    ends = steps.new_ends(0 in ways.flipped)
    stand_ins: dict[str, Any] = dict(given.values)
    if isinstance(steps, OfDerived):
        steps.begin(given, ways)
        stand_ins.update(derived.stand_ins(steps, given))
    elif len(given.ends) == 2:
        stand_ins.update(zip(given.ends, ends))
    else:
        value = given.values[given.ends[0]]
        edges = Special("edge_index", tuple(ends), steps)
        stand_ins[given.ends[0]] = (Turned(edges) if given.turned else edges
                                    if isinstance(value, Tensor) else type(value)(ends))
    some = _nodes(given)[0]
    for name, kind in given.kinds.items():
        value = given.values[name]
        if kind is COUNT:
            stand_ins[name] = NodeCount(steps.argument(some, _looks(given.values[some])))
        elif kind is EDGES and isinstance(steps, OfDerived):
            pass
        elif kind is EDGES:
            stand_ins[name] = pointwise.rows("e", itemgetter(name), _looks(value), name)
        elif kind is NODES:
            stand_ins[name] = steps.argument(name, _looks(value))
        else:
            make = itemgetter(name)
            stand_ins[name] = Param(make, torch.empty_like(value, device="meta"), (make,))
    if isinstance(steps, OfDerived):
        steps.some = stand_ins[some]
    return stand_ins


def _nodes(given: Given) -> tuple[str, ...]:
    """The arguments with a row for each node."""
    return tuple(name for name, kind in given.kinds.items() if kind is NODES)


def _looks(value: Tensor) -> Tensor:
    """What shows the form of rows."""
    return torch.empty(ROWS, *value.shape[1:], dtype=value.dtype, device="meta")


def _found(out: Any, module: Any, steps: Forward, arguments: dict[str, Any],
           flipped: bool) -> Found:
    """A `Found` but for its trace, of what the module gives for its stand-ins."""
    result = aggregates.result_of(_as_given(out, arguments))
    steps.check(out)
    late = settled(steps, notes().effects, steps.reached)
    places = sorted(steps.needed([result, *late]))
    reductions = [steps.reductions[place] for place in places]
    if not reductions:
        raise Unseen
    messages, reduces, counts = aggregates.messages_of(reductions, module)
    of_reductions, put = combined(steps, result, places, late), any(count for count, _, _ in counts)

    def combine(results: list[Tensor], kwargs: dict) -> Any:
        return of_reductions(aggregates.put_together(results, counts) if put else results, kwargs)

    return Found(None, messages, reduces,  # type: ignore[arg-type]  # the caller has the trace
                 frozenset(steps.sizes), steps.sized, flipped, steps.sends, combine,
                 steps.derived if isinstance(steps, OfDerived) else None)


def _edges(given: Any) -> int:
    return given.graph.num_edges


def _as_given(value: Any, arguments: dict[str, Any]) -> Any:
    """A result with arguments that are given back as they are in place of their stand-ins."""
    for name, one in arguments.items():
        if one is value and one is not None and type(one) is not NodeValue:
            return Once(itemgetter(name))
    if type(value) is RowCount:
        return Once(_edges)
    if type(value) in (of_edges.EdgeValue, of_edges.EdgeCount):
        return Once(value.steps.derived.returned(value.at))
    if type(value) in (tuple, list):
        return type(value)([_as_given(one, arguments) for one in value])
    if type(value) is dict:
        return {key: _as_given(one, arguments) for key, one in value.items()}
    if isinstance(value, pointwise.Rows) and value.of_caller:
        raise Unseen  # it lies in the memory of an argument
    return value
