"""Edges of several types as one list (``src/join.cuh``): one copy to the device and one launch,
however many types there are."""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import Kernels, sent

_THREADS = 256
_WIDE = {torch.int32: 0, torch.int64: 1}
_COUNTS = (0, 0, 0, 0)  # no addresses: ids that count upwards

kernels = Kernels("structure", (("OFF_T", "int"),))  # the text that has the kernel


class Range(NamedTuple):
    """Target of a part's edges: their relation, and the first node and the number of nodes at each
    end."""

    relation: int
    src: int
    num_src: int
    dst: int
    num_dst: int


class Joined(NamedTuple):
    """``src``, ``dst``, ``relation``: [E] int32, part after part. ``wrong`` [1] int64: ``2 * part +
    end`` of the first end (0 for sources, 1 for destinations) with ids outside its range, which
    became -1; twice the number of parts where there is none."""

    src: Tensor
    dst: Tensor
    relation: Tensor
    wrong: Tensor


def prepare() -> None:
    """Compile the kernel. Raises CompileError."""
    kernels("join")


def join(parts: Sequence[Tensor | tuple[Tensor, Tensor] | None],
         ranges: Sequence[tuple[int, int, int, int, int]], device: torch.device) -> Joined:
    """The edges of all ``parts`` in one list; asks nothing of the device.

    Args:
        parts: each [2, E_r] or a pair of [E_r], int32 or int64, of any strides, on ``device``;
            None: as many edges as sources, from the i-th source to the i-th destination.
        ranges: a `Range` for each.

    Fewer than 2**31 edges; ids of nodes below 2**31. ValueError where there are more edges;
    KeyError for other dtypes.
    """
    first = [0, *itertools.accumulate(_edges(part, into)
                                      for part, into in zip(parts, ranges, strict=True))]
    edges, count = first.pop(), len(first)
    if edges >= 2**31:
        raise ValueError(f"{edges} edges; they must be fewer than 2**31")
    words = [2 * count, *first]
    for part, into in zip(parts, ranges):
        words += _addresses(part)
        words += into
    table = sent(words, torch.int64, device)
    src, dst, relation = torch.empty((3, edges), dtype=torch.int32, device=device).unbind(0)
    kernels("join")((-(-edges // _THREADS), 1), _THREADS, 0, (
        np.int32(count), np.int32(edges), table.data_ptr(), src.data_ptr(), dst.data_ptr(),
        relation.data_ptr()))
    return Joined(src, dst, relation, table[:1])


def _edges(part: Tensor | tuple[Tensor, Tensor] | None,
           into: tuple[int, int, int, int, int]) -> int:
    if part is None:
        return into[2]
    return part[0].shape[0] if isinstance(part, tuple) else part.shape[1]


def _addresses(part: Tensor | tuple[Tensor, Tensor] | None) -> tuple[int, int, int, int]:
    """Address and pitch of sources and destinations, as join.cuh has them."""
    if part is None:
        return _COUNTS
    if isinstance(part, tuple):
        src, dst = part
        return (src.data_ptr(), 2 * src.stride(0) + _WIDE[src.dtype], dst.data_ptr(),
                2 * dst.stride(0) + _WIDE[dst.dtype])
    wide, first, (across, along) = _WIDE[part.dtype], part.data_ptr(), part.stride()
    pitch = 2 * along + wide
    return first, pitch, first + across * (8 if wide else 4), pitch
