"""Layer cells: one layer on one shape in one mode, natively and through gnnaccel, compared with
each other."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from gnnaccel.adapters.pyg.bench.layers import LayerSpec
from gnnaccel.profile.bench import accel, steps, timing
from gnnaccel.profile.bench.guard import guarded
from gnnaccel.profile.bench.result import Record
from gnnaccel.profile.bench.shapes import Graph

MIB = 1024 * 1024


def measure_step(step: steps.Step, effort: timing.Effort) -> tuple[dict, dict]:
    """(timing, memory values) of a step in the current context.

    ``peak_mib``: extra memory of a settled step at its peak. ``resident_mib``: what stays allocated
    after the first step for later ones, such as a cached structure. Both in MiB, absent without a
    GPU.
    """
    device = step.device
    before = timing.live_bytes(device)
    timed = timing.measure(step, device, effort)
    step.clear()
    after = timing.live_bytes(device)
    peak = timing.peak_extra_bytes(step, device)
    step.clear()
    memory = ({} if peak is None or before is None or after is None
              else {"peak_mib": peak / MIB, "resident_mib": (after - before) / MIB})
    return dataclasses.asdict(timed), memory


def place_of(layer: Any, graph: Any, mode: str) -> dict[str, Any]:
    """Where a record belongs."""
    return dict(shape=graph.shape.name, layer=layer.name, mode=mode, device=graph.device.type)


def layer_records(spec: LayerSpec, graph: Graph, mode: str, effort: timing.Effort,
                  impls: tuple[str, ...] = tuple(accel.CONTEXTS)) -> list[Record]:
    """The cell's records: one per implementation and, when both ran, their comparison."""
    return records_of("layer", place_of(spec, graph, mode), impls,
                      lambda impl: (accel.CONTEXTS[impl], None),
                      lambda: steps.layer_step(spec, graph, mode), effort, width=spec.out_channels)


def records_of(kind: str, place: dict, impls: tuple[str, ...],
               context_of: Callable[[str], tuple[Callable | None, str | None]],
               make_step: Callable[[], Any], effort: timing.Effort, **values: int) -> list[Record]:
    """The records of a cell, one per implementation, and their comparison when both ran.
    ``context_of(impl)``: what it runs in, and None; or None, and why it is left out."""
    records, tensors = [], {}
    for impl in impls:
        context, refused = context_of(impl)
        if refused:
            records.append(Record(kind, **place, impl=impl, error=refused))
            continue
        record, tensors[impl] = step_record(kind, {**place, "impl": impl}, context, make_step,
                                            effort)
        record.values = {**values, **record.values}
        records.append(record)
    return records + comparison("check", place, tensors)


def step_record(kind: str, place: dict, context, make_step,
                effort: timing.Effort) -> tuple[Record, dict]:
    """The record of one implementation, and the tensors that it made (none when it failed).

    ``make_step`` builds the step anew; it is called, and the step run, within ``context()``.
    """
    device = torch.device(place["device"])

    def cell():
        accel.reset_routes()
        accel.clear_cache()
        with context():
            step = make_step()
            timed, memory = measure_step(step, effort)
            return timed, {**memory, **accel.routes()}, step.results()

    value, error = guarded(cell, device)
    timed, values, tensors = value or (None, {}, {})
    del value
    timing.release(device)
    return Record(kind, **place, timing=timed, error=error, values=values), tensors


def comparison(kind: str, place: dict, tensors: dict[str, dict]) -> list[Record]:
    """The check of gnnaccel's tensors against native's; none unless both made some."""
    if not all(tensors.get(impl) for impl in accel.CONTEXTS):
        return []
    values, error = guarded(lambda: steps.differences(tensors["gnnaccel"], tensors["native"]),
                            torch.device(place["device"]))
    return [Record(kind, **place, values=values or {}, error=error)]


def alternating_records(kind: str, place: dict, make_step, effort: timing.Effort) -> list[Record]:
    """Native and gnnaccel in turns, for ratios near one. ``make_step`` builds a new callable;
    ``place`` says where."""
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
    found = {impl: dataclasses.asdict(timed) for impl, timed in (timings or {}).items()}
    return [Record(kind, **place, impl=impl, timing=found.get(impl), error=errors[impl] or error)
            for impl in accel.CONTEXTS]


def checked_turns(kind: str, place: dict, make_step, effort: timing.Effort) -> list[Record]:
    """`alternating_records` with the routes that calls took, and the check of gnnaccel's tensors
    against native's."""
    device = torch.device(place["device"])
    tensors, routes = {}, {}
    for impl, context in accel.CONTEXTS.items():
        def once(impl=impl, context=context):
            with context():
                step = make_step()
                if impl != "native":
                    step()  # the first call may take another route than those that are timed
                accel.reset_routes()
                return step.results(), accel.routes()

        value, _ = guarded(once, device)  # a failure shows again, and is recorded, when timed
        tensors[impl], routes[impl] = value or ({}, {})
    checks = comparison("check", place, tensors)
    tensors.clear()
    records = alternating_records(kind, place, make_step, effort)
    for record in records:
        record.values = dict(routes[record.impl])
    return records + checks
