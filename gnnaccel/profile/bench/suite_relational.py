"""``--suite relational``: PyG's relational layers natively and through gnnaccel, and gnnaccel's
passes on and off."""
from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from gnnaccel.profile.bench import accel, once_cells, passes_cells
from gnnaccel.profile.bench import plan as plans
from gnnaccel.profile.bench import relation_cells, relation_graph, timing
from gnnaccel.profile.bench.guard import Budget, guarded
from gnnaccel.profile.bench.relation_graph import RelationGraph
from gnnaccel.profile.bench.relation_plan import Job, RelationPlan
from gnnaccel.profile.bench.result import Record
from gnnaccel.profile.bench.steps import MODES

CPU = torch.device("cpu")


def relational(plan: RelationPlan, budget: Budget) -> Iterator[Record]:
    """The records, what matters most first. The caller stores each as it comes and stops asking
    when time is up."""
    if {"layers", "memory", "compaction"} & set(plan.parts):
        for job in plan.jobs:
            yield from job_records(plan, job, plan.device, plan.parts, budget)
    if "cpu" in plan.parts:
        for job in plan.cpu_jobs:
            yield from job_records(plan, job, CPU, ("layers",), budget)
    if "once" in plan.parts:
        yield from once_cells.records(plan.once_layers, plan.once_sizes, plan.device, plan.effort,
                                      plan.seed, budget)


def job_records(plan: RelationPlan, job: Job, device: torch.device, parts: tuple[str, ...],
                budget: Budget) -> Iterator[Record]:
    """All that is measured on one graph."""
    shape, layers = job
    if budget.spent:
        return
    graph, error = guarded(lambda: relation_graph.make(shape, device, plan.seed, plan.order),
                           device)
    facts = None
    if graph is not None:
        facts, error = guarded(functools.partial(relation_graph.facts, graph), device)
    if graph is None or facts is None:
        yield Record("note", shape.name, "graph", error=error)
        return
    yield Record("shape", shape.name, device=device.type, values=facts)
    for part in parts:
        if part == "compaction" and not accel.has_option(passes_cells.OPTION):
            yield Record("note", shape.name, part,
                         error=f"gnnaccel.enable has no option {passes_cells.OPTION!r}")
            continue
        for layer in layers:
            for mode in MODES:
                if budget.spent:
                    return
                yield from _cell(plan, part, layer, graph, mode)
    accel.clear_cache()
    del graph
    timing.release(device)


def _cell(plan: RelationPlan, part: str, layer, graph: RelationGraph, mode: str) -> list[Record]:
    if part == "layers":
        if graph.device == CPU and len(plan.impls) > 1:
            return relation_cells.alternating_records(layer, graph, mode, plans.calm(plan.effort))
        return relation_cells.layer_records(layer, graph, mode, plan.effort, plan.impls)
    if part == "memory":
        return relation_cells.memory_records(layer, graph, plan.impls) if mode == "training" else []
    return (passes_cells.passes_records(layer, graph, mode, plan.effort) if part == "compaction"
            else [])
