"""``--suite aggregate``: PyG's plain layers natively, compiled and through gnnaccel; sums against
cuSPARSE; single operations."""
from __future__ import annotations

from collections.abc import Iterator

import torch

from gnnaccel.profile.bench import accel, aggregate_cells, aggregate_kernels, compiled, floor
from gnnaccel.profile.bench import plan as plans
from gnnaccel.profile.bench import shapes, suite_attention, suite_segment, timing
from gnnaccel.profile.bench.aggregate_plan import CPU, AggregatePlan, Job, resolved
from gnnaccel.profile.bench.guard import Budget, guarded
from gnnaccel.profile.bench.result import Record
from gnnaccel.profile.bench.steps import MODES


def aggregate(plan: AggregatePlan, budget: Budget) -> Iterator[Record]:
    """The records, what matters most first. The caller stores each as it comes and stops asking
    when time is up."""
    if {"floor", "layers", "spmm"} & set(plan.parts):
        done: set[str] = set()
        for job in plan.jobs:
            if budget.spent:
                return
            yield from job_records(plan, job, plan.device, plan.parts, budget, done)
    if "operations" in plan.parts and not budget.spent:
        yield from operation_records(plan)
    if "fresh" in plan.parts and not budget.spent:
        yield from aggregate_cells.fresh_records(plan.device, plan.effort,
                                                 0.01 if plan.quick else 1.0)
    if "cpu" in plan.parts:
        for job in resolved(CPU, [layer.name for _, layers in plan.jobs for layer in layers]):
            yield from job_records(plan, job, torch.device("cpu"), ("layers",), budget, set())
    if "compiled" in plan.parts:
        yield from compiled_records(plan, budget)


def job_records(plan: AggregatePlan, job: Job, device: torch.device, parts: tuple[str, ...],
                budget: Budget, done: set[str]) -> Iterator[Record]:
    """All that is measured on one graph. ``done``: names of graphs of which the part that is not
    about layers was measured."""
    shape, layers = job
    graph, error = guarded(lambda: shapes.make(shape, device, plan.seed, plan.order), device)
    if graph is None:
        yield Record("note", shape.name, "graph", error=error)
        return
    yield suite_attention.shape_record(graph)
    if "floor" in parts:
        yield from floor.floor_records(graph, sorted({layer.width for layer in layers}),
                                       plan.effort)
    effort = plans.calm(plan.effort) if device.type == "cpu" else plan.effort
    for layer in layers if "layers" in parts else ():
        for mode in MODES:
            if budget.spent:
                return
            yield from aggregate_cells.records(layer, graph, mode, effort, plan.impls)
    accel.clear_cache()
    timing.release(device)
    if "spmm" in parts and shape.name not in done and not budget.spent:
        done.add(shape.name)
        yield from aggregate_kernels.spmm_records(graph, plan.effort)
    accel.clear_cache()
    del graph
    timing.release(device)


def operation_records(plan: AggregatePlan) -> Iterator[Record]:
    """Single operations on the graph that the plan has for them."""
    graph = shapes.make(plan.operations, plan.device, plan.seed, plan.order)
    yield suite_attention.shape_record(graph)
    yield from aggregate_kernels.operation_records(graph, plan.effort,
                                                   suite_segment.copy_bandwidth(plan))
    accel.clear_cache()
    del graph
    timing.release(plan.device)


def compiled_records(plan: AggregatePlan, budget: Budget) -> Iterator[Record]:
    """The compiled cells, small graphs first."""
    jobs = [(shape, layer.name) for shape, layers in plan.jobs for layer in layers]
    return compiled.by_waves(plan, jobs, budget, kind=aggregate_cells.KIND)
