"""A call of ``propagate`` whose ``aggregate`` is the user's own, read as reductions that we have.

`traced_aggregates` finds out what it reduces. Where that is nothing but the messages, the call is
read as if the host's ``aggregate`` did these reductions; else kernels are written for everything
that is reduced. What torch makes of the results node by node, torch does afterwards.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters.guards import context_reason
from gnnaccel.adapters.pyg.propagate import generated, own_aggregations, reading
from gnnaccel.adapters.pyg.propagate.stock import Aggregate
from gnnaccel.adapters.pyg.propagate.traced_aggregates import Traced, aggregated
from gnnaccel.adapters.tracing import expressing, kept_values, manners, tracing
from gnnaccel.adapters.tracing.expressed import Once
from gnnaccel.adapters.tracing.joined import joined
from gnnaccel.adapters.tracing.layer import guarded
from gnnaccel.adapters.tracing.nodes.node_values import NodeCount, NodeValue
from gnnaccel.adapters.tracing.nodes.straight import combined
from gnnaccel.adapters.tracing.noted import notes
from gnnaccel.adapters.tracing.rows import channels, pointwise
from gnnaccel.adapters.tracing.rows.standins import Form, Unseen
from gnnaccel.cuda.runtime import capture
from gnnaccel.dispatch.generated.messages import Generated, Part, Several
from gnnaccel.dispatch.graph import self_loops
from gnnaccel.dispatch.graph.tensor_ref import TensorRef
from gnnaccel.dispatch.ops.aggregation import Reduce
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.policy.reasons import Reason, reason


class _Summed(NamedTuple):
    """An ``aggregate``, understood. ``messages``: what is reduced, None for nothing but the layer's
    own messages; ``dims``: their numbers of dimensions; ``sizes``: the arguments that say how many
    nodes there are; ``sized``: whether all reductions are told; ``known``: of the class, with what
    this is for its ``aggregate``."""

    messages: tuple[generated.Message, ...] | None
    dims: frozenset[int]
    sizes: frozenset[str | int]
    sized: bool
    known: reading.Known


def own(layer: Any, known: reading.Known) -> bool:
    """Whether the layer's ``aggregate`` is the user's own, or hands messages to an aggregation that
    is."""
    return known.of_user or known.aggregate is None and own_aggregations.is_users(layer.aggr_module)


def read(layer: Any, known: reading.Known, edge_index: Any, kwargs: dict) -> reading.Read | Reason:
    """As `reading.read`."""
    why: Any = known.why or reason("GA201", "the aggregation is "
                                            f"{type(layer.aggr_module).__name__}")
    if type(edge_index) is not Tensor or edge_index.layout != torch.strided:
        return why
    if known.stock is not None or self_loops.of(edge_index) is not None:
        return why
    trace = tracing.trace(layer, known, kwargs, _MANNER, edge_index)
    summed: _Summed | None = trace.message
    if summed is None or summed.known.why is not None or any(
        layer.node_dim not in (0, -dims) for dims in summed.dims):
        return context_reason() or why
    if summed.messages is None:
        call = reading.read_edges(layer, edge_index, kwargs, summed.known)
    else:
        form = (form_of(trace, generated.source_of(trace, kwargs), summed.messages, why)
                if generated.serves(kwargs) else why)
        call = (form if type(form) is Reason
                else reading.read_as(form, layer, edge_index, kwargs, summed.known))
    if type(call) is Reason:
        return why if call.code in reading.NO_FORM else call
    graph = call.graph
    if not trace.counts(graph) or not rows_are_nodes(graph, summed, kwargs):
        return why
    alike = _alike(layer, call, trace, summed, kwargs)
    return call._replace(form=call.form._replace(alike=alike))


def _alike(layer: Any, call: reading.Read, trace: tracing.Trace, summed: _Summed,
           kwargs: dict) -> Callable[[Any, dict, OpGraph, bool | None], bool]:
    """`Form.alike` for calls like ``call``."""
    of_message, count, edge_index = call.form.alike, call.graph.num_dst, call.graph.edge_index
    dtype, square = torch.get_default_dtype(), tracing.square(layer, kwargs)
    counted = None if summed.sized or edge_index.is_inference() else TensorRef(edge_index)

    def alike(layer: Any, kwargs: dict, graph: OpGraph, whole: bool | None) -> bool:
        if (torch.get_default_dtype() is not dtype or graph.num_dst > trace.most
            or graph.num_src > trace.sends
            or trace.up_to_edges and graph.num_dst > graph.num_edges
            or whole is not None and tracing.square(layer, kwargs) is not square
            or trace.listed and not trace.lists(kwargs, graph.edge_index)
            or self_loops.of(graph.edge_index) is not None):
            return False
        if of_message is not None and not of_message(layer, kwargs, graph, whole):
            return False
        if whole is not None and not trace.suits(kwargs, graph.num_edges) or (
            (whole or summed.messages is None) and not trace.holds(layer, graph.num_edges)):
            return False
        same_count = (counted is not None and counted.unmoved(graph.edge_index)
                      and graph.num_dst == count and not _replayed_over_others())
        return rows_are_nodes(graph, summed, kwargs, same_count)

    return alike


def form_of(trace: tracing.Trace, source: str | None, messages: tuple[generated.Message, ...],
          why: Reason) -> Form | Reason:
    """Form of a call with these messages; ``why`` if none, or if what was read has changed."""
    if source is None:
        return why

    def more(given: Any, layer: Any) -> Generated | Several | Reason:
        if not trace.holds(layer, given.graph.num_edges) or not trace.met(given):
            return why
        kept_values.begin(layer, trace, given)
        return generated.together([one.generated(given) for one in messages])

    arguments = {*trace.edges, *(name for one in messages for name in one.edge_arguments)}

    def stand_in(given: dict, graph: OpGraph) -> Generated | Several | Reason:
        return (generated.unfit_edges(arguments, given, graph)
                or generated.together([one.stand_in(given, graph) for one in messages]))

    return generated.form_of(trace, source, more, stand_in)


def _replayed_over_others() -> bool:
    """Whether this call is being captured, to be replayed over edges that may be others."""
    return capture.capturing() and capture.here.held is None


def rows_are_nodes(graph: OpGraph, summed: Any, kwargs: dict, counted: bool = False) -> bool:
    """Whether results have a row for each node that receives. Reductions that are not told how many
    rows to make end with the last node that an edge enters: the device is asked for it, as the host
    asks, unless it was ``counted`` over these edges."""
    if not graph.num_dst:
        return False
    for name in summed.sizes:
        if (name if type(name) is int else kwargs[name].shape[0]) != graph.num_dst:
            return False
    if summed.sized or counted or not graph.num_edges:
        return summed.sized
    return not capture.capturing() and int(graph.index("v").max()) + 1 == graph.num_dst


def _found(out: Any, layer: Any) -> _Summed | None:
    """A traced message and its ``aggregate`` together; None without a reduction."""
    traced: Traced
    result, sent, traced = out
    result = result_of(result)
    places = sorted(traced.needed(result))
    reductions = [traced.reductions[place] for place in places]
    if not reductions:
        return None
    rows = [one for one, _ in reductions]
    reduces: tuple[Reduce, ...] = tuple(reduce for _, reduce in reductions)
    messages, counts = None, [(0, torch.cat, 0)] * len(rows)
    # arguments of the aggregate tell how many nodes there are, too; rows that are given back are
    # those that are reduced
    if (traced.ends or notes().own or traced.by_rows or notes().conditions
        or not all(one is sent for one in rows) or len(set(reduces)) < len(reduces)
        or any(map(expressing.side_by_side, rows))):
        messages, reduces, counts = messages_of(reductions, layer)

    of_reductions, put = combined(traced, result, places), any(count for count, _, _ in counts)

    def combine(layer: Any, results: list[Tensor], kwargs: dict) -> Any:
        return of_reductions(put_together(results, counts) if put else results, kwargs)

    known = reading.Known(type(layer), Aggregate(lambda layer: reduces, None, combine))
    return _Summed(messages, frozenset(one.meta.dim() for one in rows), frozenset(traced.sizes),
                   traced.sized, known)


def messages_of(reductions: list[tuple[pointwise.Rows, str]], layer: Any) -> tuple[
        tuple[generated.Message, ...], tuple[Reduce, ...], list[_Place]]:
    """The messages that kernels reduce, the reductions, and of each reduction the number of
    messages, 0 for one as it is, with how their results are put together, and in which dimension.
    Unseen where kernels cannot be written for them."""
    messages: list[generated.Message] = []
    reduces, counts = [], []
    for rows, reduce in reductions:
        if isinstance(rows, pointwise.Deferred) and rows.is_made:
            rows = rows.alone()  # others are made of it: what cancels out does so to the last bit
        parts: list[Any] = [*expressing.side_by_side(rows)]
        count, put, dim = len(parts), torch.cat, rows.along if parts else 0
        if not parts:
            try:
                parts = [expressing.found(rows, layer)]
            except Unseen:
                several, dim = channels.apart(rows)
                parts = [expressing.found(one, layer) for one in several]
                count, put = len(several), torch.stack
        for one in parts:
            if one is None:
                raise Unseen
            messages.append(one.reduced_by((reduce,)))
            reduces.append(reduce)
        counts.append((count, put, dim))
    if len(messages) == 1:
        return tuple(messages), tuple(reduces), counts
    return joined(messages, reduces), tuple(map(Part, reduces, range(len(reduces)))), counts


#: of one reduction: how many results it has, 0 for a single one; how these are put together, and
#: in which dimension
_Place = tuple[int, Callable[..., Tensor], int]


def put_together(results: list[Tensor], counts: list[_Place]) -> list[Tensor]:
    """Results of reductions, each made of as many as ``counts`` says."""
    remaining = iter(results)
    return [put([next(remaining) for _ in range(count)], dim) if count else next(remaining)
            for count, put, dim in counts]


def result_of(value: Any) -> Any:
    """The value of an ``aggregate``, with computations in place of rows of the edges. Unseen for
    what no result may be."""
    if type(value) in (tuple, list):
        return type(value)([result_of(one) for one in value])
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: result_of(one) for key, one in value.items()}
    if isinstance(value, pointwise.Rows):
        return kept_values.given_back(value)
    if type(value) in (*guarded.PLAIN, NodeValue, NodeCount) or isinstance(value, Once):
        return value
    raise Unseen


_MANNER = tracing.Manner(manners.OF_MESSAGES, manners.prepared, pointwise.rows, _found, True,
                         aggregated, kept_values.kept, Traced, wholes=True)
