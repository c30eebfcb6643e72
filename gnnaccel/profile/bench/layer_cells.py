"""Layer cells: one layer on one shape in one mode, natively and through gnnaccel, compared with each other."""
from __future__ import annotations

import dataclasses

from gnnaccel.adapters.pyg.bench import LayerSpec
from gnnaccel.profile.bench import accel, steps, timing
from gnnaccel.profile.bench.guard import guarded
from gnnaccel.profile.bench.result import Record
from gnnaccel.profile.bench.shapes import Graph

MIB = 1024 * 1024


def measure_step(step: steps.Step, effort: timing.Effort) -> tuple[dict, dict]:
    """(timing, memory values) of a step in the current context.

    ``peak_mib``: extra memory of a settled step at its peak. ``resident_mib``: what stays allocated after the first
    step for later ones, such as a cached structure. Both in MiB, absent without a GPU.
    """
    device = step.x.device
    before = timing.live_bytes(device)
    timed = timing.measure(step, device, effort)
    step.clear()
    after = timing.live_bytes(device)
    peak = timing.peak_extra_bytes(step, device)
    step.clear()
    memory = {} if peak is None else {"peak_mib": peak / MIB, "resident_mib": (after - before) / MIB}
    return dataclasses.asdict(timed), memory


def layer_records(spec: LayerSpec, graph: Graph, mode: str, effort: timing.Effort,
                  impls: tuple[str, ...] = tuple(accel.CONTEXTS)) -> list[Record]:
    """The cell's records: one per implementation and, when both ran, their comparison."""
    place = dict(shape=graph.shape.name, layer=spec.name, mode=mode, device=graph.device.type)
    records, tensors = [], {}
    for impl in impls:
        def cell(context=accel.CONTEXTS[impl]):
            accel.reset_routes()
            accel.clear_cache()
            with context():
                step = steps.layer_step(spec, graph, mode)
                timed, memory = measure_step(step, effort)
                return timed, {**memory, **accel.routes()}, step.results()

        value, error = guarded(cell, graph.device)
        timed, values, tensors[impl] = value or (None, {}, {})
        del value
        timing.release(graph.device)
        records.append(Record("layer", **place, impl=impl, timing=timed, error=error,
                              values={"width": spec.out_channels, **values}))
    if all(tensors.get(impl) for impl in accel.CONTEXTS):
        differences, error = guarded(lambda: steps.differences(tensors["gnnaccel"], tensors["native"]), graph.device)
        records.append(Record("check", **place, values=differences or {}, error=error))
    return records


def alternating_records(kind: str, place: dict, make_step, effort: timing.Effort) -> list[Record]:
    """Native and gnnaccel in turns, for ratios near one. ``make_step`` builds a new callable; ``place`` says where."""
    import torch

    device = torch.device(place["device"])
    calls, errors = {}, {}
    for impl, context in accel.CONTEXTS.items():
        def probe(context=context):
            step = make_step()
            with context():
                step()
            return step, context

        value, errors[impl] = guarded(probe, device)
        if value:
            calls[impl] = value
    timings, error = guarded(lambda: timing.measure_rounds(calls, device, effort), device)
    timings = {impl: dataclasses.asdict(timed) for impl, timed in (timings or {}).items()}
    return [Record(kind, **place, impl=impl, timing=timings.get(impl), error=errors[impl] or error)
            for impl in accel.CONTEXTS]
