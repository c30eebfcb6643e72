"""A graph that every process holds, cut in memory: ranges of consecutive nodes, the same on all
processes."""
from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gnnaccel.dispatch.distributed.building import EDGE, Relation
from gnnaccel.dispatch.distributed.part import Part, Rows

#: the relation of edges between nodes of two kinds
BETWEEN: Relation = ("source", "to", "target")


def bounds(weights: Tensor, parts: int) -> list[int]:
    """Bounds of the ranges, ``parts`` + 1 numbers: about as much weight in each range.

    ``weights``: int64 [N], each above 0. A node goes where its middle lies, so a range is empty
    where one node weighs more than a whole share.
    """
    ends = weights.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    shares = torch.arange(1, parts, device=weights.device, dtype=torch.double) * (total / parts)
    inner = torch.searchsorted(ends.double() - weights / 2, shares)
    return [0, *inner.tolist(), len(weights)]


class Take:
    """Rows of a tensor that a process takes: ``rows``, a slice of nodes, of which each process
    takes ``counts``; or the numbers of edges, int64, with ``counts`` empty."""

    def __init__(self, rows: Any, counts: list[int]):
        self.rows, self.counts = rows, counts


class Cut:
    """One process's share of a graph. ``part``: as `part.load` makes it; ``source``, ``target``:
    the types of sources and destinations; ``nodes``: by type, the nodes that this process takes;
    ``edges``: the edges; ``edge_counts``: how many each process takes.

    ``edge_index``: int64 [2, E], within ``sizes``, the numbers of sources and destinations;
    ``one``: whether these are the same nodes.
    """

    def __init__(self, edge_index: Tensor, sizes: tuple[int, int], one: bool, rank: int,
                 parts: int):
        source, target = edge_index
        relation = EDGE if one else BETWEEN
        self.source, _, self.target = relation
        ranges = {self.target: bounds(torch.bincount(target, minlength=sizes[1]) + 1, parts)}
        if not one:
            ranges[self.source] = bounds(torch.ones(sizes[0], dtype=torch.long,
                                                    device=edge_index.device), parts)
        self.nodes = {kind: Take(slice(*ends[rank:rank + 2]),
                                 [high - low for low, high in zip(ends, ends[1:])])
                      for kind, ends in ranges.items()}
        inner = torch.tensor(ranges[self.target][1:-1], device=target.device)
        owner = torch.bucketize(target, inner, right=True)
        self.edge_counts = torch.bincount(owner, minlength=parts).tolist()
        self.edges = Take((owner == rank).nonzero().view(-1), [])
        rows, edges = self._rows(source, target, owner, ranges[self.source], rank, sizes)
        self.part = Part(rank, parts, Path("the graph of this process"), "", not one, rows,
                         {relation: edges}, {relation: self.edges.rows}, {}, {})
        self.part.data = {relation: SimpleNamespace(edge_index=edges)}

    def take(self, kind: str | None) -> Take | None:
        """The rows that this process takes of a type of nodes, or of "edges"; None for None."""
        return None if kind is None else self.edges if kind == "edges" else self.nodes[kind]

    def gives_all_some(self) -> bool:
        """Whether each process has nodes of each type, and edges."""
        return all(self.edge_counts) and all(all(take.counts) for take in self.nodes.values())

    def _rows(self, source: Tensor, target: Tensor, owner: Tensor, ends: list[int], rank: int,
              sizes: tuple[int, int]) -> tuple[dict[str, Rows], Tensor]:
        """The plan by which rows are exchanged, and the own edges, int64 [2, own edges]. ``ends``:
        the ranges of sources."""
        low, high = ends[rank], ends[rank + 1]
        device, parts = source.device, len(ends) - 1
        mine = source[self.edges.rows]
        inside = (mine >= low) & (mine < high)
        halo = mine[~inside].unique()  # ascending, so by owner
        place = torch.where(inside, mine - low, high - low + torch.searchsorted(halo, mine))
        own = self.nodes[self.target].rows
        edges = torch.stack([place, target[self.edges.rows] - own.start])
        inner = torch.tensor(ends[1:-1], device=device)
        receive = torch.bincount(torch.bucketize(halo, inner, right=True), minlength=parts)
        # own rows that others need: by receiver, then by row, each once a receiver
        wanted = (source >= low) & (source < high) & (owner != rank)
        keys = (owner[wanted] * sizes[0] + source[wanted]).unique()
        send = torch.bincount(keys // max(sizes[0], 1), minlength=parts)
        plan = {self.source: Rows(sizes[0], torch.arange(low, high, device=device), halo,
                                  keys % max(sizes[0], 1) - low, send.tolist(),
                                  receive.tolist())}
        if self.target not in plan:
            nothing = torch.empty(0, dtype=torch.long, device=device)
            plan[self.target] = Rows(sizes[1], torch.arange(own.start, own.stop, device=device),
                                     nothing, nothing, [0] * parts, [0] * parts)
        return plan, edges
