"""Sizes of well-known graphs with typed edges, and how many edges each relation gets."""
from __future__ import annotations

import dataclasses

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


def scaled(shape: RelationShape, factor: float) -> RelationShape:
    """``shape`` with nodes, edges and degrees times ``factor``, and all its relations (for
    tests)."""
    nodes = tuple(max(1, round(count * factor)) for count in shape.nodes)
    sizes = tuple(max(1, round(count * factor)) for count in shape.sizes)
    edges = sum(sizes) or max(1, round(shape.num_edges * factor))
    largest = max(round(shape.max_degree * factor), 4 * edges // sum(nodes), 1)
    return dataclasses.replace(shape, nodes=nodes, sizes=sizes, num_edges=edges, max_degree=largest)
