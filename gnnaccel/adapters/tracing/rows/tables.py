"""Tables of which a ``message`` picks by the ids of an edge's ends: rows at the ends of the edges
where a table has one for each node, else rows of the edges; and one row that stands for each edge.
"""
from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.tracing.attention.traced import Param
from gnnaccel.adapters.tracing.expressed import Once
from gnnaccel.adapters.tracing.nodes.nodes_read import node_rows
from gnnaccel.adapters.tracing.rows import pieces, pointwise, products, whole_numbers
from gnnaccel.adapters.tracing.rows.row_count import ROWS, RowCount
from gnnaccel.adapters.tracing.rows.specials import Special
from gnnaccel.adapters.tracing.rows.standins import Unseen


def at_end(operation: str, table: Any, *place: Any, **named: Any) -> pointwise.Rows:
    """The rows that an index names, by the ``operation`` "getitem" or "index_select"."""
    *dim, index = *place, *named.values()
    if operation not in ("getitem", "index_select") or not isinstance(table, Param):
        raise Unseen
    if dim not in ([], [0]) or list(named) not in ([], ["index"], ["dim", "index"]):
        raise Unseen
    if type(index) is not Special or not index.end or index.functions is None:
        raise Unseen
    functions, meta = index.functions, table.meta
    if not meta.dim() or meta.dtype == torch.bool:
        raise Unseen
    # calls with more nodes at this end are native, as the host may refuse them
    (functions.counts if index.end == "i" else functions.sending).append(meta.shape[0])
    which = "v" if index.end == "i" else "u"

    def rows(given: Any) -> Tensor:
        values, count = table.make(given), given.graph.rows(which)
        return values if values.shape[0] == count else values[:count]

    result = pointwise.made_rows(index.end, node_rows(Once(rows), index.end),
                                 meta.new_empty(ROWS, *meta.shape[1:]),
                                 frozenset(table.roots), table.roots)
    return result if torch.is_grad_enabled() else pieces.detached(result)


def at_places(table: Param, place: tuple) -> pointwise.Rows:
    """The numbers at places of a table that an edge names in several dimensions, such as those of a
    matrix by the ids of both ends."""
    ids = tuple([ids_of(one) if type(one) is Special else one for one in place])
    named = [whole_numbers.taken(one) for one in ids if isinstance(one, pointwise.Rows)]
    if any(one.meta.dtype != torch.int64 for one in named) or not all(
        isinstance(one, pointwise.Rows) or _is_plain(one) for one in ids):
        raise Unseen

    def picked(table: Tensor, *rows: Tensor) -> Tensor:
        remaining = iter(rows)
        return operator.getitem(table, tuple([
            next(remaining) if isinstance(one, pointwise.Rows) else one for one in ids]))

    result = products.product(picked, (table, *named))
    return result if torch.is_grad_enabled() else pieces.detached(result)


def _is_plain(place: Any) -> bool:
    """Whether a place in one dimension is a number, or some of its numbers."""
    return type(place) is int or type(place) is slice and all(
        type(one) in (int, type(None)) for one in (place.start, place.stop, place.step))


def ids_of(index: Special, change: Callable[[Tensor], Tensor] | None = None) -> pointwise.Rows:
    """The ids of the nodes at one end of the edges as whole numbers of these, after a
    ``change``."""
    if not index.end:
        raise Unseen
    which = "v" if index.end == "i" else "u"

    def make(given: Any) -> Tensor:
        ids = given.graph.index(which)
        return ids if change is None else change(ids)

    meta = torch.empty(ROWS, dtype=torch.int64, device="meta")
    return pointwise.made_rows("e", Once(make), meta, frozenset(), (_edges,))


def _edges(given: Any) -> Tensor:
    return given.graph.edge_index


def for_edges(row: Param, sizes: tuple) -> pointwise.Rows:
    """A parameter of one row, repeated for each of the edges."""
    sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    tail = tuple(row.meta.shape[row.meta.dim() - len(sizes) + 1:])
    if not sizes or type(sizes[0]) is not RowCount or any(
        type(one) is not int or one != 1 for one in sizes[1:]) or (
        tuple(row.meta.shape) not in (tail, (1, *tail))):
        raise Unseen
    meta = row.meta.new_empty(ROWS, *tail)
    return pieces.recorded(pointwise.Rows(pointwise.tree_of(row, meta), meta))
