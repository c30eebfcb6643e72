"""GCN's normalisation and self loops, relation by relation, for many relations at once."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters.layout import EdgeType, Layout
from gnnaccel.adapters.pyg import graph_norm, hetero
from gnnaccel.dispatch.relational.view import Ends


class Loops(NamedTuple):
    """The self loops of a relation: where its nodes begin at both ends, and how many there are."""

    relation: int
    src: int
    dst: int
    count: int


@dataclass(frozen=True)
class Looped(Layout):
    """`Layout` with a self loop for each node of each relation, after all edges. Loops that were there weigh nothing."""

    loops: tuple[Loops, ...] = ()

    def __call__(self, *edge_indices: Tensor) -> Ends:
        ends = super().__call__(*edge_indices)
        device = ends[0].device
        node = [torch.arange(own.count, device=device) for own in self.loops]
        added = ([ids + own.src for ids, own in zip(node, self.loops)], [ids + own.dst for ids, own in zip(node, self.loops)],
                 [torch.full((own.count,), own.relation, device=device) for own in self.loops])
        return tuple(torch.cat([given, *more]) for given, more in zip(ends, added))


def looped(graph: hetero.Graph, relations: Mapping[EdgeType, int], rows: Callable[[EdgeType], tuple],
           targets: Mapping[Any, int]) -> Looped:
    """The layout of ``graph`` with the self loops of all ``relations``, those without edges too; ``rows``, ``targets``: as
    `hetero.graph` takes them."""
    loops = []
    for name, at in relations.items():
        src, dst = rows(name)
        loops.append(Loops(at, graph.starts[src], graph.ends[dst], targets[dst]))
    return Looped(graph.layout.parts, tuple(loops))


def weights(edge_indices: tuple[Tensor, ...], relations: tuple[int, ...], counts: tuple[int, ...], loops: bool,
            dtype: torch.dtype) -> Tensor:
    """[E], with ``loops`` [E + sum of ``counts``]: each edge's ``1 / sqrt(degree of source * degree of destination)`` within its
    relation, then that of each loop, as PyG's ``gcn_norm`` has them.

    ``relations``: that of each tensor of edges; ``counts``: nodes of each relation. Kept while the same edges come again.
    """
    return _kept(*edge_indices, loops, dtype, *counts, *relations)[0]


def _normalised(*given: Any) -> tuple[Tensor]:
    edges = [t for t in given if isinstance(t, Tensor)]
    loops, dtype, *numbers = given[len(edges):]
    counts, relations = numbers[:-len(edges)], numbers[-len(edges):]
    starts = [0, *accumulate(counts)]
    src, dst = (torch.cat([t[end].long() + starts[at] for t, at in zip(edges, relations)]) for end in (0, 1))
    counted = (src != dst).to(dtype) if loops else torch.ones_like(src, dtype=dtype)
    degree = torch.zeros(starts[-1], dtype=dtype, device=src.device).index_add_(0, dst, counted)
    if loops:
        root = (degree + 1).pow(-0.5)
        return (torch.cat([root[src] * counted * root[dst], root * root]),)
    root = degree.pow(-0.5).masked_fill(degree == 0, 0.0)
    return (root[src] * root[dst],)


_kept = graph_norm.keeping(_normalised)
