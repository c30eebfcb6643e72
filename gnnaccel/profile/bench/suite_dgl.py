"""``--suite dgl``: DGL's layers through gnnaccel, on a GPU by way of the bridge, with PyG's layers
beside them; on a CPU in turns with DGL's own.

PyG's layers of the same kind and size, run natively on the same edges, are no copies: PyG adds self
loops to GAT's graph, and TransformerConv, the twin of DotGatConv, has maps of its own for keys and
values and a skip connection.
"""
from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gnnaccel.adapters.dgl import bench as dgl_layers
from gnnaccel.adapters.pyg.bench import layers as pyg
from gnnaccel.adapters.pyg.bench import relational
from gnnaccel.profile.bench import (accel, cells, plan, relation_graph, shapes, steps,
                                    suite_relational, timing)
from gnnaccel.profile.bench.guard import Budget
from gnnaccel.profile.bench.metrics import TWIN
from gnnaccel.profile.bench.plan import Job, Plan
from gnnaccel.profile.bench.relation_graph import RelationShape
from gnnaccel.profile.bench.steps import RelationStep, relation_step
from gnnaccel.profile.bench.result import Record

AnyShape = shapes.Shape | RelationShape
KIND = "dgl"

# In the order of importance, as time may run out: large graphs come again for the layers that
# matter less.
GPU = (
    ("proteins", ("GAT 8x8",)),
    ("reddit", ("GAT 8x8",)),
    ("arxiv", ("GAT 8x8",)),
    ("mag-inverse-size", ("HGT 4x16",)),
    ("fb15k-size", ("RelGraphConv 64",)),
    ("proteins", ("GATv2 4x16", "DotGat 1x64", "GraphConv 64", "SAGE 64")),
    ("cora", ("GAT 8x8", "GATv2 4x16", "GraphConv 64", "SAGE 64")),
    ("arxiv", ("GATv2 4x16", "DotGat 1x64", "GraphConv 64", "SAGE 64")),
    ("reddit", ("SAGE 64", "GATv2 4x16", "DotGat 1x64", "GraphConv 64")),
)
CPU = (
    ("cora", ("GAT 8x8", "GATv2 4x16", "DotGat 1x64", "GraphConv 64", "SAGE 64")),
    ("aifb-size", ("RelGraphConv 64",)),
    ("dblp-size", ("HGT 4x16",)),
    ("arxiv", ("GAT 8x8", "GATv2 4x16", "DotGat 1x64")),
    ("fb15k-size", ("RelGraphConv 64",)),
)
QUICK = (
    ("tiny", ("GAT 8x8", "GATv2 4x16", "DotGat 1x64", "GraphConv 64", "SAGE 64")),
    ("tiny-typed", ("RelGraphConv 64", "HGT 4x16")),
)
_TWINS = {"GAT 8x8": "GAT 8x8", "GATv2 4x16": "GATv2 4x16", "DotGat 1x64": "Transformer 1x64",
          "RelGraphConv 64": "RGCN 64", "HGT 4x16": "HGT 4x16"}


def from_options(options) -> Plan:
    """ValueError without DGL, too."""
    plan.parts(options, ())  # the suite has none: naming one is an error
    found = jobs(options, plan.device(options))
    why = dgl_layers.problem()
    if why is not None:
        raise ValueError(f"--suite dgl needs DGL: {why}")
    return Plan(found, **plan.measuring(options, patient=True))


def jobs(options, device: torch.device) -> tuple[Job, ...]:
    """The shapes asked for with all layers of their kind, else the suite's own shapes with their
    own layers; of the layers only those asked for."""
    own = QUICK if options.quick else GPU if device.type == "cuda" else CPU
    found = plan.jobs(options, own, dgl_layers.LAYERS, _shape,
                      lambda shape, layer: layer.typed == isinstance(shape, RelationShape))
    if not found:
        raise ValueError("none of the layers goes with any of the shapes")
    return found


def _shape(name: str) -> AnyShape:
    if name in relation_graph.SHAPES:
        return relation_graph.SHAPES[name]
    if name in shapes.SHAPES or name.endswith(".npz"):
        return shapes.resolve(name)
    raise ValueError(f"no shape {name!r}; known: "
                     f"{', '.join([*shapes.SHAPES, *relation_graph.SHAPES])}, or a path to an "
                     ".npz")


