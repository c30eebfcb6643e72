"""Graphs with typed edges, of the sizes of well-known ones, made on the device that is measured, or
out of ``.npz`` files.

Each relation is drawn like the graphs of `shapes`: power-law degrees at both ends, sources and
destinations matched at random. Duplicate edges and self loops occur; no layer minds.

A file has ``edge_index`` [2, E] (row 0 the sources), ``edge_type`` [E], ``num_nodes``,
``num_relations`` and possibly ``node_type`` [N]. Two things are made of it as models train on it:
the nodes are renumbered so that those of one type are consecutive, and where the edges run in one
direction only the inverse of every relation is added.
"""
from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np
import torch

from gnnaccel.profile.bench import shapes

ENTITY_LAYERS = ("RGCN 64", "FastRGCN 64", "RGAT 64")
TYPED_LAYERS = ("HGT 4x16", "HeteroSAGE 64")
MODELS_OVER_TYPES = ("to_hetero SAGE 64", "to_hetero_with_bases SAGE 64")


@dataclasses.dataclass(frozen=True)
class RelationShape:
    """The recipe of a graph with typed edges.

    ``nodes``: how many of each node type. ``ends``: per relation the types of its source and
    destination nodes; without it any node may be either. ``sizes``: edges per relation; without it
    they follow Zipf's law. ``block``: (a, b) when a sources are joined with b destinations each by
    the same relation, so that compaction finds what it finds in real knowledge graphs: about E/b
    different (source, relation) pairs and E/a (destination, relation) pairs. ``layers``: what is
    measured on it unless the user says otherwise. ``path``: of a file that holds the graph instead.
    """

    name: str
    nodes: tuple[int, ...]
    num_edges: int
    num_relations: int
    max_degree: int = 0
    block: tuple[int, int] = (1, 1)
    ends: tuple[tuple[int, int], ...] = ()
    sizes: tuple[int, ...] = ()
    layers: tuple[str, ...] = ENTITY_LAYERS
    path: str = ""

    @property
    def num_nodes(self) -> int:
        return sum(self.nodes)


def relation_sizes(shape: RelationShape) -> torch.Tensor:
    """Edges of each relation, [R] int64 summing to ``num_edges``, largest first unless the shape
    lists them.

    Zipf's law: the r-th relation has 1/r of the first one's edges. With FB15k-237's size half of
    the relations then have under 400 edges, as they do in reality.
    """
    if shape.sizes:
        return torch.tensor(shape.sizes, device="cpu")
    rank = torch.arange(1, shape.num_relations + 1, dtype=torch.float64, device="cpu")
    share = 1 / rank
    return shapes.whole(share * (shape.num_edges / share.sum()), shape.num_edges)


# ogbn-mag: papers, authors, institutions, fields; written by, cites, affiliated with, has topic.
_MAG_NODES = (736_389, 1_134_649, 8_740, 59_965)
_MAG_ENDS = ((1, 0), (0, 0), (1, 2), (0, 3))
_MAG_SIZES = (7_145_660, 5_416_271, 1_043_998, 7_505_078)

