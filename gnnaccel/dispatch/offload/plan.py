"""A graph's bands: ranges of consecutive destinations, the edges that enter them, and the rows of
other bands that these come from."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.dispatch.distributed.building import Relation
from gnnaccel.dispatch.distributed.cutting import chunks
from gnnaccel.dispatch.distributed.ranges import bounds
from gnnaccel.dispatch.graph.tensor_ref import TensorMap
from gnnaccel.dispatch.offload.memory import Memory, Where, count
from gnnaccel.errors import VALID, GraphError, OffloadError

_CHUNK = 1 << 26  # edges that the device looks at at once, at most, ...
_LOOK = 64  # ... and the bytes that one of them takes meanwhile
_MOST = 2**31  # nodes and edges are numbered in 32 bits
#: share of a range of rows from which on the whole range is fetched, in one copy
_DENSE = 0.9
#: rows that all bands fetch of others, as a share of all rows, from which on they are many
_AGAIN = 0.2


class Band(NamedTuple):
    """A band of a graph, or of rows without one. ``own``: its rows by type of nodes; ``halo``: the
    sources besides its own; ``edges``: int32 [2, E], sources numbered over [own | halo] and
    destinations over [own]; ``edge_ids``: int32 [E], ascending. On the host."""

    number: int
    own: dict[str, slice]
    halo: Where
    edges: Tensor | None
    edge_ids: Where

    def rows(self, kind: str) -> Where:
        """Places of its rows of a type of nodes, or of "edges"."""
        return self.edge_ids if kind == "edges" else self.own[kind]

    def count(self, kind: str) -> int:
        """How many of these rows it has."""
        return count(self.rows(kind))


@dataclass(eq=False)
class Bands:
    """The bands of a graph. ``sizes``: how many rows there are of each type; ``relation``: the
    types of sources and destinations; ``resident``: by band, edges that stay on the device, so that
    values derived from them, such as ``norms``, are found again: whether sources are numbered in
    place, and int64 [2, E], or None before they are asked for; ``derived``: rows
    that the graph alone decides, on the host, by the key that layers ask for them by; ``fitted``:
    whether every band fits the memory that they were cut for."""

    bands: list[Band]
    sizes: dict[str, int]
    relation: Relation
    resident: dict[int, tuple[bool, Tensor | None]] = field(default_factory=dict)
    norms: TensorMap[dict[Any, Any]] = field(default_factory=TensorMap)
    derived: dict[Any, Tensor] = field(default_factory=dict)
    fitted: bool = True

    @property
    def source(self) -> str:
        return self.relation[0]

    @property
    def target(self) -> str:
        return self.relation[2]

    def rows(self, kind: str) -> int:
        """How many nodes of a type, or "edges", there are."""
        if kind == "edges":
            return sum(count(band.edge_ids) for band in self.bands)
        return self.sizes[kind]

    def again(self) -> bool:
        """Whether bands fetch many rows of sources more than once."""
        halo = sum(count(band.halo) for band in self.bands)
        return len(self.bands) > 1 and halo > _AGAIN * self.sizes[self.source]

    def edges(self, band: Band, memory: Memory, in_place: bool = False) -> Tensor | None:
        """A band's edges on the device, int64 [2, E]; None where bands have none. ``in_place``:
        sources are numbered over [own | all rows], not over [own | halo]."""
        if band.edges is None:
            return None
        numbered, edges = self.resident.get(band.number, (in_place, None))
        if edges is None or numbered != in_place:
            stays = band.number in self.resident
            # what stays may take part in training later
            with torch.inference_mode(torch.is_inference_mode_enabled() and not stays):
                edges = memory.near(band.edges).long()
                if in_place:
                    self._in_place(band, edges[0], memory)
            if stays:
                self.resident[band.number] = in_place, edges
        return edges

    def _in_place(self, band: Band, sources: Tensor, memory: Memory) -> None:
        """Number a band's sources, over [own | halo], over [own | all rows]."""
        own = band.count(self.source)
        if isinstance(band.halo, slice):
            sources += (sources >= own) * band.halo.start
        elif len(band.halo):
            numbers = memory.near(band.halo).long() + own
            torch.where(sources < own, sources, numbers[(sources - own).clamp_(min=0)], out=sources)

    def keep_edges(self) -> None:
        """Keep the edges on the device from the next call on."""
        self.resident = {band.number: (False, None) for band in self.bands
                         if band.edges is not None}

    def most(self) -> int:
        """The most sources that a band has of its own."""
        return max(band.count(self.source) for band in self.bands)

    def let_go(self) -> None:
        """Keep nothing of the graph on the device."""
        self.resident.clear()
        self.norms = TensorMap()


