"""Parts made of a graph in arrays, chunk by chunk: no more than a chunk of edges, and a few numbers
for each node, are held in memory."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gnnaccel.dispatch.distributed import cutting, storage
from gnnaccel.dispatch.distributed.cutting import CHUNK, chunks
from gnnaccel.errors import VALID, GraphError, PartitionError

Relation = tuple[str, str, str]
Named = dict[str, tuple[Any, str]]  # array and torch's name of its dtype

#: the node type and the relation of a graph that has but one of each
NODE = "node"
EDGE: Relation = (NODE, "to", NODE)


@dataclass
class Graph:
    """A graph to be cut. Arrays may be memory-mapped.

    ``nodes``: how many of each type; ``edges``: (sources, destinations), each [E], by relation;
    ``node_rows``, ``edge_rows``: arrays of a row for each node or edge, by type and name;
    ``whole``: arrays that every part gets whole; ``plain``: likewise values that JSON can write.
    ``hetero``: whether types were given.
    """

    nodes: dict[str, int]
    edges: dict[Relation, tuple[Any, Any]]
    node_rows: dict[str, Named] = field(default_factory=dict)
    edge_rows: dict[Relation, Named] = field(default_factory=dict)
    whole: Named = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    hetero: bool = False


def owners(graph: Graph, parts: int, given: Mapping[str, Any] | None,
           chunk: int = CHUNK) -> dict[str, np.ndarray]:
    """The owner of each node by type: as ``given``, else ranges balanced by the edges that
    enter."""
    by_kind = {}
    for kind, count in graph.nodes.items():
        if given is not None:
            if kind not in given:
                raise PartitionError(f"the assignment lacks node type {kind!r}; it has "
                                     f"{sorted(given)}")
            by_kind[kind] = cutting.given(given[kind], count, parts, f"node type {kind!r}"
                                          if graph.hetero else "nodes")
            continue
        degrees = np.zeros(count, np.int64)
        for (_, _, target), (_, ends) in graph.edges.items():
            if target == kind:
                degrees += cutting.in_degrees(ends, count, chunk)
        by_kind[kind] = cutting.by_edges(degrees, parts)
    return by_kind


def check(graph: Graph, chunk: int = CHUNK) -> None:
    """GraphError for an edge whose node does not exist; PartitionError for arrays whose lengths do
    not fit."""
    for relation, pair in graph.edges.items():
        if len(pair[0]) != len(pair[1]):
            raise PartitionError(f"{relation} has {len(pair[0])} sources and {len(pair[1])} "
                                 "destinations; there has to be one of each for every edge")
        for ends, kind in zip(pair, (relation[0], relation[2])):
            for at in chunks(len(ends), chunk):
                ids = np.asarray(ends[at])
                if ids.min() < 0 or ids.max() >= graph.nodes[kind]:
                    wrong = ids.min() if ids.min() < 0 else ids.max()
                    raise GraphError(f"an edge names node {wrong} of {graph.nodes[kind]}. {VALID}")
    rows = [(kind, graph.nodes[kind], named) for kind, named in graph.node_rows.items()]
    edges: list[Any] = [(relation, len(graph.edges[relation][0]), named)
                        for relation, named in graph.edge_rows.items()]
    for what, count, named in rows + edges:
        for name, (array, _) in named.items():
            if len(array) != count:
                raise PartitionError(f"{name} of {what} has {len(array)} rows; there have to be "
                                     f"{count}, one for each")


def write(graph: Graph, owner: dict[str, np.ndarray], parts: int, out: Path, method: str,
          chunk: int = CHUNK) -> None:
    """Write all parts to the folder ``out``, which gets its name last."""
    check(graph, chunk)
    storage.writing(out, lambda folder: _Writer(graph, owner, parts, chunk).write(folder, method))


class _Writer:
    def __init__(self, graph: Graph, owner: dict[str, np.ndarray], parts: int, chunk: int):
        self.graph, self.owner, self.parts, self.chunk = graph, owner, parts, chunk
        #: place of each node among the own nodes of its owner, by type
        self.local = {kind: _places(owner_of, parts) for kind, owner_of in owner.items()}
        self.own = {kind: [np.flatnonzero(owner_of == part) for part in range(parts)]
                    for kind, owner_of in owner.items()}

    def write(self, out: Path, method: str) -> None:
        folders = [storage.Folder(out / f"part-{part}", part) for part in range(self.parts)]
        sources = {relation: self._edges(relation, folders) for relation in self.graph.edges}
        halos = [self._renumbered({relation: arrays[part] for relation, arrays in sources.items()},
                                  part) for part in range(self.parts)]
        for part, folder in enumerate(folders):
            self._plan(folder, part, halos)
            for kind, rows in self.graph.node_rows.items():
                for name, (array, dtype) in rows.items():
                    self._rows(folder, ["rows", kind, name], array, dtype, self.own[kind][part])
            for name, (array, dtype) in self.graph.whole.items():
                folder.put(["whole", name], np.asarray(array), dtype)
        del sources
        graph = self.graph
        storage.write_json(out / storage.MANIFEST, {
            "format": storage.FORMAT, "parts": self.parts, "method": method,
            "hetero": graph.hetero, "nodes": graph.nodes, "plain": graph.plain,
            "edges": [[*relation, len(ends[0])] for relation, ends in graph.edges.items()],
            "manifests": [folder.close() for folder in folders]})

    def _edges(self, relation: Relation, folders: list[storage.Folder]) -> list[np.ndarray]:
        """Write each part's edges, in the graph's order, and their rows. Returns the arrays [2, E]
        of the parts, in which sources still have the numbers of the whole graph."""
        source, target = self.graph.edges[relation]
        owner, local = self.owner[relation[2]], self.local[relation[2]]
        counts = np.zeros(self.parts, np.int64)
        for at in chunks(len(target), self.chunk):
            counts += np.bincount(owner[target[at]], minlength=self.parts)
        edges = [folder.create(["edges", *relation], (2, int(count)), np.int64)
                 for folder, count in zip(folders, counts)]
        ids = [folder.create(["edge_ids", *relation], (int(count),), np.int64)
               for folder, count in zip(folders, counts)]
        filled = [0] * self.parts
        for at in chunks(len(target), self.chunk):
            ends = np.asarray(target[at])
            starts, part_of = np.asarray(source[at]), owner[ends]
            for part in range(self.parts):
                mine = np.flatnonzero(part_of == part)
                to = slice(filled[part], filled[part] + len(mine))
                edges[part][0, to], edges[part][1, to] = starts[mine], local[ends[mine]]
                ids[part][to] = mine + at.start
                filled[part] = to.stop
        for name, (array, dtype) in self.graph.edge_rows.get(relation, {}).items():
            for part, folder in enumerate(folders):
                self._rows(folder, ["edge_rows", *relation, name], array, dtype, ids[part])
        return edges

    def _renumbered(self, edges: dict[Relation, np.ndarray], part: int) -> dict[str, np.ndarray]:
        """Number a part's sources over [own | halo]. Returns the halo by node type, in the numbers
        of the whole graph."""
        halos = {}
        for kind, count in self.graph.nodes.items():
            mine = [ends[0] for relation, ends in edges.items() if relation[0] == kind]
            needed = np.zeros(count, bool)
            for sources in mine:
                for at in chunks(len(sources), self.chunk):
                    needed[sources[at]] = True
            own = self.own[kind][part]
            needed[own] = False
            halo = np.flatnonzero(needed)
            halo = halos[kind] = halo[np.argsort(self.owner[kind][halo], kind="stable")]
            place = np.empty(count, np.int64)
            place[own] = np.arange(len(own))
            place[halo] = np.arange(len(own), len(own) + len(halo))
            for sources in mine:
                for at in chunks(len(sources), self.chunk):
                    sources[at] = place[sources[at]]
        return halos

    def _plan(self, folder: storage.Folder, part: int, halos: list[dict[str, np.ndarray]]) -> None:
        """Write which rows go to whom, in the order in which the receiver numbers them."""
        for kind in self.graph.nodes:
            halo, owner = halos[part][kind], self.owner[kind]
            wanted = [theirs[kind][owner[theirs[kind]] == part] for theirs in halos]
            folder.put(["own", kind], self.own[kind][part].astype(np.int64))
            folder.put(["halo", kind], halo.astype(np.int64))
            folder.put(["receive", kind],
                       np.bincount(owner[halo], minlength=self.parts).astype(np.int64))
            folder.put(["send", kind], np.array([len(rows) for rows in wanted], np.int64))
            folder.put(["send_rows", kind],
                       self.local[kind][np.concatenate(wanted)].astype(np.int64))

    def _rows(self, folder: storage.Folder, key: list[str], array: Any, dtype: str,
              rows: np.ndarray) -> None:
        out = folder.create(key, (len(rows), *array.shape[1:]), array.dtype, dtype)
        step = max(1, self.chunk // max(1, int(np.prod(array.shape[1:]))))
        for at in chunks(len(rows), step):
            out[at] = array[rows[at]]


def _places(owner: np.ndarray, parts: int) -> np.ndarray:
    """Each node's place among the nodes of its owner, ascending."""
    places = np.empty(len(owner), np.int64)
    for part in range(parts):
        mine = np.flatnonzero(owner == part)
        places[mine] = np.arange(len(mine))
    return places
