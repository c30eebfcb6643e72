"""Answers of a tagged index object from device tensors, made once and kept with it: no transfer
when asked again."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.dgl import graphs

_KEY = "gnnaccel.bridge"
SRC, DST = 0, 1


def kept(index: Any, key: tuple, make: Callable[[], Any]) -> Any:
    """The first result of ``make`` for this key. It lives as long as the index object, in the
    ``_cache`` where DGL keeps its own."""
    store = index._cache.setdefault(_KEY, {})
    result = store.get(key)
    if result is None:
        # made in inference mode it could not take part in training later
        with torch.inference_mode(False):
            result = store.setdefault(key, make())
    return result


def edges(index: Any, etype: int) -> tuple[Tensor, Tensor, Tensor]:
    """(src, dst, id) of all edges by id. Views of the structure, as DGL's of a COO are."""
    src, dst = graphs.of_index(index, etype).edge_index.unbind(0)
    return src, dst, torch.arange(len(src), dtype=src.dtype, device=src.device)


def some_edges(index: Any, etype: int, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(src, dst, id) of the edges with these ids."""
    edge_index = graphs.of_index(index, etype).edge_index
    _check(ids, edge_index.shape[1], "edge")
    src, dst = edge_index.index_select(1, ids).unbind(0)
    return src, dst, ids


def degrees(index: Any, etype: int, end: int, nodes: Tensor | None = None) -> Tensor:
    """[nodes] numbers of edges at the end ``SRC`` or ``DST``; ``nodes`` None: all. A tensor of the
    caller's own."""
    counts = kept(index, ("degrees", etype, end),
                  lambda: _count(graphs.of_index(index, etype), end))
    if nodes is None:
        return counts.clone()
    _check(nodes, len(counts), "node")
    return counts.index_select(0, nodes)


def _check(ids: Tensor, size: int, what: str) -> None:
    """DGLError for an id out of range: a kernel that reads it would end the process.

    Waits for the device. During a capture nothing is checked.
    """
    from dgl.base import DGLError

    if ids.numel() == 0 or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return
    if bool(((ids < 0) | (ids >= size)).any()):
        raise DGLError(f"There is no such {what}: ids lie between 0 and {size - 1}, and "
                       f"{ids.min().item()} to {ids.max().item()} are asked for.")


def _count(edges: graphs.Edges, end: int) -> Tensor:
    ends = edges.edge_index[end]
    zeros = torch.zeros((edges.num_src, edges.num_dst)[end], dtype=ends.dtype, device=ends.device)
    return zeros.index_add_(0, ends, torch.ones_like(ends))


def record_stream(index: Any, stream: Any) -> None:
    """Record ``stream`` for all kept tensors: their memory is not reused before its work is
    done."""
    tensors = list(index._cache.get(_KEY, {}).values())
    tensors += [edges.edge_index for edges in graphs.kept_edges(index)]
    for tensor in tensors:
        for one in tensor if isinstance(tensor, (tuple, list)) else (tensor,):
            if isinstance(one, Tensor):
                one.record_stream(stream)


def has_nodes(index: Any, ntype: int, nodes: Tensor) -> Tensor:
    """Which of ``nodes`` exist: 1 or 0 each, in their dtype."""
    return ((nodes >= 0) & (nodes < index.num_nodes(ntype))).to(nodes.dtype)
