"""The structure of a relational call, and edges of several types as one graph: all nodes lie in one
range, type after type, and each edge type is a relation."""
from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel.cuda.runtime import capture
from gnnaccel.dispatch.graph import joining
from gnnaccel.dispatch.graph.joining import Range
from gnnaccel.dispatch.relational import view
from gnnaccel.dispatch.relational.edges import Ends, by_type
from gnnaccel.errors import VALID, GraphError

EdgeType = tuple[str, str, str]


class Part(NamedTuple):
    """The edges of one type: their relation, and the begin and number of the nodes at each end."""

    name: EdgeType
    relation: int
    src: int
    num_src: int
    dst: int
    num_dst: int


@dataclass(frozen=True)
class Layout:
    """The way in which tensors ``edge_index``, one for each part, become one graph. Equal layouts
    make equal graphs of equal tensors.

    ``loops``: relations each of whose sources has one more edge, to the destination with its
    number; they come after all others.
    """

    parts: tuple[Part, ...]
    loops: tuple[Range, ...] = ()

    def __call__(self, *edge_indices: Tensor) -> Ends:
        """(src, dst, relation), each [E] of one integer dtype, over all nodes."""
        return (self._by_kernel(edge_indices)[0]
                if self._kernel_serves(edge_indices) else self._by_torch(edge_indices))

    def checked(self, *edge_indices: Tensor) -> Ends:
        """The edges as one graph. GraphError for ids out of range: other types' nodes have those.

        Waits once for the device. During a capture, where nothing may wait, such ids become -1.
        """
        if capture.capturing():
            return self._by_torch(edge_indices, masked=True)
        if not self._kernel_serves(edge_indices):
            self._check(edge_indices)
            return self._by_torch(edge_indices)
        ends, wrong = self._by_kernel(edge_indices)
        if int(wrong) < 2 * len(self.parts):
            self._check(edge_indices)
        return ends

    @functools.cached_property
    def _nodes(self) -> int:
        """One more than the largest id can be."""
        every: tuple[Part | Range, ...] = (*self.parts, *self.loops)
        return max(max(part.src + part.num_src, part.dst + part.num_dst) for part in every)

    def _kernel_serves(self, edge_indices: tuple[Tensor, ...]) -> bool:
        return joining.serves(edge_indices, self._nodes, sum(own.num_src for own in self.loops))

    def _by_kernel(self, edge_indices: tuple[Tensor, ...]) -> tuple[Ends, Tensor]:
        return joining.by_kernel(edge_indices, [part[1:] for part in self.parts], self.loops)

    def _by_torch(self, edge_indices: tuple[Tensor, ...], masked: bool = False) -> Ends:
        src: list[Tensor] = []
        dst: list[Tensor] = []
        relation = []
        for part, edge_index in zip(self.parts, edge_indices):
            for ids, start, count, nodes in ((edge_index[0].long(), part.src, part.num_src, src),
                                             (edge_index[1].long(), part.dst, part.num_dst, dst)):
                nodes.append((ids + start).masked_fill((ids < 0) | (ids >= count), -1) if masked
                             else ids + start)
            relation.append(torch.full_like(src[-1], part.relation))
        for own in self.loops:
            node = torch.arange(own.num_src, device=edge_indices[0].device)
            src.append(node + own.src)
            dst.append(node + own.dst)
            relation.append(torch.full_like(node, own.relation))
        return torch.cat(src), torch.cat(dst), torch.cat(relation)

    def _check(self, edge_indices: tuple[Tensor, ...]) -> None:
        nonempty = [(part, ids) for part, ids in zip(self.parts, edge_indices) if ids.shape[1]]
        if not nonempty:
            return
        ranges = [zip(*map(torch.aminmax, ids.unbind(0))) for _, ids in nonempty]
        ends = torch.stack([torch.stack(end).long() for lows_and_highs in ranges
                            for end in lows_and_highs]).tolist()
        for (part, _), low, high in zip(nonempty, ends[::2], ends[1::2]):
            limits = ("source", part.name[0],
                      part.num_src), ("destination", part.name[-1], part.num_dst)
            for at, (what, node, count) in enumerate(limits):
                if low[at] < 0 or high[at] >= count:
                    raise GraphError(f"edge_index_dict[{part.name!r}] holds {what} ids from "
                                     f"{low[at]} to {high[at]}; there are "
                                     f"{count} nodes of type {node!r}. {VALID}")


def viewer(structure: tuple[Tensor, ...], num_src: int, num_dst: int, num_relations: int,
           assemble: Callable[..., Ends] = by_type,
           ignore: bool = False) -> Callable[[bool, bool], view.RelationView]:
    """The function that makes the `RelationView` of these edges; arguments as there."""
    def make(own: bool, compact: bool) -> view.RelationView:
        return view.RelationView(structure, num_src, num_dst, num_relations, assemble, compact,
                                 own, ignore)

    return make
