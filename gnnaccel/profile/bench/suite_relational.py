"""``--suite relational``: PyG's relational layers natively and through gnnaccel, and gnnaccel's
passes, compaction and reordering, on and off.

PyG's own layers may need more memory than there is. A GPU says itself that memory is out, and the
next cell goes on. A CPU's process would be ended instead, so there they are not driven so far.
"""
from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.pyg.bench import once
from gnnaccel.adapters.pyg.bench import relational as pyg
from gnnaccel.adapters.pyg.bench.layers import IN_CHANNELS
from gnnaccel.adapters.pyg.bench.relational import BASES, MODELS, RelationLayer
from gnnaccel.profile.bench import accel, cells, once_cells, plan, relation_graph, steps, timing
from gnnaccel.profile.bench.guard import Budget, guarded
from gnnaccel.profile.bench.plan import Job, Plan
from gnnaccel.profile.bench.relation_graph import RelationGraph, RelationShape
from gnnaccel.profile.bench.result import Record
from gnnaccel.profile.bench.steps import relation_step

CPU = torch.device("cpu")
ONCE = "once"
PARTS = ("layers", "memory", "compaction", "cpu", ONCE)
GIB = 1024**3
FLOAT = 4
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {"passes": ()}, "compaction": {"passes": ("compaction",)},
    "reordering": {"passes": ("reordering",)}, "all": {}}
"""Options of ``gnnaccel.enabled``; left out, every pass may run."""


@dataclasses.dataclass(frozen=True)
class RelationPlan(Plan):
    """``cpu_jobs``: those of the part "cpu". The part "once" measures all ``once_layers`` in all
    ``once_sizes``."""

    cpu_jobs: tuple[Job, ...] = ()
    once_layers: tuple[once.OnceLayer, ...] = ()
    once_sizes: tuple[once_cells.OnceSize, ...] = ()


def from_options(options) -> RelationPlan:
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
    names = plan.flat(options.layers) or (once_cells.QUICK_LAYERS if options.quick else once.LAYERS)
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

    def records(graph: RelationGraph) -> Iterator[Record]:
        for part in parts:
            if part == "layers":
                yield from cells.in_modes(
                    layers, budget, lambda layer, mode: layer_records(
                        layer, graph, mode, effort, plan.impls))
            elif part == "memory":
                yield from cells.in_modes(
                    layers, budget, lambda layer, mode: memory_records(
                        layer, graph, plan.impls) if mode == "training" else [])
            elif part == "compaction":
                yield from cells.in_modes(
                    layers, budget, lambda layer, mode: passes_records(
                        layer, graph, mode, plan.effort))

    return iter(()) if budget.spent else cells.on_graph(plan, shape, relation_graph.make, records,
                                                        device)


# --- one layer on one graph in one mode -----------------------------------------------------------

def layer_records(layer: RelationLayer, graph: RelationGraph, mode: str, effort: timing.Effort,
                  impls: tuple[str, ...] = tuple(accel.CONTEXTS)) -> list[Record]:
    """The cell's records: one per implementation and, when both ran, their comparison."""
    return cells.records_of("relation", cells.place_of(layer, graph, mode), impls,
                            lambda: relation_step(layer, graph, mode), effort,
                            lambda impl: context_for(impl, layer, graph, mode))


def memory_records(layer: RelationLayer, graph: RelationGraph,
                   impls: tuple[str, ...]) -> list[Record]:
    """Device memory of a first training step, structures and all: ``peak_mib`` beyond the layer and
    its inputs."""
    place = cells.place_of(layer, graph, "training")
    records = []
    for impl in impls:
        context, refused = context_for(impl, layer, graph, "training")

        def cell(context=context):
            accel.clear_cache()
            with context():
                return cells.peak_mib(relation_step(layer, graph, "training"), graph.device)

        values, error = (None, refused) if refused else guarded(cell, graph.device)
        accel.clear_cache()
        timing.release(graph.device)
        records.append(Record("memory", **place, impl=impl, values=values or {}, error=error))
    return records


