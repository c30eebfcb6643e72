"""Launchers that find the pairs of a node and a relation at the ends of edges, and sort nodes by
type (``src/pairs.cu``).

For graphs that come once, which are bound by the host: few launches, few arrays, and one wait in
which it learns sizes and whether all ids are in range.
"""
from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import Kernels, pointer

IDS = (torch.int32, torch.int64)
SHARES = {torch.float32: "share_float", torch.float64: "share_double"}
_THREADS = 256
_ALIGN = 32  # numbers: a multiple of what the widest load takes
_RUN = 16  # nodes that a thread takes one after the other, at the least
kernels = Kernels("pairs", ())


class Numbered(NamedTuple):
    """The pairs at one end of edges, all int32: ``node``, ``relation`` [U], by relation and then by
    node; ``ptr`` [relations + 1]; ``of_edge`` [E]."""

    node: Tensor
    relation: Tensor
    ptr: Tensor
    of_edge: Tensor


class Found(NamedTuple):
    """``pairs``: of each end that was asked for; ``copies``: (src, dst, relation) as int32, None if
    these were not asked for."""

    pairs: tuple[Numbered, ...]
    copies: tuple[Tensor, Tensor, Tensor] | None


def number(src: Tensor, dst: Tensor, relation: Tensor, num_src: int, num_dst: int,
           num_relations: int, ends: tuple[int, ...] = (0, 1), small: bool = True) -> Found | None:
    """The pairs at ``ends`` of the edges (0: src, 1: dst), and copies of the ids; None if some are
    out of range. Waits once.

    Takes 4 bytes for each key (relation, node) of those ends meanwhile.

    Args:
        src, dst, relation: [E] int32 or int64, with any strides; E below 2**31.
        small: all results lie in one piece of memory, which has room for a pair for every edge; if
            ``dst`` is ``src``, one copy serves both. False: there are no copies, and each array
            takes only the memory that it needs.

    Raises:
        ValueError: a tensor's shape, dtype or device is another.
    """
    edges, device, limits = src.shape[0], src.device, (num_src, num_dst, num_relations)
    ids = [_ids(name, t, edges, device) for name, t in (("src", src), ("dst", dst),
                                                        ("relation", relation))]
    copied = (2 if dst is src else 3) if small else 0
    memory = _Memory([edges] * copied + [edges, edges, num_relations + 1, edges] * len(ends),
                     device)
    keys = [limits[end] * num_relations for end in ends]
    total = sum(keys)
    marks = torch.zeros(total + 3, dtype=torch.int32, device=device)
    _collect(ids, edges, limits, ends, keys, marks.data_ptr(), memory.addresses[:copied])
    if ends:
        marks.narrow(0, 0, total).cumsum_(0)
        _number(ids, edges, limits, ends, keys, marks.data_ptr(), memory.addresses[copied:])
    invalid, *counts = marks.narrow(0, total, 3).tolist()
    if invalid:
        return None
    copies = [memory.take(first, edges) for first in range(copied)]
    pairs = []
    for first, count in zip(range(copied, copied + 4 * len(ends), 4), counts):
        arrays = [memory.take(first + i, size)
                  for i, size in enumerate((count, count, num_relations + 1, edges))]
        pairs.append(Numbered(*(arrays if small else map(torch.clone, arrays))))
    return Found(tuple(pairs), (copies[0], copies[-2], copies[-1]) if small else None)


def _collect(ids: list[tuple], edges: int, limits: tuple[int, int, int], ends: tuple[int, ...],
             keys: list[int], marks: int, copies: list[int]) -> None:
    src, *dst, relation = copies or (0, 0)
    places = {end: marks + 4 * sum(keys[:k]) for k, end in enumerate(ends)}
    _launch("collect", edges, 1, (*ids[0], *ids[1], *ids[2], np.int64(edges),
                                  *map(np.int64, limits), src, dst[0] if dst else 0, relation,
                                  places.get(0, 0), places.get(1, 0), marks + 4 * sum(keys)))


def _number(ids: list[tuple], edges: int, limits: tuple[int, int, int], ends: tuple[int, ...],
            keys: list[int], sums: int, results: list[int]) -> None:
    first, last = ends[0], ends[-1]
    _launch("number", max(edges, limits[2] + 1), len(ends), (
        *ids[first], *ids[last], *ids[2], np.int64(edges), np.int64(limits[2]), sums,
        np.int64(keys[0]), np.int64(limits[first]), np.int64(limits[last]), *results[:4],
        *results[-4:], sums + 4 * sum(keys)))