SHAPES = {shape.name: shape for shape in (
    RelationShape("tiny-typed", (80, 70, 50), 1_200, 6, 40, (2, 2),
                  ends=((0, 1), (1, 0), (1, 2), (2, 1), (0, 0), (2, 2)),
                  layers=(*ENTITY_LAYERS, *TYPED_LAYERS)),
    RelationShape("aifb-size", (8_285,), 58_086, 90, 1_250, (2, 2)),
    RelationShape("fb15k-size", (14_541,), 620_000, 474, 7_600, (3, 3)),
    RelationShape("am-size", (1_900_000,), 5_700_000, 96, 100_000, (2, 2), layers=("RGCN 64",)),
    RelationShape("mag-size", _MAG_NODES, sum(_MAG_SIZES), 4, 30_000, ends=_MAG_ENDS,
                  sizes=_MAG_SIZES, layers=("RGCN 64",)),
    # With the inverse of every relation, as heterogeneous models train on it.
    RelationShape("mag-inverse-size", _MAG_NODES, 2 * sum(_MAG_SIZES), 8, 30_000,
                  ends=(*_MAG_ENDS, *((target, source) for source, target in _MAG_ENDS)),
                  sizes=2 * _MAG_SIZES, layers=("HGT 4x16",)),
    RelationShape("wikikg2-size", (2_500_604,), 16_109_182, 535, 100_000, (2, 2),
                  layers=("RGCN 64", "RGAT 64")),
    RelationShape("hetero-64", (25_000,) * 8, 2_000_000, 64, 2_000, layers=("HeteroSAGE 64",),
                  ends=tuple((source, target) for source in range(8) for target in range(8))),
    RelationShape("hetero-16", (12_500,) * 4, 400_000, 16, 1_000,
                  layers=("HeteroSAGE 64", *MODELS_OVER_TYPES),
                  ends=tuple((source, target) for source in range(4) for target in range(4))),
    RelationShape("dblp-size", (4_057, 14_328, 20, 7_723), 239_566, 6, 1_800, layers=TYPED_LAYERS,
                  ends=((1, 0), (0, 1), (1, 2), (2, 1), (1, 3), (3, 1)),
                  sizes=(19_645, 19_645, 14_328, 14_328, 85_810, 85_810)),
)}
DEFAULT = ("aifb-size", "fb15k-size", "am-size", "mag-size", "mag-inverse-size", "wikikg2-size",
           "hetero-64", "hetero-16")
CPU = ("aifb-size", "dblp-size")

FILES = {"aifb": ENTITY_LAYERS, "mutag_rdf": ENTITY_LAYERS, "fb15k_237": ENTITY_LAYERS,
         "wn18rr": ENTITY_LAYERS, "debian_kg": ENTITY_LAYERS, "het_dblp": TYPED_LAYERS}
"""Files that ``--data`` looks for by default, and the layers measured on each."""

NEEDLESS = {"aifb-size": "aifb", "fb15k-size": "fb15k_237", "dblp-size": "het_dblp"}
"""Synthetic shapes left out by default when the file they imitate is there."""


# --- graphs ---------------------------------------------------------------------------------------

Triple = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class RelationGraph(shapes.Graph):
    """``edge_type`` is [E] int64. Nodes are grouped by type."""

    shape: RelationShape
    edge_type: torch.Tensor

    @property
    def num_relations(self) -> int:
        return self.shape.num_relations

    @property
    def node_counts(self) -> dict[str, int]:
        """Nodes by type, types without nodes left out."""
        return {f"t{number}": count for number, count in enumerate(self.shape.nodes) if count}

    @functools.cached_property
    def typed(self) -> dict[Triple, torch.Tensor]:
        """The edges as heterogeneous layers take them: by (source type, relation, destination
        type), with node ids counted within their type. A relation between several pairs of types
        becomes several entries."""
        counts = torch.tensor(self.shape.nodes, device=self.device)
        starts = counts.cumsum(0) - counts
        types = torch.bucketize(self.edge_index, counts.cumsum(0), right=True)
        code = (self.edge_type * len(counts) + types[0]) * len(counts) + types[1]
        code, order = code.sort(stable=True)
        local = (self.edge_index - starts[types])[:, order]
        found, sizes = (part.tolist() for part in code.unique_consecutive(return_counts=True))
        parts = local.split(sizes, dim=1)
        return {_triple(value, len(counts)): part.contiguous() for value, part in zip(found, parts)}

    def facts(self) -> dict[str, float]:
        """Those of any graph, of its relations, and as ``pairs_src`` and ``pairs_dst`` the shares
        of the edges that compaction by source and by destination keeps."""
        sizes = torch.bincount(self.edge_type, minlength=self.num_relations)
        return {**super().facts(), "num_relations": self.num_relations,
                "median_relation": int(sizes.median()),
                **{f"pairs_{name}": self._pairs(end) for name, end in (("src", 0), ("dst", 1))}}

    def _pairs(self, end: int) -> float:
        codes = self.edge_type * self.num_nodes + self.edge_index[end]
        return len(codes.unique()) / max(1, self.num_edges)


