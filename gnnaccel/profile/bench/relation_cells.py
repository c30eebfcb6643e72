"""Relational layers: one layer on one graph in one mode, natively and through gnnaccel, and the
memory of both."""
from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from gnnaccel.adapters.pyg.bench.relational import RelationLayer
from gnnaccel.profile.bench import (accel, layer_cells, relation_graph, relation_native,
                                    relation_shapes, timing)
from gnnaccel.profile.bench.guard import guarded
from gnnaccel.profile.bench.relation_graph import RelationGraph
from gnnaccel.profile.bench.relation_steps import relation_step
from gnnaccel.profile.bench.result import Record


def layer_records(layer: RelationLayer, graph: RelationGraph, mode: str, effort: timing.Effort,
                  impls: tuple[str, ...] = tuple(accel.CONTEXTS)) -> list[Record]:
    """The cell's records: one per implementation and, when both ran, their comparison."""
    return layer_cells.records_of("relation", layer_cells.place_of(layer, graph, mode), impls,
                                  lambda impl: context_for(impl, layer, graph, mode),
                                  lambda: relation_step(layer, graph, mode), effort)


def alternating_records(layer: RelationLayer, graph: RelationGraph, mode: str,
                        effort: timing.Effort) -> list[Record]:
    """As `layer_records`, but native and gnnaccel in turns, for machines whose pace drifts and
    ratios near one."""
    if relation_native.refusal(layer, graph, mode):
        return layer_records(layer, graph, mode, effort)
    return layer_cells.checked_turns("relation", layer_cells.place_of(layer, graph, mode),
                                     lambda: relation_step(layer, graph, mode), effort)


def memory_records(layer: RelationLayer, graph: RelationGraph,
                   impls: tuple[str, ...]) -> list[Record]:
    """Device memory of a first training step, structures and all: ``peak_mib`` beyond the layer and
    its inputs."""
    place = layer_cells.place_of(layer, graph, "training")
    records = []
    for impl in impls:
        context, refused = context_for(impl, layer, graph, "training")

        def cell(context=context):
            accel.clear_cache()
            with context():
                return timing.peak_extra_bytes(relation_step(layer, graph, "training"),
                                               graph.device)

        peak, error = (None, refused) if refused else guarded(cell, graph.device)
        accel.clear_cache()
        timing.release(graph.device)
        values = {} if peak is None else {"peak_mib": peak / layer_cells.MIB}
        records.append(Record("memory", **place, impl=impl, values=values, error=error))
    return records


def context_for(impl: str, layer: RelationLayer, graph: RelationGraph, mode: str,
                **options) -> tuple[Callable | None, str | None]:
    """(the context to run ``impl`` in, None), or (None, why it is not run here). ``options`` are
    gnnaccel's.

    Where the native layer would not fit, gnnaccel must not fall back to it either.
    """
    refused = relation_native.refusal(layer, graph, mode)
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
        relation_step(layer, relation_graph.make(relation_shapes.SHAPES["tiny-typed"], device),
                      mode)()
        return bool(accel.routes()["routes"])
