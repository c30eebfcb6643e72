"""DGL's layers: graphs as DGL has them, and one layer on one graph in one mode, natively and
through gnnaccel."""
from __future__ import annotations

import dataclasses
from typing import Any

import torch

from gnnaccel.adapters.dgl import bench as dgl
from gnnaccel.profile.bench import (accel, dgl_twins, layer_cells, relation_graph, shapes,
                                    suite_attention, timing)
from gnnaccel.profile.bench.dgl_plan import AnyShape
from gnnaccel.profile.bench.relation_shapes import RelationShape
from gnnaccel.profile.bench.relation_steps import RelationStep
from gnnaccel.profile.bench.result import Record

KIND = "dgl"


@dataclasses.dataclass(frozen=True)
class DglGraph:
    """``graph`` is DGL's. ``node_type`` [N] and ``edge_type`` [E] by edge id ascend; both are None
    without edge types. ``source``: the benchmark's own graph that it was made of, for PyG's
    layers."""

    shape: AnyShape
    graph: Any
    device: torch.device
    node_type: torch.Tensor | None = None
    edge_type: torch.Tensor | None = None
    source: Any = None


def make(shape: AnyShape, device: torch.device, seed: int, order: str) -> tuple[DglGraph, Record]:
    """The graph and the record of its facts. Edges with types lie as ``dgl.to_homogeneous`` leaves
    them, sorted by type."""
    if not isinstance(shape, RelationShape):
        plain = shapes.make(shape, device, seed, order)
        graph = dgl.build_graph(plain.edge_index, plain.num_nodes)
        return DglGraph(shape, graph, device, source=plain), suite_attention.shape_record(plain)
    typed = relation_graph.make(shape, device, seed, order)
    record = Record("shape", shape.name, device=device.type, values=relation_graph.facts(typed))
    edge_type, moved = typed.edge_type.sort(stable=True)
    counts = torch.tensor(shape.nodes, device=device)
    node_type = torch.repeat_interleave(torch.arange(len(counts), device=device), counts)
    graph = dgl.build_graph(typed.edge_index[:, moved], shape.num_nodes)
    return DglGraph(shape, graph, device, node_type, edge_type, typed), record


def dgl_step(layer: dgl.DglLayer, graph: DglGraph, mode: str, seed: int = 1) -> RelationStep:
    """The step of one layer on one graph; equal arguments give equal weights and inputs."""
    shape, device = graph.shape, graph.device
    node_types, relations = ((len(shape.nodes), shape.num_relations)
                             if isinstance(shape, RelationShape) else (1, 1))
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(shape.num_nodes, dgl.IN_CHANNELS, device=device, generator=generator)
    module = dgl.build_layer(layer, node_types, relations, device)
    arguments, keywords = dgl.arguments(layer, graph.graph, x, graph.node_type, graph.edge_type)
    return RelationStep(module, {"x": x}, arguments, mode, keywords)


def records(layer: dgl.DglLayer, graph: DglGraph, mode: str, effort: timing.Effort,
            impls: tuple[str, ...]) -> list[Record]:
    """The cell's records. On a GPU DGL runs through gnnaccel alone, which is what lets it be there,
    with PyG's layer beside it."""
    place = layer_cells.place_of(layer, graph, mode)

    def step() -> RelationStep:
        return dgl_step(layer, graph, mode)

    if graph.device.type == "cpu" and len(impls) > 1:
        return layer_cells.checked_turns(KIND, place, step, effort)
    ours = layer_cells.step_record(KIND, {**place, "impl": "gnnaccel"}, accel.CONTEXTS["gnnaccel"],
                                   step, effort)[0]
    return [ours, *(dgl_twins.record(KIND, place, graph.source, effort) if "native" in impls
                    else [])]
