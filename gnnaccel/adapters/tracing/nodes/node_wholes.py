"""What a function makes of all nodes together: one row for all, such as a mean, or one for each of
the graphs that they belong to, such as the sum of a graph's nodes.

torch makes it of the rows of all nodes, so that a function is followed by how its result looks.
"""
from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters import own
from gnnaccel.adapters.tracing.attention.traced import Param, Value, _call
from gnnaccel.adapters.tracing.expressed import Once, call_of
from gnnaccel.adapters.tracing.nodes.node_values import NodeCount, NodeValue
from gnnaccel.adapters.tracing.nodes.nodes_read import as_given
from gnnaccel.adapters.tracing.nodes.reduced import before, roots_of
from gnnaccel.adapters.tracing.rows.row_count import ROWS
from gnnaccel.adapters.tracing.rows.standins import Unseen

#: rows that a stand-in for values per graph claims to have, where their number is not told
GRAPHS = 7907
_POOLS = ("global_add_pool", "global_mean_pool", "global_max_pool")
#: other numbers of rows, by which a result is told that depends on theirs
_OTHERS = {ROWS: 7901, GRAPHS: 7883}


def looks(function: Callable, args: tuple, kwargs: dict) -> Tensor:
    """How a result looks: with a row for each node, or for each graph, or of a shape that does not
    depend on how many there are."""
    found, other = (_result(function, args, kwargs, rows) for rows in ({}, _OTHERS))
    shape = tuple([_OTHERS.get(one, one) for one in found.shape[:1]]) + tuple(found.shape[1:])
    if not _OTHERS.keys().isdisjoint(found.shape[1:]) or tuple(other.shape) != shape:
        raise Unseen
    return found


def _result(function: Callable, args: tuple, kwargs: dict, rows: dict[int, int]) -> Tensor:
    try:
        result = function(*_metas(args, rows), **_metas(kwargs, rows))
    except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
        raise Unseen from None
    if not isinstance(result, Tensor):
        raise Unseen
    return result


def _metas(value: Any, rows: dict[int, int]) -> Any:
    """``value`` with tensors in place of stand-ins, of other numbers of rows."""
    if type(value) in (tuple, list):
        return type(value)([_metas(one, rows) for one in value])
    if type(value) is dict:
        return {key: _metas(one, rows) for key, one in value.items()}
    if type(value) is NodeCount:
        count = ROWS if type(value.of) is str else value.of.meta.shape[0]
        return rows.get(count, count)
    if not isinstance(value, Value):
        return value
    first = value.meta.shape[0] if value.meta.dim() else 0
    return (value.meta if first not in rows
            else value.meta.new_empty(rows[first], *value.meta.shape[1:]))


def picked(value: NodeValue, place: Any) -> Any:
    """``value[place]``: the rows that ids name, or some of those that belong to no nodes."""
    first = place[0] if type(place) is tuple and place else place
    if type(first) is NodeValue and first.meta.dtype != torch.int64 or isinstance(first, list):
        raise Unseen
    if value.of_nodes and type(first) is not NodeValue:
        if value.meta.is_floating_point() or value.meta.dim() != 1:
            raise Unseen
        return LargestId(value, operator.itemgetter(-1))
    result = value.operate("getitem", operator.getitem, (value, place), {})
    if type(first) is NodeValue:
        result.rows = first.rows
    return result


