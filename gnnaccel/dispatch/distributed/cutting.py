"""Assigning each node to the part that owns it."""
from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np

from gnnaccel.errors import PartitionError

#: edges that are looked at together
CHUNK = 1 << 22


def chunks(length: int, size: int = CHUNK) -> Iterator[slice]:
    """Slices that cover ``range(length)`` in order, each of at most ``size``."""
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def in_degrees(destinations: Any, nodes: int, chunk: int = CHUNK) -> np.ndarray:
    """How many edges enter each node, int64 [nodes]. ``destinations``: an array [E], read chunk by
    chunk."""
    degrees = np.zeros(nodes, np.int64)
    for at in chunks(len(destinations), chunk):
        degrees += np.bincount(np.asarray(destinations[at]), minlength=nodes)
    return degrees


def by_edges(degrees: np.ndarray, parts: int) -> np.ndarray:
    """The owner of each node, int32 [N]: ``parts`` ranges of consecutive nodes.

    A node weighs one more than the edges that enter it, so that nodes without edges are shared out
    too. A range may be empty, where there are fewer nodes than parts or one node has most edges.
    """
    ends = np.cumsum(degrees + 1)
    total = int(ends[-1]) if len(ends) else 0
    middle = ends - (degrees + 1) / 2  # a node goes where its middle lies
    return np.minimum((middle * parts / max(total, 1)).astype(np.int32), parts - 1)


def given(assignment: Any, nodes: int, parts: int, name: str) -> np.ndarray:
    """A user's assignment, checked. PartitionError where it is not [nodes] integers in
    [0, parts)."""
    owner = np.asarray(assignment)
    if owner.shape != (nodes,) or owner.dtype.kind not in "iu":
        raise PartitionError(
            f"the assignment of {name} is {owner.dtype} of shape {list(owner.shape)}; "
            f"it has to be one integer for each of the {nodes} nodes")
    if nodes and not (0 <= owner.min() and owner.max() < parts):
        raise PartitionError(f"the assignment of {name} names parts from {owner.min()} to "
                             f"{owner.max()}; there are {parts}, numbered from 0")
    return owner.astype(np.int32)


def by_pymetis(edge_index: Any, nodes: int, parts: int) -> np.ndarray:
    """The owner of each node by METIS (Karypis and Kumar, 1998), which cuts few edges. Needs the
    whole graph in memory, and `pymetis`."""
    import pymetis  # type: ignore[import-not-found, import-untyped, unused-ignore]

    if parts == 1 or nodes == 0:
        return np.zeros(nodes, np.int32)
    pointers, neighbours = symmetric(edge_index, nodes)
    if hasattr(pymetis, "CSRAdjacency"):  # not in older versions
        _, owner = pymetis.part_graph(parts, pymetis.CSRAdjacency(pointers, neighbours))
    else:
        _, owner = pymetis.part_graph(parts, xadj=pointers.tolist(), adjncy=neighbours.tolist())
    return np.asarray(owner, np.int32)


def has_pymetis() -> bool:
    return importlib.util.find_spec("pymetis") is not None


def symmetric(edge_index: Any, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """(pointers [N + 1], neighbours): each pair of neighbours in both directions, once, without
    loops, as METIS needs them."""
    ends = np.asarray(edge_index)
    source, target = np.concatenate([ends, ends[::-1]], 1)
    pairs = np.unique((source * nodes + target)[source != target])
    pointers = np.searchsorted(pairs, np.arange(nodes + 1, dtype=np.int64) * nodes)
    return pointers, pairs % max(nodes, 1)