class _Memory:
    """Arrays int32 of these sizes in one piece of memory, each where the widest load may begin:
    each allocation takes the host nearly as long as a launch."""

    __slots__ = ("addresses", "_starts", "_offset", "_all")

    def __init__(self, sizes: list[int], device: torch.device):
        *self._starts, total = itertools.accumulate((-(-size // _ALIGN) * _ALIGN
                                                     for size in sizes), initial=0)
        self._all = torch.empty(total, dtype=torch.int32, device=device)
        base, self._offset = self._all.data_ptr(), self._all.storage_offset()
        self.addresses = [base + 4 * start for start in self._starts]

    def take(self, number: int, size: int) -> Tensor:
        """The first ``size`` elements of an array."""
        return self._all.as_strided((size,), (1,), self._offset + self._starts[number])


def _ids(name: str, t: Tensor, edges: int, device: torch.device) -> tuple:
    """Kernel arguments of ids: address, bytes from one to the next, whether they are int64."""
    if t.shape != (edges,) or t.dtype not in IDS or t.device != device:
        raise ValueError(f"{name} is {list(t.shape)}, {t.dtype}, on {t.device}; needed is "
                         f"[{edges}], int32 or int64, on {device}")
    wide = t.dtype is torch.int64
    return t.data_ptr(), np.int64(t.stride(0) * (8 if wide else 4)), np.int32(wide)


def prepare() -> None:
    """Compile the kernels that build a view of edges. Raises CompileError."""
    for entry in ("collect", "number", "count", *SHARES.values()):
        kernels(entry)


def _launch(entry: str, threads: int, ends: int, args: tuple) -> None:
    kernels(entry)((-(-threads // _THREADS), ends), _THREADS, 0, args)


def counted(of_edge: Tensor, count: int) -> Tensor:
    """[``count``] int32: the number of edges of each pair. Waits for nothing.

    Args:
        of_edge: [E] int32, contiguous, all in [0, ``count``); not checked, which would need the
            device.

    Raises:
        ValueError: its shape, dtype or strides are others.
    """
    if of_edge.dim() != 1 or of_edge.dtype is not torch.int32 or not of_edge.is_contiguous():
        raise ValueError(f"of_edge is {list(of_edge.shape)}, {of_edge.dtype}, strides "
                         f"{list(of_edge.stride())}; needed is [edges], int32, contiguous")
    edges = of_edge.shape[0]
    counts = torch.zeros(count, dtype=torch.int32, device=of_edge.device)
    if edges:
        _launch("count", edges, 1, (of_edge.data_ptr(), np.int64(edges), counts.data_ptr()))
    return counts


def shares(of_edge: Tensor, counts: Tensor, dtype: torch.dtype,
           order: Tensor | None = None) -> Tensor:
    """[E]: 1 / the number of edges of each edge's pair, of the edges in ``order`` if there is one.
    Waits for nothing.

    Args:
        of_edge, counts: as `counted` takes and gives them.
        dtype: fp32 or fp64. order: [E] int32 or int64, contiguous, all in [0, E).

    Raises:
        ValueError: a tensor's shape, dtype, device or strides are others, or there is no such
            dtype.
    """
    edges, device = of_edge.shape[0], of_edge.device
    if (of_edge.dim() != 1 or of_edge.dtype is not torch.int32 or not of_edge.is_contiguous()
        or dtype not in SHARES or counts.dtype is not torch.int32 or not counts.is_contiguous()):
        raise ValueError(f"of_edge is {list(of_edge.shape)}, {of_edge.dtype}, strides "
                         f"{list(of_edge.stride())}, counts {counts.dtype}, shares {dtype}; needed "
                         "is [edges], int32, contiguous, counts likewise, and shares in fp32 or "
                         "fp64")
    if order is not None and (order.shape != (edges,) or order.dtype not in IDS
                              or order.device != device
                              or not order.is_contiguous()):
        raise ValueError(f"order is {list(order.shape)}, {order.dtype}, on {order.device}, strides "
                         f"{list(order.stride())}; needed is [{edges}], int32 or int64, "
                         f"contiguous, on {device}")
    out = torch.empty(edges, dtype=dtype, device=device)
    if edges:
        _launch(SHARES[dtype], edges, 1, (of_edge.data_ptr(), counts.data_ptr(), pointer(order),
                                          np.int32(order is not None
                                                   and order.dtype is torch.int64), np.int64(edges),
                                          out.data_ptr()))
    return out


class Sorted(NamedTuple):
    """Nodes by type: ``ends``, where each type begins and the last one ends, on the host, and as
    ``ptr`` [types + 1] int32; ``types`` [N] int32; ``order`` [N] int32, stable, or None where they
    lie so already."""

    ends: tuple[int, ...]
    ptr: Tensor
    types: Tensor
    order: Tensor | None


def sort_types(types: Tensor, num_types: int) -> Sorted | None:
    """The nodes by type; None if types are out of range. Waits once; takes some 16 bytes per node
    meanwhile, 8 per type.

    Args:
        types: [N] int32 or int64, with any stride; N below 2**31.

    Raises:
        ValueError: its shape or dtype is another.
    """
    device = types.device
    ids = _ids("types", types, len(types), device)
    nodes, run = len(types), max(_RUN, num_types // 2)
    parts = -(-nodes // run)
    counts = torch.zeros(num_types * parts + 2, dtype=torch.int32, device=device)
    flags = counts.data_ptr() + 4 * num_types * parts
    copy, order = (torch.empty(nodes, dtype=torch.int32, device=device) for _ in range(2))
    sizes = np.int64(nodes), np.int64(num_types), np.int64(run), np.int64(parts)
    _launch("tally", parts, 1, (*ids, *sizes, copy.data_ptr(), counts.data_ptr(), flags))
    sums = counts.narrow(0, 0, num_types * parts).cumsum(0, dtype=torch.int32)
    flat = torch.empty(num_types + 3, dtype=torch.int32, device=device)
    _launch("arrange", max(parts, num_types + 1, 2), 1, (copy.data_ptr(), sums.data_ptr(), *sizes,
                                                         counts.data_ptr(), flags,
                                                         order.data_ptr(), flat.data_ptr()))
    *ends, invalid, unsorted = flat.tolist()
    if invalid:
        return None
    return Sorted(tuple(ends), flat.narrow(0, 0, num_types + 1), copy, order if unsorted else None)
