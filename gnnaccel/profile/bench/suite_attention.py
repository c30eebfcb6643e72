"""``--suite attention``: PyG's attention layers natively, compiled and through gnnaccel, and what
else has a target. ``--suite attention-kernel``: raw attention by graph and head layout, Python and
allocation included."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from gnnaccel.adapters.pyg.bench import layers as pyg
from gnnaccel.profile.bench import (accel, batches, cells, compiled, floor, kernel_cells, overhead,
                                    plan, shapes, steps, timing)
from gnnaccel.profile.bench.guard import Budget, guarded
from gnnaccel.profile.bench.plan import Plan
from gnnaccel.profile.bench.result import Record
from gnnaccel.profile.bench.shapes import Graph

PARTS = ("floor", "layers", "structure", "overhead", "fresh", "cpu", "compiled")
SIZES = ((1, 64), (8, 8), (1, 128))  # heads and width of raw attention
CPU_SHAPES = (shapes.Shape("batch-10k", 3_000, 10_000, 60), shapes.SHAPES["cora"])


def from_options(options) -> Plan:
    """A plan from parsed options. Raises ValueError on names that do not exist and devices that are
    not there."""
    default = ("tiny",) if options.quick else shapes.DEFAULT
    parts = plan.parts(options, PARTS, ("cpu",) if options.quick else ())
    return Plan(plan.jobs(options, tuple((name, tuple(pyg.LAYERS)) for name in default),
                          pyg.LAYERS, shapes.resolve), plan.possible(options, parts),
                **plan.measuring(options))


def attention(plan: Plan, budget: Budget) -> Iterator[Record]:
    """The records, what matters most first. The caller stores each as it comes and stops asking
    when time is up."""
    if {"floor", "layers", "structure"} & set(plan.parts):
        for shape, layers in plan.jobs:
            yield from cells.on_graph(plan, shape, shapes.make,
                                      lambda graph: _on_graph(plan, graph, layers, budget))
    yield from small_records(plan)
    if "cpu" in plan.parts:
        for shape in CPU_SHAPES:
            yield from cells.in_modes(plan.jobs[0][1], budget,
                                      lambda layer, mode: cpu_records(shape, layer, mode,
                                                                      plan.effort))
    if "compiled" in plan.parts:
        # Last, as it takes longest, and in processes of their own: nothing here needs the memory
        # any more. Shapes with targets against them come first: the small ones.
        yield from compiled.by_waves(plan, budget)


def _on_graph(plan: Plan, graph: Graph, layers: tuple, budget: Budget) -> Iterator[Record]:
    """All layers on one graph, its floors and its structure building."""
    if "floor" in plan.parts:
        yield from floor.floor_records(graph, {spec.out_channels for spec in layers}, plan.effort)
    if "layers" in plan.parts:
        yield from cells.in_modes(layers, budget, lambda spec, mode: cells.records_of(
            "layer", cells.place_of(spec, graph, mode), plan.impls,
            lambda: steps.layer_step(spec, graph, mode), plan.effort, turns=False,
            width=spec.out_channels))
    accel.clear_cache()
    if "structure" in plan.parts:
        yield from structure_records(graph, plan.effort)


def small_records(plan: Plan) -> Iterator[Record]:
    """Overhead of a memoised call, and fresh batches."""
    if "overhead" in plan.parts:
        values, error = guarded(lambda: overhead.measure_overhead(plan.device, plan.quick),
                                plan.device)
        yield Record("overhead", "cora", "GAT 8x8", "forward", "gnnaccel", plan.device.type,
                     values=values or {}, error=error)
    if "fresh" in plan.parts:
        yield from batches.fresh_records("fresh", batches.BATCH, {
            "2-layer GAT": pyg.build_two_layer_gat}, plan)


def cpu_records(shape: shapes.Shape, spec: pyg.LayerSpec, mode: str,
                effort: timing.Effort) -> list[Record]:
    """A layer on the CPU, on a batch too small to be worth a GPU: native and gnnaccel in turns."""
    graph = shapes.make(shape, "cpu")
    # the ratio wanted is near one
    effort = dataclasses.replace(plan.calm(effort), seconds=0.8)
    return cells.alternating_records("layer", cells.place_of(spec, graph, mode),
                                     lambda: steps.layer_step(spec, graph, mode), effort)


def structure_records(graph: Graph, effort: timing.Effort) -> list[Record]:
    """Time to build the structures kernels walk, and ``peak_mib``, in MiB: layers "csc", that alone
    (forward), and "csc+csr" (backward)."""
    records = []
    for name, csr in (("csc", False), ("csc+csr", True)):
        def build(csr=csr):
            pyg.build_structure(graph.edge_index, graph.num_nodes, csr)

        place = Record("structure", graph.shape.name, name, impl="gnnaccel",
                       device=graph.device.type)
        records.append(cells.call_record(place, build, None, graph.device, effort,
                                         lambda: cells.peak_mib(build, graph.device)))
        timing.release(graph.device)
    return records


def attention_kernel(plan: Plan, budget: Budget) -> Iterator[Record]:
    """The raw kernels on every shape, with backward in the thread in which gnnaccel lets it run."""
    for shape, _ in plan.jobs:
        with accel.accelerated():
            yield from cells.on_graph(plan, shape, shapes.make,
                                      lambda graph: kernel_records(graph, plan.effort))


def kernel_records(graph: Graph, effort: timing.Effort) -> Iterator[Record]:
    """All kernel cells of one graph, and the floor for their widths."""
    device = graph.device
    if device.type == "cuda":
        yield from floor.floor_records(graph, {heads * width for heads, width in SIZES}, effort)

    def peak(pair: cells.Pair, mode: str) -> dict[str, float]:
        return cells.peak_mib(pair[steps.MODES.index(mode)], device)

    for scores, make in kernel_cells.SCORES.items():
        for heads, width in SIZES:
            place: dict[str, Any] = dict(shape=graph.shape.name, layer=f"{scores} {heads}x{width}",
                                         impl="gnnaccel")
            yield from cells.pair_records("kernel", place, lambda: make(graph, heads, width),
                                          device, effort, lambda mode: {"width": heads * width},
                                          peak)

