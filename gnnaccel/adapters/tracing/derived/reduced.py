"""Sums by an index that a ``forward`` made of its list of edges (`values`)."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.tracing.derived.values import (EdgeCount, EdgeValue, Mixed, call,
                                                      is_of_edges)
from gnnaccel.adapters.tracing.nodes.node_values import NodeCount
from gnnaccel.adapters.tracing.rows.row_count import RowCount
from gnnaccel.adapters.tracing.rows.standins import Unseen
from gnnaccel.adapters.tracing.rows.zero_rows import ZeroRows

#: torch's functions that stand-ins of features have in other ways
_WRAPPED = (torch.zeros, torch.ones, torch.full, torch.arange, torch.bincount, torch.ones_like,
            torch.zeros_like, torch.full_like)
#: functions of PyG that say nothing about features
OF_PYG = frozenset(("add_self_loops", "add_remaining_self_loops", "remove_self_loops", "coalesce",
                    "to_undirected", "sort_edge_index", "degree", "scatter", "softmax",
                    "maybe_num_nodes", "contains_self_loops", "gcn_norm", "get_laplacian",
                    "cumsum"))
OF_TORCH_SCATTER = frozenset(("scatter", "scatter_add", "scatter_sum", "scatter_mean",
                              "scatter_max", "scatter_min", "scatter_softmax"))


def into(zeros: ZeroRows, name: str, in_place: bool, args: tuple, kwargs: dict) -> Any:
    """Zeros with something reduced into them; ``name``: of the method without its last "_"."""
    of_edges = next(one for one in (*args, *kwargs.values()) if isinstance(one, EdgeValue))
    taken = zeros.taken
    try:
        result = call(of_edges.steps, getattr(Tensor, name), (zeros, *args), kwargs)
    except Mixed:
        args = tuple(map(_as_argument, args))
        return zeros._reduced(name, in_place, *args, **{key: _as_argument(one)
                                                        for key, one in kwargs.items()})
    if in_place:
        if taken:
            raise Unseen
        zeros.__class__, zeros.__dict__ = EdgeValue, result.__dict__  # type: ignore[assignment]
        return zeros
    return result


def _as_argument(value: Any) -> Any:
    """An index as an end of the edges, and other such rows beside features."""
    if not isinstance(value, EdgeValue):
        return value
    if value.laid is not None or value.dtype is torch.int64 and value.dim() == 1:
        return value.ids()
    return value.rows()


def instead(steps: Any, function: Callable, stand_in: Callable | None) -> Callable:
    """What stands for a ``function``, which runs as it is on what is made of edges alone, and which
    ``stand_in`` stands for elsewhere."""

    @functools.wraps(function, updated=())
    def called(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        if function in (torch.ones, torch.full) and _is_whole(kwargs.get("dtype")):
            try:
                return call(steps, function, args, kwargs)
            except Mixed:
                raise Unseen from None
        if is_of_edges(given) or function is torch.arange and any(
            isinstance(one, RowCount) for one in given):
            args = tuple([_counted(steps, one) for one in args])
            kwargs = {key: _counted(steps, one) for key, one in kwargs.items()}
            if not wrapped(function) or is_of_edges((*args, *kwargs.values())) or (
                function is torch.arange):
                try:
                    return call(steps, function, args, kwargs)
                except Mixed:
                    args = tuple(map(_as_argument, args))
                    kwargs = {key: _as_argument(one) for key, one in kwargs.items()}
        if stand_in is None:
            raise Unseen
        return stand_in(*args, **kwargs)

    return called


def _is_whole(dtype: Any) -> bool:
    return isinstance(dtype, torch.dtype) and not dtype.is_floating_point


def _counted(steps: Any, value: Any) -> Any:
    """A number that is how many nodes there are as such, in sizes, too."""
    if type(value) in (tuple, list):
        return type(value)([_counted(steps, one) for one in value])
    if type(value) is EdgeCount and steps.program.values[value.at] == steps.nodes:
        count = NodeCount(steps.some)
        return count if value == count else value
    return value


def wrapped(function: Any) -> bool:
    """Whether it is one of torch's functions that `instead` stands for."""
    return any(function is one for one in _WRAPPED)
