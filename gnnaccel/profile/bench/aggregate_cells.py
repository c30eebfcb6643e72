"""Plain layers: one on one graph in one mode, natively and through gnnaccel; and fresh batches."""
from __future__ import annotations

import dataclasses
from typing import Any

import torch

from gnnaccel.adapters.pyg.bench import plain as pyg
from gnnaccel.profile.bench import accel, batches, layer_cells, shapes, steps, timing
from gnnaccel.profile.bench.result import Record

KIND, FRESH = "aggregate", "fresh-plain"
BATCHES = (shapes.Shape("fresh-10k", 3_000, 10_000, 60),
           shapes.Shape("fresh-100k", 20_000, 100_000, 400))
_CLASSES = 16
_SPARE = 0.9  # of the free memory


def layer_step(layer: pyg.PlainLayer, graph: shapes.Graph, mode: str) -> steps.Step:
    """The step of one layer; equal arguments give equal weights and inputs."""
    module = pyg.build_layer(layer, graph.edge_index, graph.num_nodes)
    return steps.Step(module, graph, mode, layer.width, in_channels=layer.width)


def records(layer: pyg.PlainLayer, graph: shapes.Graph, mode: str, effort: timing.Effort,
            impls: tuple[str, ...]) -> list[Record]:
    """The cell's records, and the comparison where both ran. On a CPU the two take turns."""
    place = layer_cells.place_of(layer, graph, mode)

    def step() -> steps.Step:
        return layer_step(layer, graph, mode)

    if graph.device.type == "cpu" and len(impls) > 1:
        return layer_cells.checked_turns(KIND, place, step, effort)
    return layer_cells.records_of(KIND, place, impls, lambda impl: (
        accel.CONTEXTS[impl], too_large(layer, graph, mode) if impl == "native" else None),
        step, effort, width=layer.width)


def too_large(layer: pyg.PlainLayer, graph: shapes.Graph, mode: str) -> str | None:
    """Why PyG's own layer is not tried: its messages would not fit."""
    if graph.device.type != "cuda":
        return None
    needed = layer.copies[mode == "training"] * graph.num_edges * layer.width * 4
    free = torch.cuda.mem_get_info(graph.device)[0]
    return f"skipped: {needed >> 30} GiB of messages" if needed > _SPARE * free else None


class FreshStep(batches.FreshStep):
    """A training step of two plain layers on another batch each time."""

    def __init__(self, class_name: str, graphs: list[shapes.Graph]) -> None:
        module = pyg.build_two_layers(class_name, graphs[0].device, channels=64, classes=_CLASSES)
        super().__init__(graphs, module)


def fresh_records(device: torch.device, effort: timing.Effort, factor: float = 1.0) -> list[Record]:
    """Two-layer GCN and SAGE, training on batches whose structure nobody has seen."""
    found = []
    for shape in BATCHES:
        small = shapes.scaled(shape, factor)
        graphs = [shapes.make(dataclasses.replace(small, num_nodes=small.num_nodes + 16 * seed),
                              device, seed, "dst")
                  for seed in range(8)]
        for class_name, name in (("GCNConv", "2-layer GCN"), ("SAGEConv", "2-layer SAGE")):
            place: dict[str, Any] = dict(shape=shape.name, layer=name, mode="training",
                                         device=device.type)
            found += layer_cells.alternating_records(FRESH, place, lambda c=class_name,
                                                     g=graphs: FreshStep(c, g), effort)
    return found
