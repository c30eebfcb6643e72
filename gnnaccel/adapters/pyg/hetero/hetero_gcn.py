"""GCN's normalisation and self loops, relation by relation, for many relations at once."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.layout import EdgeType, Layout
from gnnaccel.adapters.pyg.hetero import dicts
from gnnaccel.adapters.pyg.propagate import kept_results
from gnnaccel.dispatch.graph import joining
from gnnaccel.dispatch.graph.joining import Range


def looped(graph: dicts.Graph, relations: Mapping[EdgeType, int],
           rows: Callable[[EdgeType], tuple], targets: Mapping[Any, int]) -> Layout:
    """The layout of ``graph`` with a self loop for each node of all ``relations``, those without
    edges too. Loops that were there weigh nothing. ``rows``, ``targets``: arguments of
    `hetero.graph`."""
    loops = []
    for name, at in relations.items():
        src, dst = rows(name)
        loops.append(Range(at, graph.starts[src], targets[dst], graph.ends[dst], targets[dst]))
    return Layout(graph.layout.parts, tuple(loops))


def weights(edge_indices: tuple[Tensor, ...], relations: tuple[int, ...], counts: tuple[int, ...],
            loops: bool, dtype: torch.dtype) -> Tensor:
    """Weights [E], with ``loops`` [E + sum of ``counts``]: each edge's ``1 / sqrt(degree of source
    * degree of destination)`` within its relation, then that of each loop, as PyG's ``gcn_norm``
    has them.

    ``relations``: that of each tensor of edges; ``counts``: nodes of each relation. Kept while the
    same edges come again.
    """
    return _kept(*edge_indices, loops, dtype, *counts, *relations)[0]


def _normalised(*given: Any) -> tuple[Tensor]:
    edges = [t for t in given if isinstance(t, Tensor)]
    loops, dtype, *numbers = given[len(edges):]
    counts, relations = numbers[:-len(edges)], numbers[-len(edges):]
    starts = [0, *accumulate(counts)]
    src, dst = _joined(edges,
                       [Range(at, starts[at], counts[at], starts[at], counts[at])
                        for at in relations], starts[-1])
    counted = (src != dst).to(dtype) if loops else torch.ones_like(src, dtype=dtype)
    degree = torch.zeros(starts[-1], dtype=dtype, device=src.device).index_add_(0, dst, counted)
    if loops:
        root = (degree + 1).pow(-0.5)
        return (torch.cat([root.index_select(0, src) * counted * root.index_select(0, dst),
                           root * root]),)
    root = degree.pow(-0.5).masked_fill(degree == 0, 0.0)
    return (root.index_select(0, src) * root.index_select(0, dst),)


def _joined(edges: list[Tensor], ranges: list[Range], nodes: int) -> tuple[Tensor, ...]:
    """Sources and destinations over the nodes of all relations."""
    if joining.serves(edges, nodes):
        src, dst, _ = joining.by_kernel(edges, ranges)[0]
        # ids out of range are told of where the graph is built
        return src.clamp_(min=0), dst.clamp_(min=0)
    return tuple(torch.cat([t[end].long() + into.src for t, into in zip(edges, ranges)])
                 for end in (0, 1))


_kept = kept_results.keeping(_normalised)
