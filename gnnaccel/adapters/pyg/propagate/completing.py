"""Other inputs of the messages of a call that was read: computed once the call is decided, and
stood in for before."""
from __future__ import annotations

from typing import Any

import torch

from gnnaccel.adapters.pyg.propagate import reading
from gnnaccel.adapters.tracing.expressed import CallArguments
from gnnaccel.adapters.tracing.rows.standins import Form
from gnnaccel.dispatch.generated import messages as generated
from gnnaccel.dispatch.ops import messages
from gnnaccel.dispatch.ops.aggregation import Aggregation
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.policy.reasons import Reason, reason


def with_more(layer: Any, form: Form, graph: OpGraph, aggregation: Aggregation, kwargs: dict,
              stand_in: bool) -> Aggregation | Reason:
    """The aggregation with all that its messages are made of. ``stand_in``: with tensors of no
    memory in place of what has to be computed from edges."""
    if form.stand_in is None and reading.stacked(layer, aggregation.x):
        return reason("GA206",
                      f"features of shape {list(aggregation.x.shape)} in messages that are "
                      "more than these")
    if ((form.width is not None or form.stand_in is not None)
        and torch.is_autocast_enabled(aggregation.x.device.type)):
        return reason("GA203", "autocast is on", "call the layer outside of autocast")
    if not stand_in:
        call_arguments = (kwargs if form.stand_in is None or type(kwargs) is CallArguments
                          else CallArguments(kwargs, graph, layer))
        more: Any = form.more(call_arguments, layer)  # type: ignore[misc]  # not None
        if type(more) is Reason:
            return more
        x, more = (aggregation.x, more) if form.width is None else more
        if (type(more) is messages.Shifted
            and more.rows.dtype == reading.source(kwargs, form.source).dtype):
            more = more._replace(rows=more.rows.to(x.dtype))  # as the weights made of x
    elif form.stand_in is not None:
        x, more = aggregation.x, form.stand_in(arguments(form, layer, graph, kwargs), graph)
        if type(more) is Reason:
            return more
    else:
        nothing = aggregation.x.new_empty((), requires_grad=torch.is_grad_enabled())
        x = aggregation.x if form.width is None else nothing.expand(graph.num_src, form.width)
        more = messages.Rectified(nothing.expand(graph.num_edges, *x.shape[1:]))
        if form.width is not None:
            more = messages.Gated(x, nothing.expand(graph.num_dst, form.width), more.edge,
                                  more.edge)
    if type(more) is generated.Generated and more.weight is None:
        shape: tuple[int, ...] = more.shape  # `Generated.out`, without its call
    else:
        shape = (more.out if type(more) in (generated.Generated, generated.Several)
                 else tuple(x.shape[1:]))
    return (messages.unfit(graph, x, aggregation.weight, more)
            or Aggregation(aggregation.reduce, x, aggregation.weight, shape, more,
                           aggregation.layout))


def arguments(form: Form, layer: Any, graph: OpGraph, kwargs: dict, traced: bool = False) -> dict:
    """The arguments of a call, for its messages: with the graph, where these need it, or an
    aggregate that was ``traced``."""
    if not (traced or form.stand_in is not None) or type(kwargs) is CallArguments:
        return kwargs
    return CallArguments(kwargs, graph, layer)


def completed(layer: Any, form: Form, graph: OpGraph, given: Aggregation | Reason,
              kwargs: dict, anew: bool = False) -> Aggregation | Reason:
    """The aggregation of `reading.read`, or if ``anew`` of `reading.prepared`, with all that there
    is to compute beforehand."""
    if type(given) is Aggregation and (form.costly or (anew and form.more is not None)):
        given = with_more(layer, form, graph, given, kwargs, False)
    return (given if form.apply is None
            or type(given) is Reason else given._replace(x=form.apply(given.x)))
