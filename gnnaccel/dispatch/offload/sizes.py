"""How much memory of the device a band takes, and so how many bands there are."""
from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel.dispatch.offload.memory import count
from gnnaccel.dispatch.offload.plan import Bands

#: share of the device's free memory that bands may take
_SHARE = 0.75
#: bytes of an edge besides its rows: int32 and int64 ends, and a sorted structure
_EDGE = 56
#: numbers of a row, at most: no layer's are longer; weights may be, such as one for each node
_WIDE = 1 << 14
#: bytes of a band whose rows come while another computes, where all would fit at once
_ALONG = 1 << 28
_ON_HOST = 1 << 30
#: share of a call's room for rows that all bands need
NEAR = 0.55
#: share of a call's room that bands have, however much results take that stay
_LEAST = 1 / 12
#: share of the room left that edges may take to stay on the device, and the bytes of one then:
#: int64 ends, a sorted structure, and GCN's normalisation
_RESIDENT = 0.4
_STAYS = 40
#: bytes of a node's degree, which layers gather as well
_DEGREE = 8


class Widths(NamedTuple):
    """Bytes of the rows of a call: ``node``: of the inputs, for each node; ``edge``: for each edge;
    ``widest``: of a row that the layer computes; ``sources``: whether it computes rows of the halo,
    too; ``fused``: whether it writes no rows for edges."""

    node: int
    edge: int
    widest: int
    sources: bool
    fused: bool

    @classmethod
    def of(cls, inputs: list[Tensor], kinds: list[str], weights: Collection[Tensor], sources: bool,
           fused: bool) -> Widths:
        """The widest row is taken from the inputs and the weights' sizes."""
        bytes_of = [t.shape[1:].numel() * t.element_size() for t in inputs]
        node = sum(width for width, kind in zip(bytes_of, kinds) if kind != "edges")
        sizes = (min(max(t.shape, default=0), _WIDE) * t.element_size() for t in weights)
        return cls(node, sum(bytes_of) - node, max(node, 1, *sizes), sources, fused)

    def need(self, own: int, halo: int, edges: int) -> int:
        """Bytes of one band's work, and of two bands' rows."""
        rows = own + halo
        return (2 * (rows * self.node + edges * (self.edge + 12)) + 3 * own * self.widest
                + 2 * rows * self.widest * self.sources
                + edges * (_EDGE + self.edge + 2 * self.widest * (not self.fused)))

    def of_bands(self, bands: Bands) -> int:
        """Bytes of the band that takes most."""
        source, _, target = bands.relation
        return max(self.need(max(count(band.own[source]), count(band.own[target])),
                             count(band.halo), count(band.edge_ids)) for band in bands.bands)

    def parts(self, sizes: tuple[int, int], edges: int, room: int) -> int:
        """How many bands fit into ``room`` bytes, if edges come from anywhere. One of few numbers,
        1, 2, 3, 4, 6, 8, 12, ..., so that layers of different widths share bands."""
        most, parts = max(1, max(sizes)), 1
        least = min(8, most * self.node // _ALONG)
        while parts < most:
            own, mine = -(-most // parts), -(-edges // parts)
            halo = int((sizes[0] - own) * -math.expm1(-mine / max(1, sizes[0]))) if parts > 1 else 0
            if parts >= least and self.need(own, max(0, halo), mine) <= room:
                break
            parts = parts + 1 if parts < 4 else _next(parts)
        return min(parts, most)

    def near(self, sources: int, room: int) -> int:
        """The part of a call's room that is for rows which all bands need: none where not even
        those of one tensor fit. A tenth is for free rows in front of them, for a band's own."""
        least = min(width for width in (self.node, self.widest) if width)
        part = min(int(room * NEAR), int(sources * (max(self.node, self.widest) * 1.1 + _DEGREE)))
        return part if self.node and sources * least <= part else 0

    def aside(self, targets: int, left: int, room: int) -> int:
        """The part of the ``left`` bytes of a call's ``room`` for its result, which then stays; 0
        where bands would have too little."""
        size = targets * self.widest
        return size if size <= left - room * _LEAST else 0

    @staticmethod
    def staying(edges: int) -> int:
        """The bytes of edges that stay on the device."""
        return edges * _STAYS

    @classmethod
    def stay(cls, edges: int, room: int) -> int:
        """The bytes that a graph's edges take where they stay on the device; 0 where they do
        not."""
        needed = cls.staying(edges)
        return needed if needed <= room * _RESIDENT else 0

    @staticmethod
    def room(device: torch.device) -> int:
        """Bytes that a call may take: a share of the free memory."""
        if device.type != "cuda":
            return _ON_HOST
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((free + unused) * _SHARE)


def _next(parts: int) -> int:
    """The next larger of 4, 6, 8, 12, 16, 24, ..."""
    power = 1 << (parts.bit_length() - 1)
    return power * 2 if parts > power else parts + power // 2