def dgl(plan: Plan, budget: Budget) -> Iterator[Record]:
    effort = plan.effort_on(plan.device)
    for shape, layers in plan.jobs:
        if budget.spent:
            return
        # A graph on the GPU is one only while gnnaccel is enabled.
        with accel.accelerated() if plan.device.type == "cuda" else contextlib.nullcontext():
            yield from cells.on_graph(
                plan, shape, make, lambda graph: cells.in_modes(
                    layers, budget,
                    lambda layer, mode: records(layer, graph, mode, effort, plan.impls)))


@dataclasses.dataclass(frozen=True)
class DglGraph:
    """``graph`` is DGL's. ``node_type`` [N] and ``edge_type`` [E] by edge id ascend; both are None
    without edge types. ``source``: the benchmark's own graph that it was made of, for PyG's
    layers."""

    shape: AnyShape
    graph: Any
    device: torch.device
    source: shapes.Graph
    node_type: torch.Tensor | None = None
    edge_type: torch.Tensor | None = None

    def facts(self) -> dict[str, Any]:
        return self.source.facts()


def make(shape: AnyShape, device: torch.device, seed: int, order: str) -> DglGraph:
    """The graph. Edges with types lie as ``dgl.to_homogeneous`` leaves them, sorted by type."""
    if not isinstance(shape, RelationShape):
        plain = shapes.make(shape, device, seed, order)
        return DglGraph(shape, dgl_layers.build_graph(plain.edge_index, plain.num_nodes), device,
                        plain)
    typed = relation_graph.make(shape, device, seed, order)
    edge_type, moved = typed.edge_type.sort(stable=True)
    counts = torch.tensor(shape.nodes, device=device)
    node_type = torch.repeat_interleave(torch.arange(len(counts), device=device), counts)
    graph = dgl_layers.build_graph(typed.edge_index[:, moved], shape.num_nodes)
    return DglGraph(shape, graph, device, typed, node_type, edge_type)


def dgl_step(layer: dgl_layers.DglLayer, graph: DglGraph, mode: str) -> RelationStep:
    """The step of one layer on one graph; equal arguments give equal weights and inputs."""
    shape, device = graph.shape, graph.device
    node_types, relations = ((len(shape.nodes), shape.num_relations)
                             if isinstance(shape, RelationShape) else (1, 1))
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(shape.num_nodes, dgl_layers.IN_CHANNELS, device=device, generator=generator)
    module = dgl_layers.build_layer(layer, node_types, relations, device)
    arguments, keywords = dgl_layers.arguments(layer, graph.graph, x, graph.node_type,
                                               graph.edge_type)
    return RelationStep(module, {"x": x}, arguments, mode, keywords)


def records(layer: dgl_layers.DglLayer, graph: DglGraph, mode: str, effort: timing.Effort,
            impls: tuple[str, ...]) -> list[Record]:
    """The cell's records. On a GPU DGL runs through gnnaccel alone, which is what lets it be there,
    with PyG's layer beside it."""
    place = cells.place_of(layer, graph, mode)
    turns = graph.device.type == "cpu" and len(impls) > 1
    found = cells.records_of(KIND, place, impls if turns else ("gnnaccel",),
                             lambda: dgl_step(layer, graph, mode), effort)
    if turns or "native" not in impls or layer.name not in _TWINS:
        return found
    place["impl"] = TWIN
    make_twin, refused = _twin(_TWINS[layer.name], graph.source, mode)
    if refused:
        return [*found, Record(KIND, **place, error=refused)]
    # seconds a step, where it fits at all
    patient = dataclasses.replace(effort, patience_s=min(effort.patience_s, 2.0))
    return [*found, cells.step_record(KIND, place, accel.CONTEXTS["native"], make_twin, patient)[0]]


def _twin(name: str, source: shapes.Graph, mode: str) -> tuple[Callable[[], Any], str | None]:
    """What makes the step of PyG's layer, and why it is not run, if so."""
    if isinstance(source, relation_graph.RelationGraph):
        twin = relational.resolve(name)
        return (lambda: relation_step(twin, source, mode),
                suite_relational.refusal(twin, source, mode))
    spec = pyg.resolve(name)
    return lambda: steps.layer_step(spec, source, mode), None
