"""Real graphs with typed edges, out of ``.npz`` files.

A file has ``edge_index`` [2, E] (row 0 the sources), ``edge_type`` [E], ``num_nodes``,
``num_relations`` and possibly ``node_type`` [N]. Two things are made of it as models train on it:
the nodes are renumbered so that those of one type are consecutive, and where the edges run in one
direction only the inverse of every relation is added.
"""
from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from gnnaccel.profile.bench.relation_shapes import ENTITY_LAYERS, FILES, RelationShape


@dataclasses.dataclass(frozen=True)
class Read:
    """What is in a file. ``nodes``: how many of each type."""

    edge_index: np.ndarray
    edge_type: np.ndarray
    nodes: tuple[int, ...]
    num_relations: int


def read(path: str | Path) -> Read:
    """Read one file. Raises ValueError when it holds no typed edges, OSError when there is no such
    file."""
    with np.load(path, allow_pickle=False) as data:
        missing = [key for key in ("edge_index", "edge_type", "num_nodes", "num_relations")
                   if key not in data]
        if missing:
            raise ValueError(f"{Path(path).name} is no graph with typed edges: it has no "
                             f"{', '.join(missing)}")
        edges, kinds = data["edge_index"].astype(np.int64), data["edge_type"].astype(np.int64)
        nodes, relations = int(data["num_nodes"]), int(data["num_relations"])
        types = (data["node_type"].astype(np.int64) if "node_type" in data
                 else np.zeros(nodes, np.int64))
    place = np.empty(nodes, np.int64)
    place[np.argsort(types, kind="stable")] = np.arange(nodes)
    edges = place[edges]
    if not _both_ways(edges, nodes):
        edges = np.concatenate([edges, edges[::-1]], axis=1)
        kinds, relations = np.concatenate([kinds, kinds + relations]), 2 * relations
    return Read(edges, kinds, tuple(np.bincount(types).tolist()), relations)


def resolve(folder: str | Path, name: str) -> RelationShape:
    """The shape of ``folder``/``name``.npz. Raises ValueError when there is none."""
    path = Path(folder) / f"{name}.npz"
    if not path.is_file():
        raise ValueError(f"--data has no {path.name}")
    found = read(path)
    degrees = np.bincount(found.edge_index[1])
    return RelationShape(name, found.nodes, int(found.edge_index.shape[1]), found.num_relations,
                         int(degrees.max(initial=0)), layers=FILES.get(name, ENTITY_LAYERS),
                         path=str(path))


def _both_ways(edges: np.ndarray, nodes: int) -> bool:
    """Does every edge have one that runs back, by whatever relation?"""
    there, back = (np.unique(edges[end] * nodes + edges[1 - end]) for end in (0, 1))
    return np.array_equal(there, back)
