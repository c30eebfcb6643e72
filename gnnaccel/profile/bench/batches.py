"""Small graphs: fresh sampled batches, whose structure nobody has seen, and layers on the CPU."""
from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch

from gnnaccel.adapters.pyg.bench import layers as pyg
from gnnaccel.profile.bench import layer_cells, shapes, steps, timing
from gnnaccel.profile.bench.result import Record

CLASSES = 16
BATCH = shapes.Shape("fresh-100k", 20_000, 100_000, 400)
CPU_SHAPES = (shapes.Shape("batch-10k", 3_000, 10_000, 60), shapes.SHAPES["cora"])


class FreshStep(steps.Step):
    """A training step on another batch each time, of another size and in a new tensor, as from a
    neighbour loader.

    As there, the input features need no gradient.
    """

    def __init__(self, batches: list[shapes.Graph], module: torch.nn.Module | None = None) -> None:
        largest = max(batches, key=lambda batch: batch.num_nodes)
        super().__init__(module or pyg.build_two_layer_gat(largest.device, classes=CLASSES),
                         largest, "training", CLASSES)
        self.x.requires_grad_(False)
        self.batches = enumerate(itertools.cycle(batches))

    def __call__(self) -> torch.Tensor:
        number, batch = next(self.batches)
        # A tensor no cache can know and a size no memo has seen, at a price (a small copy) that
        # everybody pays. The edges are grouped by destination, and so are those that remain when
        # some are cut off at the end.
        edge_index = batch.edge_index[:, :batch.num_edges - number % 997].clone()
        self.clear()
        out = self.module(self.x[:batch.num_nodes], edge_index)
        out.backward(self.grad[:batch.num_nodes])
        return out.detach()


def fresh_records(device: torch.device, effort: timing.Effort,
                  shape: shapes.Shape = BATCH) -> list[Record]:
    """Two-layer GAT training on batches whose edges are grouped by destination."""
    graphs = [shapes.make(dataclasses.replace(shape, num_nodes=shape.num_nodes + 16 * seed),
                          device, seed, "dst")
              for seed in range(8)]
    place: dict[str, Any] = dict(shape=shape.name, layer="2-layer GAT", mode="training",
                                 device=device.type)
    return layer_cells.alternating_records("fresh", place, lambda: FreshStep(graphs), effort)


def cpu_records(shape: shapes.Shape, spec: pyg.LayerSpec, mode: str,
                effort: timing.Effort) -> list[Record]:
    """A layer on the CPU, native and gnnaccel in turns."""
    graph = shapes.make(shape, "cpu")
    place: dict[str, Any] = dict(shape=shape.name, layer=spec.name, mode=mode, device="cpu")
    # The ratio wanted is near one and CPUs are noisy: more and longer samples than a GPU needs.
    effort = dataclasses.replace(effort, batches=2 * effort.batches, batch_ms=2 * effort.batch_ms,
                                 seconds=0.8)
    return layer_cells.alternating_records("layer", place,
                                           lambda: steps.layer_step(spec, graph, mode), effort)
