"""Edges of several types as one graph: all nodes lie in one range, type after type, and each edge type is a relation."""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel.dispatch.relational.view import Ends
from gnnaccel.errors import GraphError

EdgeType = tuple[str, str, str]


class Part(NamedTuple):
    """The edges of one type: their relation, and where the nodes at their ends begin and how many there are."""

    name: EdgeType
    relation: int
    src: int
    num_src: int
    dst: int
    num_dst: int


@dataclass(frozen=True)
class Layout:
    """How tensors ``edge_index``, one for each part, become one graph. Equal layouts make equal graphs of equal tensors."""

    parts: tuple[Part, ...]

    def __call__(self, *edge_indices: Tensor) -> Ends:
        """(src, dst, relation), each [E] int64, over all nodes."""
        src, dst, relation = [], [], []
        for part, edge_index in zip(self.parts, edge_indices):
            src.append(edge_index[0].long() + part.src)
            dst.append(edge_index[1].long() + part.dst)
            relation.append(torch.full_like(src[-1], part.relation))
        return torch.cat(src), torch.cat(dst), torch.cat(relation)

    def check(self, *edge_indices: Tensor) -> None:
        """GraphError for ids outside of their type, which would be nodes of the next. Waits once for the device."""
        ranges = [zip(*map(torch.aminmax, ids.unbind(0))) for ids in edge_indices]
        ends = torch.stack([torch.stack(end).long() for lows_and_highs in ranges for end in lows_and_highs]).tolist()
        for part, low, high in zip(self.parts, ends[::2], ends[1::2]):
            limits = ("source", part.name[0], part.num_src), ("destination", part.name[-1], part.num_dst)
            for at, (what, node, count) in enumerate(limits):
                if low[at] < 0 or high[at] >= count:
                    raise GraphError(f"edge_index_dict[{part.name!r}] holds {what} ids from {low[at]} to {high[at]}; there are "
                                     f"{count} nodes of type {node!r}")
