"""Fresh sampled batches, whose structure nobody has seen."""
from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gnnaccel.profile.bench import cells, shapes, steps
from gnnaccel.profile.bench.plan import Measuring
from gnnaccel.profile.bench.result import Record

CLASSES = 16
BATCH = shapes.Shape("fresh-100k", 20_000, 100_000, 400)


class FreshStep(steps.Step):
    """A training step on another batch each time, of another size and in a new tensor, as from a
    neighbour loader.

    As there, the input features need no gradient.
    """

    def __init__(self, batches: list[shapes.Graph], module: torch.nn.Module) -> None:
        largest = max(batches, key=lambda batch: batch.num_nodes)
        super().__init__(module, largest, "training", CLASSES)
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


def fresh_records(kind: str, shape: shapes.Shape, models: Mapping[str, Callable[..., Any]],
                  plan: Measuring) -> list[Record]:
    """Training on batches whose edges are grouped by destination. ``models``: by their names, what
    makes each for a device."""
    made = shapes.scaled(shape, 0.01) if plan.quick else shape
    graphs = [shapes.make(dataclasses.replace(made, num_nodes=made.num_nodes + 16 * seed),
                          plan.device, seed, "dst")
              for seed in range(8)]
    return [record for name, build in models.items() for record in cells.alternating_records(
        kind, dict(shape=shape.name, layer=name, mode="training", device=plan.device.type),
        lambda: FreshStep(graphs, build(plan.device, classes=CLASSES)), plan.effort)]