def at_edges(name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
    """An operation on rows of the edges and on numbers of all nodes, which torch computes before
    the messages."""
    return _call(name, function, tuple([_parameter(one) for one in args]),
                 {key: _parameter(one) for key, one in kwargs.items()})


def _parameter(value: Any) -> Any:
    """What stands for numbers of all nodes where messages are made of them."""
    if type(value) is not NodeValue:
        return value
    if value.of_nodes or GRAPHS in value.meta.shape or not value.meta.is_floating_point():
        raise Unseen
    value = value.as_now()
    value.steps.reached.append(value)
    once = Once(before(value.steps, value))
    return Param(lambda given: once(call_of(as_given(given))), value.meta,
                 tuple(dict.fromkeys(roots_of(value.steps, value))), frozenset((once,)))


def extreme(value: NodeValue, function: Callable, args: tuple, kwargs: dict) -> Any:
    """The largest or smallest numbers along a dimension, with their places, or of all."""
    if len(args) + len(kwargs) == 1:
        if not value.meta.is_floating_point():
            return LargestId(value, function)
        return value.operate("amax", function, args, kwargs)
    results = []
    for at in range(2):
        def one(*args: Any, at: int = at, **kwargs: Any) -> Tensor:
            return function(*args, **kwargs)[at]

        results.append(value.operate("amax", one, args, kwargs))
    return torch.return_types.max(tuple(results))


class LargestId:
    """The largest of the ids of graphs, of one for each node; with one more, how many graphs there
    are up to that."""

    def __init__(self, ids: NodeValue, function: Callable):
        self._ids, self._function = ids, function

    def item(self) -> LargestId:
        return self

    def __add__(self, more: Any) -> NodeCount:
        if type(more) is not int or more != 1:
            raise Unseen
        function = self._function

        def rows(ids: Tensor) -> Tensor:
            return ids.new_empty(int(function(ids)) + 1, 0)

        meta = torch.empty(GRAPHS, 0, dtype=torch.int64, device="meta")
        return NodeCount(self._ids.steps.made(rows, (self._ids,), {}, meta))

    __radd__ = __add__

    def _refuses(self, *args: Any) -> Any:
        raise Unseen

    __int__ = __index__ = __float__ = __bool__ = __str__ = __repr__ = __format__ = _refuses
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuses
    __hash__ = object.__hash__


def zeros(steps: Any, count: Any, like: Tensor, number: float, beside: NodeValue) -> NodeValue:
    """Rows of a ``number``, ``count`` of them, that look like ``like``, where ``beside`` is."""
    tail, dtype = tuple(like.shape[1:]), like.dtype

    def rows(beside: Tensor, count: int) -> Tensor:
        return beside.new_full((count, *tail), number, dtype=dtype)

    return _made(steps, rows, (beside, count), like)


def _made(steps: Any, function: Callable, args: tuple, like: Tensor) -> NodeValue:
    """``function(*args)``, the last of which says how many rows there are, such as ``like``."""
    count = args[-1]
    result = steps.made(function, args, {}, _of_count(count, like))
    result.rows = count.of.rows if type(count) is NodeCount else ("", False)
    result.alone = True
    return result


def _of_count(count: Any, like: Tensor) -> Tensor:
    """How ``count`` rows like these look."""
    if type(count) is NodeCount and type(count.of) is NodeValue:
        count = count.of.meta.shape[0]
        return like.new_empty(count, *like.shape[1:])
    if count is not None and type(count) is not int or count in _OTHERS:
        raise Unseen
    return like.new_empty(GRAPHS if count is None else count, *like.shape[1:])


def reduced(function: Callable, src: Any, index: Any, dim: Any, count: Any) -> NodeValue:
    """``function(src, index, dim=dim, dim_size=count)`` of a library, which reduces rows of nodes
    to those of ``count`` graphs, or of as many as ``index`` names."""
    if type(src) is not NodeValue or type(index) is not NodeValue or not src.steps.wholes or (
        type(dim) is not int or dim not in (0, -src.meta.dim())
        or index.meta.shape[:1] != src.meta.shape[:1]):
        raise Unseen
    return _made(src.steps, lambda src, index, count: function(
        src, index, dim=dim, dim_size=count), (src, index, count), src.meta)


def scatter(src: Any, index: Any, dim: Any, count: Any, reduce: Any) -> NodeValue:
    """PyG's ``scatter``."""
    function = sys.modules["torch_geometric.utils"].scatter
    return reduced(functools.partial(function, reduce=reduce), src, index, dim, count)


def pool_of(value: Any) -> Any:
    """Stand-in for one of PyG's pools; None for others."""
    name = getattr(value, "__name__", "")
    if name in _POOLS and own.is_function(value, "torch_geometric", name):
        return functools.partial(pool, value)
    return None


def pool(function: Callable, x: Any, batch: Any, size: Any = None) -> NodeValue:
    """A pool of PyG's over the nodes of each graph."""
    return reduced(lambda x, batch, dim, dim_size: function(x, batch, dim_size), x, batch, 0, size)


def counted(function: Callable, index: NodeValue, count: Any, dtype: Any) -> NodeValue:
    """PyG's ``degree``, which ``function`` is: how many nodes each graph has."""
    if not index.steps.wholes or index.meta.dim() != 1:
        raise Unseen
    return _made(index.steps, lambda index, count: function(index, count, dtype), (index, count),
                 torch.empty(ROWS, dtype=dtype, device="meta"))


def bincount(index: NodeValue, minlength: Any) -> NodeValue:
    """`torch.bincount`, of as many numbers or more."""
    if not index.steps.wholes or index.meta.dim() != 1:
        raise Unseen
    return _made(index.steps, lambda index, least, _: torch.bincount(index, None, least),
                 (index, minlength, None), torch.empty(ROWS, dtype=torch.int64, device="meta"))


def softmax(src: Any, index: Any, count: Any, dim: Any) -> NodeValue:
    """PyG's ``softmax`` over the nodes of each graph."""
    if type(src) is not NodeValue or not src.steps.wholes or type(dim) is not int:
        raise Unseen
    function = sys.modules["torch_geometric.utils"].softmax
    result = src.steps.made(
        lambda src, index, count: function(src, index, num_nodes=count, dim=dim),
        (src, index, count), {}, torch.empty_like(src.meta))
    result.rows, result.alone = src.rows, True
    return result
