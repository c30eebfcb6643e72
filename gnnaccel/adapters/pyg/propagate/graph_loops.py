"""PyG's functions that add and remove self loops.

Only what follows from the edges is kept: the new edges, and for each of them the edge whose weight
it has. Weights are read in each call.
"""
from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, compiler
from torch.compiler import is_dynamo_compiling

from gnnaccel.adapters import own
from gnnaccel.dispatch.uncompiled import kept_apart, uncompiled

_FILLED = -1  # in the place of an edge's number: a loop that was added


class _Computing(threading.local):
    """Whether this thread computes something that is kept; its parts are then not kept as well."""

    now = False


computing = _Computing()
uncompiled(own.Named.why)


def looping(native: Callable) -> Callable:
    """``native``, a host's function that adds or removes loops, with kept edges.

    ``native(edge_index, edge_attr, fill_value, num_nodes)`` gives edges and their weights; all but
    ``edge_index`` are optional. Its result is put together from what is kept (`kept_results.find`)
    where there are no weights, or plain ones without a gradient. Otherwise ``native`` runs.
    """
    name = f"{native.__module__}.{native.__qualname__}"
    named = own.Named(own.original(native))

    def numbered(edge_index: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
        edges = edge_index.shape[1]
        ids = torch.arange(edges, device=edge_index.device)
        looped_edges, source = native(edge_index, ids, **rest)
        return looped_edges, source.masked_fill_(source == _FILLED, edges)

    @kept_apart
    @functools.wraps(native)
    def looped(edge_index: Any, edge_attr: Any = None, *more: Any, **kwargs: Any) -> Any:
        # compiled regions trace the host's own code; or a function that it calls is not the host's
        if (is_dynamo_compiling() or compiler._is_compiling_flag  # `is_compiling`
            or computing.now or named.why() is not None):
            return native(edge_index, edge_attr, *more, **kwargs)
        from gnnaccel.adapters.pyg.propagate import kept_results

        options = {**dict(zip(("fill_value", "num_nodes"), more)), **kwargs}
        if edge_attr is None:
            result = kept_results.find(name, native, (edge_index, None, *more), kwargs)
        elif (plain(edge_attr, edge_index)
              and type(options.get("fill_value")) in (int, float, type(None))):
            fills = "fill_value" in options or "num_nodes" in options
            rest = {"fill_value": _FILLED, "num_nodes": options.get("num_nodes")} if fills else {}
            result = kept_results.find(f"{name} by edge", numbered, (edge_index,), rest)
            if result is not None:
                fill = options.get("fill_value") if fills else 0.0
                return result[0], _read(edge_attr, result[1], 1.0 if fill is None else fill)
        else:
            result = None
        return native(edge_index, edge_attr, *more, **kwargs) if result is None else result

    return looped


def plain(edge_attr: Any, edge_index: Any) -> bool:
    """Whether a gather of these weights gives what the host gives.

    With gradients it would not: the host sends those of repeated loops elsewhere.
    """
    return (type(edge_attr) is Tensor and type(edge_index) is Tensor
            and not edge_attr.requires_grad and edge_attr.dim() > 0
            and edge_attr.layout is torch.strided and edge_index.dim() == 2
            and edge_attr.shape[0] == edge_index.shape[1])


def _read(edge_attr: Tensor, source: Tensor, fill: float) -> Tensor:
    """The weights of the edges numbered ``source``; ``fill`` for the number after the last."""
    return torch.cat(
        [edge_attr, edge_attr.new_full((1, *edge_attr.shape[1:]), fill)]).index_select(0, source)
