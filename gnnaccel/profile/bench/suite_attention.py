"""``--suite attention``: PyG's attention layers natively, compiled and through gnnaccel, and what
else has a target."""
from __future__ import annotations

from collections.abc import Iterator

from gnnaccel.profile.bench import (accel, batches, compiled, floor, layer_cells, overhead, shapes,
                                    structure, suite_kernel, timing)
from gnnaccel.profile.bench.guard import Budget, guarded
from gnnaccel.profile.bench.plan import Plan
from gnnaccel.profile.bench.result import Record
from gnnaccel.profile.bench.steps import MODES


def attention(plan: Plan, budget: Budget) -> Iterator[Record]:
    """The records, what matters most first. The caller stores each as it comes and stops asking
    when time is up."""
    if {"floor", "layers", "structure"} & set(plan.parts):
        for shape in plan.shapes:
            yield from shape_records(plan, shape, budget)
    yield from small_records(plan)
    if "cpu" in plan.parts:
        yield from cpu_records(plan)
    if "compiled" in plan.parts:
        # Last, as it takes longest, and in processes of their own: nothing here needs the memory
        # any more.
        yield from compiled_records(plan, budget)


def attention_kernel(plan: Plan, budget: Budget) -> Iterator[Record]:
    """The raw kernels on every shape, with backward in the thread in which gnnaccel lets it run."""
    for shape in plan.shapes:
        graph = shapes.make(shape, plan.device, plan.seed, plan.order)
        yield shape_record(graph)
        with accel.accelerated():
            yield from suite_kernel.graph_records(graph, plan.effort)
        del graph
        timing.release(plan.device)


def shape_records(plan: Plan, shape: shapes.Shape, budget: Budget) -> Iterator[Record]:
    """All layers on one shape, its floors and its structure building."""
    graph, error = guarded(lambda: shapes.make(shape, plan.device, plan.seed, plan.order),
                           plan.device)
    if graph is None:
        yield Record("note", shape.name, "graph", error=error)
        return
    yield shape_record(graph)
    if "floor" in plan.parts:
        yield from floor.floor_records(graph, sorted({spec.out_channels for spec in plan.layers}),
                                       plan.effort)
    for spec in plan.layers if "layers" in plan.parts else ():
        for mode in MODES:
            if budget.spent:
                return
            yield from layer_cells.layer_records(spec, graph, mode, plan.effort, plan.impls)
    accel.clear_cache()
    if "structure" in plan.parts:
        yield from structure.structure_records(graph, plan.effort)
    del graph
    timing.release(plan.device)


def small_records(plan: Plan) -> Iterator[Record]:
    """Overhead of a memoised call, and fresh batches."""
    if "overhead" in plan.parts:
        values, error = guarded(lambda: overhead.measure_overhead(plan.device, plan.quick),
                                plan.device)
        yield Record("overhead", "cora", "GAT 8x8", "forward", "gnnaccel", plan.device.type,
                     values=values or {}, error=error)
    if "fresh" in plan.parts:
        shape = shapes.scaled(batches.BATCH, 0.01) if plan.quick else batches.BATCH
        yield from batches.fresh_records(plan.device, plan.effort, shape)


def compiled_records(plan: Plan, budget: Budget) -> Iterator[Record]:
    """The compiled cells. Shapes with targets against them come first: the small ones."""
    return compiled.by_waves(plan, [(shape, spec.name) for shape in plan.shapes
                                    for spec in plan.layers], budget)


def cpu_records(plan: Plan) -> Iterator[Record]:
    """Layers on the CPU on batches too small to be worth a GPU."""
    for shape in batches.CPU_SHAPES:
        for spec in plan.layers:
            for mode in MODES:
                yield from batches.cpu_records(shape, spec, mode, plan.effort)


def shape_record(graph: shapes.Graph) -> Record:
    """What a reader must know of a graph to judge a time."""
    return Record("shape", graph.shape.name, device=graph.device.type, values={
        "num_nodes": graph.num_nodes, "num_edges": graph.num_edges,
        "max_in_degree": shapes.max_in_degree(graph)})
