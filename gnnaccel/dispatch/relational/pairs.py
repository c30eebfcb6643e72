"""Compact materialisation: the distinct pairs of a node and a relation (Hector, arXiv 2301.06284).

An edge value that depends on the node at one end and on the relation is the same for all edges of a
pair, so it is made once per pair. Pairs are sorted by relation, then by node: the rows of one
relation lie side by side, as a GEMM by segment wants them.
"""
from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnaccel.cuda.runtime import capture
from gnnaccel.cuda.runtime.launch import sent
from gnnaccel.cuda.structures import pairs as cuda_pairs
from gnnaccel.errors import VALID, GraphError

#: keys (relation, node) up to this many times the edges are found by marking them in an array,
#: without a sort
MARK_UP_TO = 16
_MARK_AT_LEAST = 1 << 20
#: kernels build both ends of up to this many edges, with this many keys, at once, and keep copies
#: of the ids
AT_ONCE = 1 << 21
_KEYS_AT_ONCE = 1 << 24


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs, all int32. ``node``, ``relation`` [U]; ``ptr`` [relations + 1]: where each relation's
    pairs begin; ``of_edge`` [E]: the pair of each edge, in the caller's order of edges."""

    node: Tensor
    relation: Tensor
    ptr: Tensor
    of_edge: Tensor

    @property
    def count(self) -> int:
        return self.node.shape[0]

    @functools.cached_property
    def bounds(self) -> tuple[tuple[int, int, int], ...]:
        """(relation, begin, end) of the relations that have pairs. Waits for the device: for the
        CPU's loops."""
        ptr = self.ptr.tolist()
        return tuple((r, a, b) for r, (a, b) in enumerate(zip(ptr, ptr[1:])) if b > a)

    @functools.cached_property
    def sizes(self) -> list[int]:
        """How many pairs each relation of `bounds` has: of all of them, in order."""
        return [b - a for _, a, b in self.bounds]

    @functools.cached_property
    def segments(self):
        """The rows by relation, as the GEMM by segment takes them."""
        from gnnaccel.cuda.segment.segment_gemm import Segments

        return Segments(self.ptr, self.count)

    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.node, self.relation, self.ptr, self.of_edge))


class Blocks:
    """Nodes of ``sizes`` types, type after type. Has the attributes of `Pairs` that products by
    segment read, types being the relations."""

    order: Tensor | None = None  #: the nodes by type, where they do not lie so

    def __init__(self, sizes: tuple[int, ...], device: torch.device):
        ends = list(itertools.accumulate(sizes, initial=0))
        self._lay(ends)
        self.ptr = sent(ends, torch.int32, device)

    def _lay(self, ends: Sequence[int]) -> None:
        """Set the attributes. ``ends``: where each type begins, and where the last one ends."""
        self.count, self.bounds = ends[-1], tuple((t, a, b)
                                                  for t, (a, b) in enumerate(zip(ends, ends[1:]))
                                                  if b > a)
        self.sizes = [b - a for _, a, b in self.bounds]

    @functools.cached_property
    @torch.inference_mode(False)
    def relation(self) -> Tensor:
        """[N] int32: each node's type. Made when first read, which is rare."""
        types = torch.arange(len(self.ptr) - 1, dtype=torch.int32, device=self.ptr.device)
        type_of_node = types.repeat_interleave(self.ptr.diff(), output_size=self.count)
        capture.finish(type_of_node.device)
        return type_of_node

    def nbytes(self) -> int:
        tensors = (self.__dict__.get("relation"), self.ptr, self.order)
        return sum(t.nbytes for t in tensors if t is not None)

    @functools.cached_property
    def segments(self):
        """The nodes by type, as the GEMM by segment takes them."""
        from gnnaccel.cuda.segment.segment_gemm import Segments

        return Segments(self.ptr, self.count)


