"""Graphs with typed edges, made on the device they are measured on.

Each relation is drawn like the graphs of `shapes`: power-law degrees at both ends, sources and
destinations matched at random. Duplicate edges and self loops occur; no layer minds.
"""
from __future__ import annotations

import dataclasses
import functools

import torch

from gnnaccel.profile.bench import relation_files, shapes
from gnnaccel.profile.bench.relation_shapes import RelationShape, relation_sizes

Triple = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class RelationGraph:
    """``edge_index`` is [2, E] int64, row 0 the sources; ``edge_type`` is [E] int64. Nodes are
    grouped by type."""

    shape: RelationShape
    edge_index: torch.Tensor
    edge_type: torch.Tensor

    @property
    def num_nodes(self) -> int:
        return self.shape.num_nodes

    @property
    def num_edges(self) -> int:
        return int(self.edge_index.shape[1])

    @property
    def num_relations(self) -> int:
        return self.shape.num_relations

    @property
    def device(self) -> torch.device:
        return self.edge_index.device

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


def make(shape: RelationShape, device: torch.device | str, seed: int = 0,
         order: str = "random") -> RelationGraph:
    """Build or load the graph. The same shape, seed, order and kind of device give the same graph.

    ``order``: ``"random"`` leaves the edges in no order; ``"dst"`` groups them by destination.
    """
    device = torch.device(device)
    if shape.path:
        read = relation_files.read(shape.path)
        edges, kinds = (torch.from_numpy(part).to(device)
                        for part in (read.edge_index, read.edge_type))
    else:
        edges, kinds = _generate(shape, device, seed)
    if order == "dst":
        moved = torch.argsort(edges[1], stable=True)
        edges, kinds = edges[:, moved], kinds[moved]
    return RelationGraph(shape, edges, kinds)


def facts(graph: RelationGraph) -> dict[str, float]:
    """What a reader must know of a graph to judge a time; ``pairs_src`` and ``pairs_dst`` are the
    shares of the edges that compaction by source and by destination keeps."""
    sizes = torch.bincount(graph.edge_type, minlength=graph.num_relations)
    degrees = torch.bincount(graph.edge_index[1], minlength=graph.num_nodes)
    return {"num_nodes": graph.num_nodes, "num_edges": graph.num_edges,
            "num_relations": graph.num_relations, "median_relation": int(sizes.median()),
            "max_in_degree": int(degrees.max()), **{f"pairs_{name}": _pairs(graph, end)
                                                    for name, end in (("src", 0), ("dst", 1))}}


def _pairs(graph: RelationGraph, end: int) -> float:
    codes = graph.edge_type * graph.num_nodes + graph.edge_index[end]
    return len(codes.unique()) / max(1, graph.num_edges)


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