def passes_records(layer: RelationLayer, graph: RelationGraph, mode: str,
                   effort: timing.Effort) -> list[Record]:
    """One record per variant, as ``impl``, with its difference from the results without passes."""
    effort = dataclasses.replace(effort, batches=min(effort.batches, 10),
                                 seconds=min(effort.seconds, 0.5))
    place = cells.place_of(layer, graph, mode)
    records: list[Record] = []
    plain: dict[str, Tensor] = {}
    for name, options in VARIANTS.items():
        context, refused = context_for("gnnaccel", layer, graph, mode, **options)
        if refused:
            records.append(Record("compaction", **place, impl=name, error=refused))
            continue
        record, tensors = cells.step_record("compaction", {**place, "impl": name}, context,
                                            lambda: relation_step(layer, graph, mode), effort)
        plain = tensors if name == "none" else plain
        if plain and tensors and name != "none":
            differences, error = guarded(lambda: steps.differences(tensors, plain), graph.device)
            record.values.update(differences or {})
            record.error = record.error or error
        records.append(record)
    return records


def context_for(impl: str, layer: RelationLayer, graph: RelationGraph, mode: str,
                **options) -> tuple[Callable | None, str | None]:
    """(the context to run ``impl`` in, None), or (None, why it is not run here). ``options`` are
    gnnaccel's.

    Where the native layer would not fit, gnnaccel must not fall back to it either.
    """
    refused = refusal(layer, graph, mode)
    if impl == "native":
        return (None, refused) if refused else (accel.CONTEXTS[impl], None)
    if refused:
        if not _taken_over(layer, mode, graph.device):
            return None, f"gnnaccel does not take {layer.class_name} over; natively {refused}"
        return (lambda: accel.accelerated(on_fallback="raise", **options)), None
    return ((lambda: accel.accelerated(**options)) if options else accel.CONTEXTS[impl]), None


def _taken_over(layer: RelationLayer, mode: str, device: torch.device) -> bool:
    """Does gnnaccel see calls of this layer at all? Found out on a tiny graph."""
    with contextlib.ExitStack() as stack:
        stack.callback(accel.reset_routes)
        accel.reset_routes()
        stack.enter_context(accel.accelerated())
        relation_step(layer, relation_graph.make(relation_graph.SHAPES["tiny-typed"], device),
                      mode)()
        return bool(accel.routes()["routes"])


def needed_bytes(layer: RelationLayer, graph: RelationGraph, mode: str) -> int:
    """A rough count, from what PyG 2.8 keeps: bytes at the peak of one native step in fp32."""
    nodes, edges, relations = graph.num_nodes, graph.num_edges, graph.num_relations
    row = FLOAT * max(IN_CHANNELS, layer.out_channels)
    weights_per_edge = FLOAT * edges * IN_CHANNELS * layer.out_channels
    training = mode == "training"
    if layer.class_name == "RGCNConv":
        # Each relation's aggregate has a row per node and stays until backward.
        return row * (nodes * (relations if training else 4) + edges)
    if layer.class_name == "FastRGCNConv":
        return weights_per_edge * (2 if training else 1) + edges * (3 * row + 3 * FLOAT * relations)
    if layer.class_name == "RGATConv":
        return weights_per_edge * (3 if training else 1) + 4 * row * edges
    if layer.class_name == "HGTConv":
        sources = sum(graph.node_counts[triple[0]] for triple in graph.typed)
        return row * (edges * (6 if training else 4) + 6 * sources)
    if layer.class_name in MODELS:
        messages = (edges * BASES * (2 if training else 1)
                    if layer.class_name == "to_hetero_with_bases" else 2 * edges)
        return 2 * row * (messages + 2 * nodes * (len(graph.typed) if training else 4))
    return row * (2 * edges + 2 * nodes * (len(graph.typed) if training else 4))


def refusal(layer: RelationLayer, graph: RelationGraph, mode: str) -> str | None:
    """Why the native layer is not to be run here; None when it may be."""
    free = _free_bytes(graph.device)
    needed = needed_bytes(layer, graph, mode)
    if free is None or needed <= 0.8 * free:
        return None
    return f"not run: needs about {needed / GIB:.3g} GiB of {free / GIB:.3g} GiB"


def _free_bytes(device: torch.device) -> int | None:
    """Memory that is free now; None where nobody knows, and on GPUs, which fail in good order."""
    if device.type != "cpu":
        return None
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
