"""``--suite relational``: PyG's relational layers natively and through gnnaccel, and gnnaccel's
passes on and off."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch

from gnnaccel.adapters.pyg.bench import once
from gnnaccel.adapters.pyg.bench import relational as pyg
from gnnaccel.profile.bench import (cells, once_cells, plan, relation_cells, relation_graph)
from gnnaccel.profile.bench.guard import Budget
from gnnaccel.profile.bench.plan import Job, Plan
from gnnaccel.profile.bench.relation_graph import RelationShape
from gnnaccel.profile.bench.result import Record

CPU = torch.device("cpu")
ONCE = "once"
PARTS = ("layers", "memory", "compaction", "cpu", ONCE)


@dataclasses.dataclass(frozen=True)
class RelationPlan(Plan):
    """``cpu_jobs``: those of the part "cpu". The part "once" measures all ``once_layers`` in all
    ``once_sizes``."""

    cpu_jobs: tuple[Job, ...] = ()
    once_layers: tuple[once.OnceLayer, ...] = ()
    once_sizes: tuple[once_cells.OnceSize, ...] = ()


def from_options(options) -> RelationPlan:
    """A plan from parsed options. Raises ValueError on names that do not exist and devices that are
    not there."""
    device = plan.device(options)
    # on a CPU "layers" is "cpu" already
    left_out = {"cpu", ONCE} if options.quick or device.type == "cpu" else {ONCE}
    parts = tuple(part for part in plan.parts(options, PARTS, left_out)
                  if part != "memory" or device.type == "cuda")
    return RelationPlan(*_all_jobs(options, device, parts), *_once(options, device, parts),
                        **plan.measuring(options, patient=True))


def _all_jobs(options, device: torch.device, parts: tuple[str, ...]) -> tuple:
    """``jobs``, ``parts`` and ``cpu_jobs``; no jobs where only graphs that come once are
    measured."""
    if set(parts) == {ONCE}:
        return (), parts, ()
    names = plan.flat(options.shapes) or default_shapes(
        options, relation_graph.CPU if device.type == "cpu" else relation_graph.DEFAULT,
        every=True)
    return (_jobs(options, names), parts,
            _jobs(options, default_shapes(options, relation_graph.CPU, every=False)))


def _once(options, device: torch.device, parts: tuple[str, ...]) -> tuple:
    """``once_layers`` and ``once_sizes``. Raises ValueError where names are given that mean nothing
    to this part."""
    if ONCE not in parts:
        return (), ()
    if options.shapes or options.layers and set(parts) != {ONCE}:
        raise ValueError("part once has sizes and layers of its own: without --shapes, and "
                         "--layers only with --parts once")
    names = plan.flat(options.layers) or (once_cells.QUICK_LAYERS if options.quick
                                          else once.LAYERS)
    layers = tuple(plan.named(name, once.LAYERS) for name in names)
    return layers, (once_cells.QUICK,) if options.quick else once_cells.SIZES[device.type]


def default_shapes(options, synthetic: tuple[str, ...], every: bool) -> list[str]:
    """Shapes to measure when none are named: real ones where ``--data`` has them, ``every`` one or
    the imitated only."""
    if options.quick:
        return ["tiny-typed"]
    there = [name for name in relation_graph.FILES if options.data
             and Path(options.data, f"{name}.npz").is_file()]
    real = {name: shape for shape in synthetic if (name := relation_graph.NEEDLESS.get(shape))
            in there}
    files = [name for name in there if every or name in real]
    return files + [shape for shape in synthetic if shape not in real.values()]


def _jobs(options, names: list[str]) -> tuple[Job, ...]:
    asked = plan.flat(options.layers)
    return tuple((shape, tuple(pyg.resolve(layer) for layer in asked or shape.layers))
                 for shape in [_shape(name, options.data) for name in names])


def _shape(name: str, data: str | None) -> RelationShape:
    if name in relation_graph.SHAPES:
        return relation_graph.SHAPES[name]
    if data:
        return relation_graph.in_file(data, name)
    raise ValueError(f"no shape {name!r}; known: {', '.join(relation_graph.SHAPES)}, and with "
                     "--data the files there")


def relational(plan: RelationPlan, budget: Budget) -> Iterator[Record]:
    """The records, what matters most first. The caller stores each as it comes and stops asking
    when time is up."""
    if {"layers", "memory", "compaction"} & set(plan.parts):
        for job in plan.jobs:
            yield from job_records(plan, job, plan.device, plan.parts, budget)
    if "cpu" in plan.parts:
        for job in plan.cpu_jobs:
            yield from job_records(plan, job, CPU, ("layers",), budget)
    if ONCE in plan.parts:
        yield from once_cells.records(plan.once_layers, plan.once_sizes, plan.device,
                                      plan.effort_on(plan.device), plan.seed, budget)


def job_records(plan: RelationPlan, job: Job, device: torch.device, parts: tuple[str, ...],
                budget: Budget) -> Iterator[Record]:
    """All that is measured on one graph."""
    shape, layers = job
    effort = plan.effort_on(device)

    def records(graph: relation_graph.RelationGraph) -> Iterator[Record]:
        for part in parts:
            if part == "layers":
                yield from cells.in_modes(
                    layers, budget, lambda layer, mode: relation_cells.layer_records(
                        layer, graph, mode, effort, plan.impls))
            elif part == "memory":
                yield from cells.in_modes(
                    layers, budget, lambda layer, mode: relation_cells.memory_records(
                        layer, graph, plan.impls) if mode == "training" else [])
            elif part == "compaction":
                yield from cells.in_modes(
                    layers, budget, lambda layer, mode: relation_cells.passes_records(
                        layer, graph, mode, plan.effort))

    return iter(()) if budget.spent else cells.on_graph(plan, shape, relation_graph.make, records,
                                                        device)
