"""Edges to which self loops were added within the capture of a CUDA graph.

Within a capture the number of loops among the edges cannot be known. So the list has all of the
caller's edges, with a weight of zero for those that are loops, and then a loop for each node. Sums
of weighted messages come out right over it. The structure that kernels read is built of the
caller's edges, and leaves the old loops out.
"""
from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gnnaccel.dispatch.policy.names import IdentityMap


class Looped(NamedTuple):
    """Parts of such a list: the caller's ``edge_index``, and how many loops come after it."""

    edge_index: Tensor
    loops: int


_looped: IdentityMap[Looped] = IdentityMap()


def note(edges: Tensor, edge_index: Tensor, loops: int) -> None:
    """Note that ``edges`` are ``edge_index`` and ``loops`` loops."""
    _looped.set(edges, Looped(edge_index, loops))


def of(edges: Tensor) -> Looped | None:
    """The parts of these edges, None if they are no such list."""
    return _looped.get(edges) if _looped.entries else None
