"""Messages of pointwise operations, which kernels are written for.

`form` traces the ``message`` of a layer on the stand-ins of `pointwise`, and gives what it computes
as any other `Form`. What was read of the layer is looked at again in each call.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters.pyg.propagate import reading, reductions
from gnnaccel.adapters.pyg.propagate.stock import Aggregate
from gnnaccel.adapters.tracing import expressing, kept_values, manners, tracing
from gnnaccel.adapters.tracing.expressed import Message
from gnnaccel.adapters.tracing.joined import joined
from gnnaccel.adapters.tracing.rows import pointwise, stacks
from gnnaccel.adapters.tracing.rows.standins import Form
from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.generated.messages import EXTREMA, REDUCES, Generated, Part, Several
from gnnaccel.dispatch.ops import aggregation_messages
from gnnaccel.dispatch.ops.aggregation import Reduce
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.policy.reasons import Reason, reason


class Parts(NamedTuple):
    """A message that is several side by side, each of which is reduced for itself. ``known``: the
    layer's class, with an aggregate that puts the results side by side; ``whole``: all as one
    message, of rows that are written for each edge before; None where that cannot be."""

    messages: tuple[Message, ...]
    known: reading.Known
    whole: Message | None


def _found(out: Any, layer: Any) -> Message | Parts | None:
    return _parts(out, layer) or expressing.found(out, layer)


def _parts(out: Any, layer: Any) -> Parts | None:
    """`Parts` of what a message gives, if it is such a one."""
    messages = expressing.side_by_side(out) if isinstance(out, pointwise.Rows) else ()
    if not messages:
        return None
    dim = out.along

    def reduces(layer: Any) -> tuple[Reduce, ...]:
        how = reductions.of_module(layer.aggr_module)
        return (tuple([Part(how[0], at) for at in range(len(messages))])
                if len(how) == 1 and type(how[0]) is str and how[0] in REDUCES else ())

    def combine(layer: Any, results: list[Tensor], kwargs: dict) -> Tensor:
        return torch.cat(results, dim)

    known = reading.Known(type(layer), Aggregate(reduces, None, combine))
    return Parts(messages, known, expressing.mapped(out))


_MANNER = tracing.Manner(manners.OF_MESSAGES, manners.prepared, pointwise.rows, _found, True,
                         kept=kept_values.kept, functions=manners.functions,
                         stacked=stacks.stand_in, wholes=True)


def form(layer: Any, known: reading.Known, kwargs: dict, edge_index: Any,
         why: Reason) -> Form | Reason:
    """Form of the layer's message, where kernels can be written for it; else ``why``, the reason
    against the other forms."""
    if known.why is not None or not serves(kwargs):
        return why
    if known.aggregate is not None and not known.traced:
        return why
    trace = tracing.trace(layer, known, kwargs, _MANNER, edge_index)
    if trace.message is None:
        return why
    source = source_of(trace, kwargs)
    if source is None:
        return why
    stacked = tracing.stacked(layer, kwargs)
    messages, known = _messages(trace, layer, known, stacked)
    if not messages:
        return why
    message = messages[0]
    turned = stacked or type(trace.message) is Message and trace.message.turned
    if layer.node_dim not in (0, -1 - len(message.shape)) and not turned:
        return reason("GA206", f"messages of {len(message.shape) + 1} dimensions, "
                      f"node_dim={layer.node_dim}")

    alone = len(messages) == 1

    def more(given: Any, layer: Any) -> Generated | Several | Reason:
        graph = given.graph
        if not trace.guards.hold(layer, graph.num_edges) or trace.most < graph.num_dst or (
            trace.sends < graph.num_src or trace.up_to_edges and (
                graph.num_edges < graph.num_dst)):  # `Trace.counts`, without a call
            return why
        if trace.dtype is not None and torch.get_default_dtype() is not trace.dtype:
            return why
        if trace.listed and not trace.lists(given, graph.edge_index):
            return why
        if (trace.devices or trace.conditions) and not trace.met(given):
            return why
        if trace.effects or trace.kept:
            kept_values.begin(layer, trace, given)
        return message.generated(given) if alone else together(
            [one.generated(given) for one in messages])

    arguments = set() if stacked else {
        *trace.edges, *(name for one in messages for name in one.edge_arguments)}

    def stand_in(given: dict, graph: OpGraph) -> Generated | Several | Reason:
        if not trace.counts(graph):
            return why
        return (unfit_edges(arguments, given, graph)
                or together([one.stand_in(given, graph) for one in messages]))

    return form_of(trace, source, more, stand_in, turned)._replace(
        alike=_alike(trace, layer, kwargs), known=known)


def _alike(trace: tracing.Trace, layer: Any,
           kwargs: dict) -> Callable[[Any, dict, OpGraph, bool | None], bool]:
    """`Form.alike` for calls like this one."""
    square, dtype = tracing.square(layer, kwargs), torch.get_default_dtype()

    def alike(layer: Any, kwargs: dict, graph: OpGraph, whole: bool | None) -> bool:
        return (torch.get_default_dtype() is dtype
                and (whole is None or tracing.square(layer, kwargs) is square
                     and trace.suits(kwargs, graph.num_edges))
                and (not trace.listed or trace.lists(kwargs, graph.edge_index))
                and (not whole or trace.holds(layer, graph.num_edges)))

    return alike


def _messages(trace: tracing.Trace, layer: Any, known: reading.Known,
              stacked: bool) -> tuple[tuple[Message, ...], reading.Known]:
    """The messages to be reduced, none where there are no such; and the class as it reduces
    them."""
    message, reduces, keeps = trace.message, reductions.of(layer, known), bool(trace.kept)
    if type(message) is Parts:
        aggregate: Any = message.known.aggregate  # not None
        if known.aggregate is None and not stacked and aggregate.reduces(layer):
            several = [one.reduced_by(reduces, keeps) for one in message.messages]
            return joined(several, reduces), message.known
        message = message.whole
    return (() if message is None else (message.reduced_by(reduces, keeps),)), known


def together(parts: list[Generated]) -> Generated | Several:
    return parts[0] if len(parts) == 1 else Several(tuple(parts))


def unfit_edges(names: set[str], given: dict, graph: OpGraph) -> Reason | None:
    """Why arguments do not belong to the edges: one row may stand for all of them."""
    for name in names & given.keys():
        rows = given[name].shape[0]
        if rows != graph.num_edges:
            return reason("GA206", f"{name} has {rows} rows for {graph.num_edges} edges")
    return None


def source_of(found: tracing.Trace, kwargs: dict) -> str | None:
    """The argument that decides about dtype and device: features gathered at the source, where
    there are floats of several channels, else such of the edges."""
    for name, end in found.ends:
        if end == "j":
            x = kwargs[name]
            x = x[0] if type(x) in (tuple, list) else x
            if x.ndim > 1 and x.is_floating_point():
                return name
    return next((name for name in found.edges if kwargs[name].is_floating_point()), None)


def form_of(found: tracing.Trace, source: str, more: Any, stand_in: Any,
            stacked: bool = False) -> Form:
    """The form of a call that was traced. ``stacked``: as of `Form`."""
    ends = tuple(end for end in found.ends if end != (source, "j"))
    of_edges = (source, "j") not in found.ends
    return Form(source, None, None, more, ends, True, None, stand_in, of_edges=of_edges,
                stacked=stacked)


def not_summed(found: Form, layer: Any, kwargs: dict, edge_index: Any,
               known: reading.Known) -> Form:
    """The form of a call that may ask for more than sums and means, which ``found`` is for."""
    for one in reductions.of(layer, known):
        if one in EXTREMA:
            why = aggregation_messages.only_summed(one)
            general = form(layer, known, kwargs, edge_index, why)
            return general if type(general) is Form else found
    return found


def serves(kwargs: dict) -> bool:
    """Whether there are kernels where the tensors are: torch operations gain nothing here."""
    if driver.placed():
        return True
    for value in kwargs.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if type(one) in reading.TENSORS:
                return one.is_cuda
    return False