def make(shape: RelationShape, device: torch.device | str, seed: int = 0,
         order: str = "random") -> RelationGraph:
    """Build or load the graph. The same shape, seed, order and kind of device give the same graph.

    ``order``: ``"random"`` leaves the edges in no order; ``"dst"`` groups them by destination.
    """
    device = torch.device(device)
    if shape.path:
        read = read_file(shape.path)
        edges, kinds = (torch.from_numpy(part).to(device)
                        for part in (read.edge_index, read.edge_type))
    else:
        edges, kinds = _generate(shape, device, seed)
    if order == "dst":
        moved = torch.argsort(edges[1], stable=True)
        edges, kinds = edges[:, moved], kinds[moved]
    return RelationGraph(shape, edges, kinds)


def _triple(code: int, types: int) -> Triple:
    relation, ends = divmod(code, types * types)
    source, target = divmod(ends, types)
    return f"t{source}", f"r{relation}", f"t{target}"


def _generate(shape: RelationShape, device: torch.device,
              seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    sizes = relation_sizes(shape)
    kinds = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), sizes).to(device)
    if shape.ends:
        edges = torch.cat([_relation(shape, relation, int(size), generator)
                           for relation, size in enumerate(sizes)], dim=1)
    else:
        edges = _blocks(shape, (shape.num_nodes,) * 2, shape.num_edges, shape.max_degree, generator)
    moved = torch.randperm(shape.num_edges, generator=generator, device=device)
    return edges[:, moved], kinds[moved]


def _relation(shape: RelationShape, relation: int, size: int,
              generator: torch.Generator) -> torch.Tensor:
    """The edges of one relation between its own two types; its hubs are as large as its share of
    the edges."""
    starts = [sum(shape.nodes[:kind]) for kind in shape.ends[relation]]
    src, dst = shape.ends[relation]
    counts = shape.nodes[src], shape.nodes[dst]
    edges = _blocks(shape, counts, size, shape.max_degree * size // shape.num_edges, generator)
    return edges + torch.tensor(starts, device=edges.device)[:, None]


def _blocks(shape: RelationShape, counts: tuple[int, int], size: int, largest: int,
            generator: torch.Generator) -> torch.Tensor:
    """``size`` edges, in blocks that join each of a sources with each of b destinations."""
    sources, targets = shape.block
    blocks = -(-size // (sources * targets))
    ends = [_ends(count, blocks * many, largest // other, generator).view(blocks, many)
            for count, many, other in zip(counts, (sources, targets), (targets, sources))]
    pair = torch.stack([ends[0][:, :, None].expand(-1, -1, targets),
                        ends[1][:, None, :].expand(-1, sources, -1)])
    return pair.reshape(2, -1)[:, :size]


def _ends(nodes: int, count: int, largest: int, generator: torch.Generator) -> torch.Tensor:
    """``count`` node ids by a power law, in random order. No degree law reaches its sum with a
    smaller maximum."""
    largest = min(count, max(largest, 4 * -(-count // nodes)))
    degrees = shapes.degree_law(shapes.Shape("", nodes, count, largest))
    return shapes.endpoints(degrees.to(generator.device), generator)


# --- files ----------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Read:
    """What is in a file. ``nodes``: how many of each type."""

    edge_index: np.ndarray
    edge_type: np.ndarray
    nodes: tuple[int, ...]
    num_relations: int


def read_file(path: str | Path) -> Read:
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


def in_file(folder: str | Path, name: str) -> RelationShape:
    """The shape of ``folder``/``name``.npz. Raises ValueError when there is none."""
    path = Path(folder) / f"{name}.npz"
    if not path.is_file():
        raise ValueError(f"--data has no {path.name}")
    found = read_file(path)
    degrees = np.bincount(found.edge_index[1])
    return RelationShape(name, found.nodes, int(found.edge_index.shape[1]), found.num_relations,
                         int(degrees.max(initial=0)), layers=FILES.get(name, ENTITY_LAYERS),
                         path=str(path))


def _both_ways(edges: np.ndarray, nodes: int) -> bool:
    """Does every edge have one that runs back, by whatever relation?"""
    there, back = (np.unique(edges[end] * nodes + edges[1 - end]) for end in (0, 1))
    return np.array_equal(there, back)
