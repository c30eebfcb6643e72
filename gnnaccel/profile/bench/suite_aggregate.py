"""``--suite aggregate``: PyG's plain layers natively, compiled and through gnnaccel; sums against
cuSPARSE; single operations."""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import torch

from gnnaccel.adapters.pyg.bench import plain as pyg
from gnnaccel.adapters.pyg.bench.plain import LAYERS
from gnnaccel.profile.bench import (accel, aggregate_kernels, batches, cells, compiled, floor, plan,
                                    shapes, steps, timing)
from gnnaccel.profile.bench.guard import Budget
from gnnaccel.profile.bench.plan import Job, Plan
from gnnaccel.profile.bench.result import Record

KIND, FRESH = "aggregate", "fresh-plain"
PARTS = ("floor", "layers", "spmm", "operations", "fresh", "cpu", "compiled")
BATCHES = (shapes.Shape("fresh-10k", 3_000, 10_000, 60), batches.BATCH)
_SPARE = 0.9  # of the free memory

# In the order of importance, as time may run out: large graphs come again for the layers that
# matter less.
GPU = (
    ("proteins", ("GCN 64", "SAGE 64")),
    ("reddit", ("SAGE 64", "GCN 64")),
    ("products", ("GCN 128",)),
    ("hub", ("GCN 64", "SAGE 64")),
    ("arxiv", ("GCN 64", "SAGE 64", "GIN 64", "SAGE max 64", "PNA 64", "GCN 128", "SAGE 128")),
    ("cora", ("GCN 64", "SAGE 64", "GIN 64", "SAGE max 64", "PNA 64")),
    ("uniform", ("GCN 64",)),
    ("proteins", ("GIN 64", "SAGE max 64", "PNA 64", "GCN 128", "SAGE 128")),
    ("reddit", ("SAGE max 64", "SAGE 128")),
    ("products", ("SAGE 64", "SAGE max 64")),
)
CPU = (("cora", tuple(LAYERS)), ("arxiv", ("GCN 64", "SAGE 64", "GIN 64", "SAGE max 64")))
QUICK = (("tiny", tuple(LAYERS)),)
OPERATIONS = "proteins"  # the shape on which single operations are timed


@dataclasses.dataclass(frozen=True)
class AggregatePlan(Plan):
    """``operations``: the graph of that part; ``cpu_jobs``: those of the part "cpu"."""

    operations: shapes.Shape = shapes.SHAPES[OPERATIONS]
    cpu_jobs: tuple[Job, ...] = ()


def from_options(options) -> AggregatePlan:
    """A plan from parsed options. Raises ValueError on names that do not exist and devices that are
    not there."""
    device = plan.device(options)
    own, operations = ((QUICK, "tiny") if options.quick else (GPU, OPERATIONS)
                       if device.type == "cuda" else (CPU, "cora"))
    jobs = plan.jobs(options, own, LAYERS, shapes.resolve)
    # on a CPU "layers" is "cpu" already
    left_out = {"cpu"} if options.quick or device.type == "cpu" else set()
    if device.type == "cpu" and not options.quick:
        left_out |= {"spmm", "operations"}  # kernels are what they are about
    measured = [layer for _, layers in jobs for layer in layers]
    cpu_jobs = [(shapes.SHAPES[shape], tuple(LAYERS[name] for name in names
                                             if LAYERS[name] in measured)) for shape, names in CPU]
    cpu_jobs = [job for job in cpu_jobs if job[1]]
    return AggregatePlan(jobs, plan.possible(options, plan.parts(options, PARTS, left_out)),
                         shapes.resolve((plan.flat(options.shapes) or [operations])[0]),
                         tuple(cpu_jobs), **plan.measuring(options, patient=True))


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
        yield from cells.on_graph(plan, plan.operations, shapes.make,
                                  lambda graph: aggregate_kernels.operation_records(
                                      graph, plan.effort, cells.copy_bandwidth(plan)))
    if "fresh" in plan.parts and not budget.spent:
        for shape in BATCHES:
            yield from batches.fresh_records(FRESH, shape, {
                f"2-layer {name}": functools.partial(pyg.build_two_layers, f"{name}Conv",
                                                     channels=64)
                for name in ("GCN", "SAGE")}, plan)
    if "cpu" in plan.parts:
        for job in plan.cpu_jobs:
            yield from job_records(plan, job, torch.device("cpu"), ("layers",), budget, set())
    if "compiled" in plan.parts:
        yield from compiled.by_waves(plan, budget, KIND)


def job_records(plan: AggregatePlan, job: Job, device: torch.device, parts: tuple[str, ...],
                budget: Budget, done: set[str]) -> Iterator[Record]:
    """All that is measured on one graph. ``done``: names of graphs of which the part that is not
    about layers was measured."""
    shape, layers = job
    effort = plan.effort_on(device)

    def records(graph: shapes.Graph) -> Iterator[Record]:
        if "floor" in parts:
            yield from floor.floor_records(graph, {layer.width for layer in layers}, plan.effort)
        if "layers" in parts:
            yield from cells.in_modes(layers, budget, lambda layer, mode: cells.records_of(
                KIND, cells.place_of(layer, graph, mode), plan.impls,
                lambda: layer_step(layer, graph, mode), effort,
                lambda impl: (accel.CONTEXTS[impl], too_large(layer, graph, mode)
                              if impl == "native" else None), width=layer.width))
        accel.clear_cache()
        timing.release(device)
        if "spmm" in parts and shape.name not in done and not budget.spent:
            done.add(shape.name)
            yield from aggregate_kernels.spmm_records(graph, plan.effort)

    return cells.on_graph(plan, shape, shapes.make, records, device)


def layer_step(layer: pyg.PlainLayer, graph: shapes.Graph, mode: str) -> steps.Step:
    """The step of one layer; equal arguments give equal weights and inputs."""
    module = pyg.build_layer(layer, graph.edge_index, graph.num_nodes)
    return steps.Step(module, graph, mode, layer.width, in_channels=layer.width)


def too_large(layer: pyg.PlainLayer, graph: shapes.Graph, mode: str) -> str | None:
    """Why PyG's own layer is not tried: its messages would not fit."""
    if graph.device.type != "cuda":
        return None
    needed = layer.copies[mode == "training"] * graph.num_edges * layer.width * 4
    free = torch.cuda.mem_get_info(graph.device)[0]
    return f"skipped: {needed >> 30} GiB of messages" if needed > _SPARE * free else None
