"""Random graphs of published sizes, of which each process makes its own part, on its GPU."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from gnnaccel.dispatch.distributed.building import Relation
from gnnaccel.dispatch.distributed.part import Part, Rows

#: a graph is made in so many pieces, by ranges of destinations, for any number of parts alike
PIECES = 8
#: nodes of a cluster, and the share of edges that come from anywhere, in clustered graphs
CLUSTER = 5_000
OUTSIDE = {"clustered": 0.05, "well clustered": 0.01}
Edges: TypeAlias = "dict[Relation, Tensor]"


@dataclass(frozen=True)
class Shape:
    """``nodes`` by type, ``edges`` by relation; ``width`` of features."""

    nodes: dict[str, int]
    edges: dict[Relation, int]
    width: int = 128

    def scaled(self, by: float) -> Shape:
        return Shape({kind: max(PIECES, int(count * by)) for kind, count in self.nodes.items()},
                     {relation: max(PIECES, int(count * by))
                      for relation, count in self.edges.items()}, self.width)


def _plain(nodes: int, edges: int, width: int = 128) -> Shape:
    return Shape({"node": nodes}, {("node", "to", "node"): edges}, width)


_MAG = {"paper": 736_389, "author": 1_134_649, "institution": 8_740, "field": 59_965}
_MAG_EDGES = {("author", "writes", "paper"): 7_145_660, ("paper", "cites", "paper"): 5_416_271,
              ("author", "in", "institution"): 1_043_998, ("paper", "has", "field"): 7_505_078}
SHAPES = {
    "products": _plain(2_449_029, 123_718_280),
    "proteins": _plain(132_534, 79_122_504, 64),
    "papers": _plain(111_059_956, 1_615_685_872),
    # as models train on it: with the inverse of each relation
    "mag": Shape(_MAG, _MAG_EDGES | {(target, f"rev {name}", source): count for
                                     (source, name, target), count in _MAG_EDGES.items()}),
}


def bounds(count: int, pieces: range) -> tuple[int, int]:
    """The first of these pieces' nodes, and the one behind their last."""
    return count * pieces.start // PIECES, count * pieces.stop // PIECES


def edges(shape: Shape, kind: str, pieces: range, device: torch.device) -> Edges:
    """int64 [2, E] by relation, of the edges that enter these pieces, in the graph's numbers.
    ``kind``: "random", any source; "power law", sources in proportion to r^-0.8 of their rank r;
    those of `OUTSIDE`, that share from anywhere, the others from the destination's cluster."""
    found: Edges = {}
    for number, (relation, count) in enumerate(shape.edges.items()):
        source, target = shape.nodes[relation[0]], shape.nodes[relation[2]]
        made = []
        for piece in pieces:
            g = torch.Generator(device).manual_seed(1000 * number + piece)
            low, high = bounds(target, range(piece, piece + 1))
            size = (count // PIECES,)
            ends = torch.randint(low, high, size, generator=g, device=device)
            made.append(torch.stack([_sources(kind, ends, source, target, g), ends]))
        found[relation] = torch.cat(made, 1) if len(made) > 1 else made[0]
    return found


def _sources(kind: str, ends: Tensor, source: int, target: int, g: torch.Generator) -> Tensor:
    device = ends.device
    if kind == "power law":  # of which the inverse of the distribution is r = u^(1 / 0.2)
        ranks = (torch.rand(ends.shape, generator=g, device=device, dtype=torch.double) ** 5
                 * source).long().clamp(max=source - 1)
        # spread over all numbers, so that every part has some of the hubs
        return ranks * 7919 % source
    found = torch.randint(0, source, ends.shape, generator=g, device=device)
    if kind in OUTSIDE:
        size = min(CLUSTER, max(source // PIECES, 1))
        near = ends * source // target // size * size
        near += torch.randint(0, size, ends.shape, generator=g, device=device)
        inside = torch.rand(ends.shape, generator=g, device=device) >= OUTSIDE[kind]
        found = torch.where(inside, near.clamp_(max=source - 1), found)
    return found


def rows(shape: Shape, pieces: range, device: torch.device, dtype: torch.dtype
         ) -> dict[str, Tensor]:
    """Features of these pieces' nodes, by type."""
    found = {}
    for number, (kind, count) in enumerate(shape.nodes.items()):
        low, high = bounds(count, pieces)
        found[kind] = torch.empty(high - low, shape.width, dtype=dtype, device=device)
        for piece in pieces:
            first, last = bounds(count, range(piece, piece + 1))
            g = torch.Generator(device).manual_seed(77 * number + piece)
            found[kind][first - low:last - low] = torch.randn(
                (last - first, shape.width), generator=g, device=device, dtype=dtype)
    return found


def part(shape: Shape, found: Edges, pieces: range, group: Any = None) -> Part:
    """This process's part of the graph. ``found``: its `edges`, of which the sources are numbered
    anew, in place; ``pieces``: of which each process has as many, by rank. Collective."""
    rank, parts = dist.get_rank(group), dist.get_world_size(group)
    table, renumbered = {}, {}
    device = next(iter(found.values())).device
    for kind, count in shape.nodes.items():
        low, high = bounds(count, pieces)
        mine = [edge_index[0] for relation, edge_index in found.items() if relation[0] == kind]
        halo = torch.cat([_outside(ends, low, high) for ends in mine]).unique() if mine else (
            torch.empty(0, dtype=torch.long, device=device))
        for ends in mine:
            for some in ends.split(1 << 26):
                inside = (some >= low) & (some < high)
                some.copy_(torch.where(inside, some - low,
                                       high - low + torch.searchsorted(halo, some)))
        table[kind] = _rows(shape, kind, halo, low, high, parts, group)
    for relation, edge_index in found.items():
        edge_index[1] -= bounds(shape.nodes[relation[2]], pieces)[0]
        renumbered[relation] = edge_index
    return Part(rank, parts, Path("memory"), "made", len(shape.nodes) > 1, table, renumbered, {},
                {}, {}, _Data(renumbered))


def _outside(ends: Tensor, low: int, high: int) -> Tensor:
    """Each number that is not in the range, at least once, without all of them in memory."""
    return torch.cat([some[(some < low) | (some >= high)].unique() for some in ends.split(1 << 27)])


def _rows(shape: Shape, kind: str, halo: Tensor, low: int, high: int, parts: int,
          group: Any) -> Rows:
    """The plan of exchanges: each process tells the owners which rows it needs."""
    count, each = shape.nodes[kind], PIECES // parts
    starts = torch.tensor([bounds(count, range(at * each, (at + 1) * each))[0]
                           for at in range(1, parts)], device=halo.device, dtype=torch.long)
    receive = torch.bincount(torch.bucketize(halo, starts, right=True), minlength=parts)
    send = torch.empty_like(receive)
    dist.all_to_all_single(send, receive, group=group)
    wanted = halo.new_empty(int(send.sum()))
    dist.all_to_all_single(wanted, halo, send.tolist(), receive.tolist(), group=group)
    return Rows(count, torch.arange(low, high, device=halo.device), halo, wanted - low,
                send.tolist(), receive.tolist())


class _Data:
    """A part's data, as far as layers over parts ask for it."""

    def __init__(self, found: Edges):
        self._found = {relation: _Edges(edge_index) for relation, edge_index in found.items()}

    def __getitem__(self, relation: Relation) -> Any:
        return self._found[relation]


@dataclass
class _Edges:
    edge_index: Tensor