def ranges(rows: int, parts: int) -> Bands:
    """Bands of ``rows`` rows that know no edges."""
    ends = [rows * at // parts for at in range(parts + 1)]
    return Bands([Band(at, {"rows": slice(low, high)}, slice(0, 0), None, slice(0, 0))
                  for at, (low, high) in enumerate(zip(ends, ends[1:])) if low < high or not at],
                 {"rows": rows}, ("rows", "", "rows"))


def cut(edge_index: Tensor, sizes: tuple[int, int], relation: Relation, parts: int,
        memory: Memory, room: int = 0) -> Bands:
    """At most ``parts`` bands of a graph, with about as many edges each.

    ``edge_index``: int64 [2, E], on any device; it is read in chunks, which the device looks at,
    or as a whole, where it takes at most half of ``room`` bytes.
    ``sizes``: the numbers of sources and destinations; equal types in ``relation`` are the same
    nodes. GraphError where an edge names a node that does not exist.
    """
    if max(*sizes, edge_index.shape[1]) >= _MOST:
        raise OffloadError(f"a graph of {sizes} nodes and {edge_index.shape[1]} edges has more "
                           "than its bands can number, 2^31 - 1")
    source, _, target = relation
    chunk = min(_CHUNK, max(1 << 16, room // _LOOK)) if room else _CHUNK
    if 2 * edge_index.numel() * edge_index.element_size() <= room:
        edge_index = edge_index.to(memory.device, non_blocking=True)
    own = {target: bounds(_degrees(edge_index, sizes, memory.device, chunk) + 1, parts)}
    if source != target:
        own[source] = [sizes[0] * at // parts for at in range(parts + 1)]
    bands = []
    for at in range(parts):
        mine = {kind: slice(*ends[at:at + 2]) for kind, ends in own.items()}
        if at == 0 or any(map(count, mine.values())):
            bands.append(_band(at, edge_index, sizes[0], mine, relation, memory, chunk))
    return Bands(bands, {source: sizes[0], target: sizes[1]}, relation)


def _degrees(edge_index: Tensor, sizes: tuple[int, int], device: torch.device,
             chunk: int) -> Tensor:
    """How many edges enter each node, int64, on the device."""
    degrees = torch.zeros(sizes[1], dtype=torch.long, device=device)
    for at in chunks(edge_index.shape[1], chunk):
        part = edge_index[:, at].to(device)
        low, high = (end.tolist() for end in torch.aminmax(part, dim=1))
        if min(low) < 0 or high[0] >= sizes[0] or high[1] >= sizes[1]:
            raise GraphError(f"edge_index names nodes from {min(low)} to {max(high)}; there are "
                             f"{sizes[0]} sources and {sizes[1]} destinations. {VALID}")
        degrees += torch.bincount(part[1], minlength=sizes[1])
    return degrees


def _band(number: int, edge_index: Tensor, sources: int, own: dict[str, slice],
          relation: Relation, memory: Memory, chunk: int) -> Band:
    source, _, target = relation
    ids, ends = [], []
    for first, part in _entering(edge_index, own[target], memory.device, chunk):
        ids.append((part[0] + first).int())
        ends.append(part[1:])
    starts, stops = torch.cat(ends, 1) if ends else torch.empty(
        (2, 0), dtype=torch.long, device=memory.device)
    halo, place = _halo(starts, sources, own[source])
    edges = torch.stack([place[starts], (stops - own[target].start).int()])
    return Band(number, own, halo if isinstance(halo, slice) else memory.lasting(halo),
                memory.lasting(edges), memory.lasting(torch.cat(ids) if ids else starts.int()))


def _entering(edge_index: Tensor, own: slice, device: torch.device,
              chunk: int) -> Iterator[tuple[int, Tensor]]:
    """The edges that enter ``own``, by chunk: the number of its first edge and, int64 [3, E], the
    edges: numbers within the chunk, sources and destinations."""
    for at in chunks(edge_index.shape[1], chunk):
        stops = edge_index[1, at].to(device)
        mine = ((stops >= own.start) & (stops < own.stop)).nonzero().view(-1)
        if len(mine):
            yield at.start, torch.stack([mine, edge_index[0, at].to(device)[mine], stops[mine]])


def _halo(starts: Tensor, sources: int, own: slice) -> tuple[Where, Tensor]:
    """The rows besides ``own`` that a band's edges come from, ascending; and each source's place,
    int32, among [own | halo]. A range, where it has few rows more."""
    needed = torch.zeros(sources, dtype=torch.bool, device=starts.device)
    needed[starts] = True
    needed[own] = False
    halo = needed.nonzero().view(-1).int()
    place = torch.empty(sources, dtype=torch.int32, device=starts.device)
    first = count(own)
    where: Where = halo
    if len(halo):
        low, high = int(halo[0]), int(halo[-1]) + 1
        if len(halo) >= _DENSE * (high - low):
            where = slice(low, high)
            halo = torch.arange(low, high, dtype=torch.int32, device=starts.device)
        place[halo.long()] = torch.arange(first, first + len(halo), dtype=torch.int32,
                                          device=starts.device)
    place[own] = torch.arange(first, dtype=torch.int32, device=starts.device)
    return where, place
