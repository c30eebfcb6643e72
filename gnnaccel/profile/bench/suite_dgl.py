"""``--suite dgl``: DGL's layers through gnnaccel, on a GPU by way of the bridge; on a CPU in turns
with DGL's own."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gnnaccel.profile.bench import accel, dgl_cells
from gnnaccel.profile.bench import plan as plans
from gnnaccel.profile.bench import timing
from gnnaccel.profile.bench.dgl_plan import DglPlan, Job
from gnnaccel.profile.bench.guard import Budget, guarded
from gnnaccel.profile.bench.result import Record
from gnnaccel.profile.bench.steps import MODES


def dgl(plan: DglPlan, budget: Budget) -> Iterator[Record]:
    """The records, what matters most first. The caller stores each as it comes and stops asking
    when time is up."""
    for job in plan.jobs:
        if budget.spent:
            return
        # A graph on the GPU is one only while gnnaccel is enabled.
        with accel.accelerated() if plan.device.type == "cuda" else contextlib.nullcontext():
            yield from job_records(plan, job, budget)
        timing.release(plan.device)


def job_records(plan: DglPlan, job: Job, budget: Budget) -> Iterator[Record]:
    """All that is measured on one graph."""
    shape, layers = job
    made, error = guarded(lambda: dgl_cells.make(shape, plan.device, plan.seed, plan.order),
                          plan.device)
    if made is None:
        yield Record("note", shape.name, "graph", error=error)
        return
    graph, facts = made
    yield facts
    effort = plans.calm(plan.effort) if plan.device.type == "cpu" else plan.effort
    for layer in layers:
        for mode in MODES:
            if budget.spent:
                return
            yield from dgl_cells.records(layer, graph, mode, effort, plan.impls)
    accel.clear_cache()
