"""Weights of edges in the order in which a traversal reads them, kept for weights that are made of
the graph alone.

A weight looked up by edge id costs a whole sector of memory for four bytes: 1.9 of the 4.7 ms that
a weighted sum over 79 million edges takes on an H200. Weights that are constants of the graph, as
GCN's are, need that only once. Weights of the caller's are looked up in each call: writing through
``.data`` or numpy changes them, and nobody sees it.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnnaccel.cuda.runtime import capture
from gnnaccel.cuda.structures.structure import Rows
from gnnaccel.dispatch.graph.tensor_ref import MemoryRef, version_of
from gnnaccel.dispatch.policy.names import IdentityMap

_MOST = 4  # weights kept per graph

Placed = tuple[Rows, Tensor]
#: for weights of 16 bits, by storage: their version, and the weights in fp32
_derived: IdentityMap[tuple[int, Tensor] | None] = IdentityMap()
#: versions of weights that are `inexact`, by storage
_inexact: IdentityMap[int] = IdentityMap()


def of_the_graph(weight: Tensor, exact: Tensor | None = None) -> Tensor:
    """``weight``, noted as made of a graph alone, by us, and handed to no one who would change it
    unseen. ``exact``: its values in fp32, see `in_fp32`. Writes to weights made in inference mode
    are not counted, so that such values are not kept beside them: these are `inexact`."""
    if exact is not None and weight.is_inference():
        inexact(weight)
        return weight
    _derived.set(weight.untyped_storage(), None if exact is None else (weight._version, exact))
    return weight


def is_of_the_graph(weight: Tensor) -> bool:
    """Whether these weights were noted as `of_the_graph`; kernels may read them in another order,
    from memory that holds them as they are now."""
    storage = weight.untyped_storage()
    entry = _derived.entries.get(id(storage))
    return entry is not None and entry[0]() is storage


def inexact(weight: Tensor) -> None:
    """Note that weights of 16 bits were divided by sums that the host took in 16 bits. Its own sum
    over the neighbours errs likewise, see `in_fp32`; that of kernels does not."""
    _inexact.set(weight.untyped_storage(), version_of(weight))


def is_inexact(weight: Tensor) -> bool:
    """Whether these weights were noted as `inexact`, and not written to since."""
    return (weight.element_size() == 2
            and _inexact.get(weight.untyped_storage()) == version_of(weight))


def in_fp32(weight: Tensor) -> Tensor:
    """The weights of the graph that kernels read: those computed in fp32 beside ``weight``, of 16
    bits; else ``weight`` itself.

    On a GPU the host counts a node's edges in the features' type: in bf16, 256 + 1 is 256. Its own
    sum over the neighbours stops likewise, so that the two errors cancel. The sum of the kernels
    is exact and needs exact weights.
    """
    if weight.element_size() > 2:
        return weight
    derived = _derived.get(weight.untyped_storage())
    if derived is None or derived[0] != weight._version or derived[1].numel() != weight.numel():
        return weight
    return derived[1].view(weight.shape)


class _Entry:
    """Entry of one tensor of weights at one version. ``seen``: look-ups so far, by destination and
    by source."""

    __slots__ = ("key", "memory", "stream", "seen", "found")

    def __init__(self, key: tuple, weight: Tensor):
        self.key, self.memory = key, MemoryRef(weight)
        self.stream = capture.stream(weight.device)
        self.seen = [0, 0]
        self.found: list[Placed | None] = [None, None]

    def of(self, key: tuple, weight: Tensor) -> bool:
        return self.key == key and self.memory.unwritten(weight)


class PlacedWeights:
    """The kept weights of one graph's edges."""

    # the one used last comes first; replaced as a whole, so that threads see one list or another
    _entries: Sequence[_Entry] = ()

    def find(self, weight: Tensor, by_src: bool, rows: Any) -> Placed | None:
        """Index arrays, and ``weight`` [E] or [E, H], fp32, in their order. None the first time,
        since it may be the last, and for weights that are not `of_the_graph`. ``rows()``: the index
        arrays whose ``place`` is the edge id."""
        if weight.requires_grad or weight.is_inference() or not weight.shape[0]:
            return None
        storage = weight.untyped_storage()
        derived = _derived.entries.get(id(storage))  # `IdentityMap.get`, without its call
        if derived is None or derived[0]() is not storage:
            return None
        key = id(storage), weight.data_ptr(), weight.shape, weight.stride(), weight.dtype
        entries = self._entries
        entry = entries[0] if entries else None
        if (entry is None or entry.key != key or entry.memory.version != weight._version
            or entry.memory() is not storage):  # `_Entry.of`
            entry = next((e for e in entries if e.of(key, weight)), None)
        if entry is None:
            entry = _Entry(key, weight)
        if not entries or entries[0] is not entry:
            others = (e for e in entries  # no older versions of it
                      if e is not entry and e.key != key and e.memory() is not None)
            self._entries = [entry, *others][:_MOST]
        entry.seen[by_src] += 1
        if entry.found[by_src] is None and entry.seen[by_src] > 1 and not _capturing(weight):
            entry.found[by_src] = _placed(weight, rows())
        stream = (torch._C._cuda_getCurrentRawStream(weight.device.index) if weight.is_cuda
                  else 0)  # as `capture.stream`, without its call
        return entry.found[by_src] if entry.stream == stream else None

    def nbytes(self) -> int:
        if not self._entries:
            return 0
        return sum(placed[1].nbytes for entry in self._entries for placed in entry.found
                   if placed is not None)


@torch.inference_mode(False)
@torch.no_grad()
def _placed(weight: Tensor, rows: Rows) -> Placed:
    # beyond the last edge ``place`` holds whatever the memory held; nothing reads those weights,
    # but an index must fit
    order = rows.place.clamp(0, weight.shape[0] - 1)
    return rows, weight.detach().float().index_select(0, order)


def _capturing(weight: Tensor) -> bool:
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()
