"""Values per node, such as sums of messages or degrees, that go on at the edges again: rows at one
end of the edges, which are computed before the messages."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.tracing import expressing
from gnnaccel.adapters.tracing.attention.traced import Make, Param
from gnnaccel.adapters.tracing.expressed import Before, Once, Reduced
from gnnaccel.adapters.tracing.nodes.node_values import NodeValue, Steps
from gnnaccel.adapters.tracing.nodes.nodes_read import OfRead
from gnnaccel.adapters.tracing.nodes.straight import at_edges
from gnnaccel.adapters.tracing.rows import pieces, pointwise
from gnnaccel.adapters.tracing.rows.specials import Special, Spread
from gnnaccel.adapters.tracing.rows.standins import Unseen
from gnnaccel.dispatch.generated.tree import leaves


def at_end(value: NodeValue, end: str) -> pointwise.Rows:
    """The values as rows at this end of the edges."""
    value = value.as_now()
    steps, dtype = value.steps, value.meta.dtype
    if value.rows[0] != end and not (value.rows[1] and steps.square):
        raise Unseen  # whether there is a row for each node cannot be told
    compute = before(steps, value)

    def make(given: Any) -> Tensor:
        if type(given) is OfRead:  # all nodes have a part in what is made of them together
            given = given.of_call()  # `as_given`, without its call
        out = compute(given if given.over is None else given.over())
        missing = given.graph.rows("v" if end == "i" else "u") - out.shape[0]
        # nodes beyond have no edges
        return torch.cat([out, out.new_zeros(missing, *out.shape[1:])]) if missing else out

    def like(given: Any) -> Tensor:
        return given.graph.edge_index.new_empty((), dtype=dtype)

    roots = tuple(dict.fromkeys((*roots_of(steps, value), like)))
    reducers = [_before(steps, place) for place in steps.needed(value)]
    names: frozenset[Any] = frozenset((*reducers, *_written(steps, value))) or (
        frozenset((make,)))
    rows = pointwise.made_rows(end, Once(make), value.meta, names, roots)
    return rows if torch.is_grad_enabled() else pieces.detached(rows)


def before(steps: Steps, value: NodeValue) -> Make:
    """Computes the values before the messages of a call."""
    steps.goes_on = True
    return at_edges(steps, value, {k: _before(steps, k) for k in steps.needed(value)})


def _before(steps: Steps, at: int) -> Before:
    """The reduction at this place, done once in a call."""
    if at not in steps.before:
        rows, reduce = steps.reductions[at]
        message = expressing.found(rows, None)
        if message is None:
            raise Unseen
        steps.before[at] = Reduced(message.reduced_by((reduce,)), reduce)
    return steps.before[at]


def _written(steps: Steps, value: NodeValue) -> list[Before]:
    """Rows written for each edge of which torch makes the values."""
    return [name for rows in steps.of_rows(value) for leaf in leaves(rows.tree)
            for name in leaf.names if isinstance(name, Before)]


def roots_of(steps: Steps, value: NodeValue) -> list[Make]:
    """The tensors of which the values are made."""
    roots: list[Make] = [root for rows in steps.of_rows(value) for leaf in leaves(rows.tree)
                         for root in leaf.roots]
    pending, visited = [value], set()
    while pending:
        one = pending.pop()
        if one.at in visited:
            continue
        visited.add(one.at)
        step = steps.done[one.at]
        if type(step) is int:
            roots += [root for leaf in leaves(steps.reductions[step][0].alone().tree)
                      for root in leaf.roots]
            continue
        for arg in (*step[1], *step[2].values()):
            for part in arg if isinstance(arg, (tuple, list)) else (arg,):
                if type(part) is NodeValue:
                    pending.append(part)
                elif isinstance(part, Param):
                    roots += part.roots
                elif isinstance(part, pointwise.Rows):
                    roots += [root for leaf in leaves(part.tree) for root in leaf.roots]
    return roots


def index_select(value: Any, dim: Any = None, index: Any = None) -> Any:
    """`torch.index_select` of values per node."""
    if type(value) is not NodeValue or type(dim) is not int or dim not in (0, -value.meta.dim()):
        raise Unseen
    return gathered(value, index)


def along(value: Any, dim: Any = None, index: Any = None) -> Any:
    """`torch.gather` of values per node, by an index that is repeated for all of a row."""
    if type(index) is not Spread or index.tail != tuple(value.meta.shape[1:]):
        raise Unseen
    return index_select(value, dim, index.of)


def gathered(value: NodeValue, index: Any, *channels: Any) -> pointwise.Rows:
    """Each edge's row of values per node: rows at the end of the edges that the index names.
    ``channels``: what is picked of each, where the index is the first of several."""
    if type(index) is not Special or not index.end or value.rows[0] == "":
        raise Unseen
    rows = value.steps.picked(value, index)
    if not channels:
        return rows
    if not all(one is None or one is Ellipsis or type(one) in (int, slice) for one in channels):
        raise Unseen
    place = (slice(None), *channels)
    return rows[place]