class Typed(Blocks):
    """Nodes in any order, of types [N] in [0, ``num_types``): ``order`` [N] int32 are the nodes by
    type, or None where they lie so.

    Made by kernels, for kernels. GraphError for other types. Waits once for the device. The
    structure cache may keep it; it does not need the tensor again.
    """

    touched = False
    bind = None

    @torch.inference_mode(False)  # its tensors may take part in training later
    def __init__(self, types: Tensor, num_types: int):
        types = types.detach()
        by_type = cuda_pairs.sort_types(types if types.dtype in cuda_pairs.IDS else types.long(),
                                        num_types)
        if by_type is None:
            low, high = torch.stack(types.aminmax()).tolist()
            raise GraphError(f"the node types are from {low} to {high}; they must lie in "
                             f"[0, {num_types}). Check the number of "
                             f"node types that the layer was made with. {VALID}")
        self._lay(by_type.ends)
        self.ptr, self.relation, self.order = by_type.ptr, by_type.types, by_type.order


def pairs_of(node: Tensor, relation: Tensor, num_nodes: int, num_relations: int,
             compact: bool = True) -> Pairs:
    """The pairs of edges with this node at one end and this relation; node, relation [E] integer,
    within their ranges.

    ``compact`` False makes every edge a pair of its own, which compaction is measured against.
    Waits once for the device, to learn how many pairs there are.
    """
    key = relation.long() * num_nodes + node
    if not compact:
        key, order = torch.sort(key, stable=True)
        of_edge = torch.empty_like(order).scatter_(0, order,
                                                   torch.arange(order.shape[0],
                                                                device=order.device))
    elif _marks(num_nodes * num_relations, key.shape[0]):
        key, of_edge = _by_marking(key, num_nodes * num_relations)
    else:
        key, of_edge = torch.unique(key, return_inverse=True)
    first = torch.arange(num_relations + 1, device=key.device) * num_nodes
    relation = torch.div(key, num_nodes, rounding_mode="floor") if num_nodes else key
    ptr = torch.searchsorted(key, first, out_int32=True)
    return Pairs((key - relation * num_nodes).int(), relation.int(), ptr, of_edge.int())


def _marks(keys: int, edges: int) -> bool:
    return keys <= max(_MARK_AT_LEAST, MARK_UP_TO * edges)


def _by_marking(key: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """`torch.unique` for small keys, in linear time."""
    present = torch.zeros(size, dtype=torch.bool, device=key.device)
    present[key] = True
    place = torch.cumsum(present, 0, dtype=torch.int32)
    return present.nonzero().view(-1), place.index_select(0, key) - 1


def pairs_of_both(
        src: Tensor, dst: Tensor, relation: Tensor, num_src: int, num_dst: int,
        num_relations: int, compact: bool = True
) -> tuple[Pairs, Pairs, tuple[Tensor, Tensor, Tensor] | None] | None:
    """`pairs_of` sources, which ``compact`` is about, and destinations, by kernels; and copies of
    src, dst and relation as int32 if they are short. None if ids are out of range.

    Waits once, for more than `AT_ONCE` edges once for each end. If ``dst`` is ``src`` and pairs are
    compact, both ends share theirs.
    """
    src, dst, relation = (t if t.dtype in cuda_pairs.IDS else t.long()
                          for t in (src, dst, relation))
    nodes, edges, one = (num_src, num_dst), src.shape[0], src is dst and compact
    marked = [end for end in ((0,) if one else (0, 1)) if (compact or end)
              and _marks(nodes[end] * num_relations, edges)]
    at_once = (edges <= AT_ONCE
               and sum(nodes[end] for end in marked) * num_relations <= _KEYS_AT_ONCE)
    by_end: dict[int, Pairs]
    by_end, copies = {}, None
    for ends in [tuple(marked)] if at_once or not marked else [(end,) for end in marked]:
        small = edges <= AT_ONCE and copies is None
        ids = cuda_pairs.number(src, dst, relation, num_src, num_dst, num_relations, ends, small)
        if ids is None:
            return None
        by_end.update((end, Pairs(*arrays)) for end, arrays in zip(ends, ids.pairs))
        copies = copies or ids.copies
    by_src = by_end.get(0) or pairs_of(src, relation, num_src, num_relations, compact)
    by_dst = by_src if one else by_end.get(1) or pairs_of(dst, relation, num_dst, num_relations)
    return by_src, by_dst, copies
