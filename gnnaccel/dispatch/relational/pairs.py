"""Compact materialisation: the distinct pairs of a node and a relation (Hector, arXiv 2301.06284).

An edge value that depends on the node at one end and on the relation is the same for all edges of a pair, so it is made once
per pair. Pairs are sorted by relation, then by node: the rows of one relation lie side by side, as a GEMM by segment
wants them.
"""
from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnaccel.errors import GraphError

#: keys (relation, node) up to this many times the edges are found by marking them in an array, without a sort
MARK_UP_TO = 16
_MARK_AT_LEAST = 1 << 20


@dataclass(frozen=True, eq=False)
class Pairs:
    """All int32. ``node``, ``relation`` [U]; ``ptr`` [relations + 1]: where each relation's pairs begin; ``of_edge`` [E]: the
    pair of each edge, in the caller's order of edges."""

    node: Tensor
    relation: Tensor
    ptr: Tensor
    of_edge: Tensor

    @property
    def count(self) -> int:
        return self.node.shape[0]

    @functools.cached_property
    def bounds(self) -> tuple[tuple[int, int, int], ...]:
        """(relation, begin, end) of the relations that have pairs. Waits for the device: for the CPU's loops."""
        ptr = self.ptr.tolist()
        return tuple((r, a, b) for r, (a, b) in enumerate(zip(ptr, ptr[1:])) if b > a)

    @functools.cached_property
    def sizes(self) -> list[int]:
        """How many pairs each relation of `bounds` has: of all of them, in order."""
        return [b - a for _, a, b in self.bounds]

    @functools.cached_property
    def segments(self):
        """The rows by relation, as the GEMM by segment takes them."""
        from gnnaccel.cuda.segment_gemm import Segments

        return Segments(self.ptr, self.count)

    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.node, self.relation, self.ptr, self.of_edge))


class Blocks:
    """Nodes of ``sizes`` types, type after type. What products by segment ask of `Pairs`, types being the relations."""

    order: Tensor | None = None  #: the nodes by type, where they do not lie so

    def __init__(self, sizes: tuple[int, ...], device: torch.device):
        ends = list(itertools.accumulate(sizes, initial=0))
        self.count, self.bounds = ends[-1], tuple((t, a, b) for t, (a, b) in enumerate(zip(ends, ends[1:])) if b > a)
        self.sizes = [b - a for _, a, b in self.bounds]
        self.ptr = torch.tensor(ends, dtype=torch.int32, device=device)
        types = torch.arange(len(sizes), dtype=torch.int32, device=device)
        self.relation = types.repeat_interleave(self.ptr.diff(), output_size=self.count)

    @functools.cached_property
    def segments(self):
        """The nodes by type, as the GEMM by segment takes them."""
        from gnnaccel.cuda.segment_gemm import Segments

        return Segments(self.ptr, self.count)


class Typed(Blocks):
    """Nodes in any order, of types [N] in [0, ``num_types``): ``order`` [N] int32 are the nodes by type, or None where they lie
    so.

    GraphError for other types. Waits once for the device. The structure cache may keep it; it does not need the tensor again.
    """

    touched = False

    @torch.inference_mode(False)  # its tensors may take part in training later
    def __init__(self, types: Tensor, num_types: int):
        types = types.detach()
        counts, in_order = _counted(types, num_types)
        super().__init__(counts, types.device)
        if not in_order:
            self.relation = types.to(torch.int32, copy=True)
            self.order = torch.sort(self.relation, stable=True).indices.int()
        if types.is_cuda:  # whoever reads it, on whatever stream, finds it finished
            torch.cuda.current_stream(types.device).synchronize()

    def bind(self, *types: Tensor) -> None:
        pass

    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.relation, self.ptr, self.order) if t is not None)


def _counted(types: Tensor, num_types: int) -> tuple[tuple[int, ...], bool]:
    """Nodes of each type, and whether they lie type after type."""
    if not types.shape[0]:
        return (0,) * num_types, True
    low, high = types.aminmax()
    in_order = (types[1:] >= types[:-1]).all()
    low, high, in_order = torch.stack([low.long(), high.long(), in_order.long()]).tolist()
    if low < 0 or high >= num_types:
        raise GraphError(f"the node types are from {low} to {high}; they must lie in [0, {num_types}). Check the number of node "
                         "types that the layer was made with")
    return tuple(torch.bincount(types, minlength=num_types).tolist()), bool(in_order)


def pairs_of(node: Tensor, relation: Tensor, num_nodes: int, num_relations: int, compact: bool = True) -> Pairs:
    """The pairs of edges with this node at one end and this relation; node, relation [E] integer, within their ranges.

    ``compact`` False makes every edge a pair of its own: what compaction is measured against. Waits once for the device, to
    learn how many pairs there are.
    """
    key = relation.long() * num_nodes + node
    if not compact:
        key, order = torch.sort(key, stable=True)
        of_edge = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    elif num_nodes * num_relations <= max(_MARK_AT_LEAST, MARK_UP_TO * key.shape[0]):
        key, of_edge = _by_marking(key, num_nodes * num_relations)
    else:
        key, of_edge = torch.unique(key, return_inverse=True)
    first = torch.arange(num_relations + 1, device=key.device) * num_nodes
    relation = torch.div(key, num_nodes, rounding_mode="floor") if num_nodes else key
    ptr = torch.searchsorted(key, first, out_int32=True)
    return Pairs((key - relation * num_nodes).int(), relation.int(), ptr, of_edge.int())


def _by_marking(key: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """`torch.unique` for small keys, in linear time."""
    seen = torch.zeros(size, dtype=torch.bool, device=key.device)
    seen[key] = True
    place = torch.cumsum(seen, 0, dtype=torch.int32)
    return seen.nonzero().view(-1), place.index_select(0, key) - 1
