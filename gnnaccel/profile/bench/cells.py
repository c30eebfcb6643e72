"""What suites do alike: a graph at a time, a layer in a mode at a time, natively and through
gnnaccel, compared with each other; and pairs of calls without a layer."""
from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from gnnaccel.cuda.traverse.gather import row_gather
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.profile.bench import accel, shapes, steps, timing
from gnnaccel.profile.bench.guard import Budget, guarded
from gnnaccel.profile.bench.plan import Plan
from gnnaccel.profile.bench.result import Record

MIB = 1024 * 1024
CLASSES = 16
BATCH = shapes.Shape("fresh-100k", 20_000, 100_000, 400)
#: (forward, forward and backward), without arguments
Pair = tuple[Callable[[], Any], Callable[[], Any]]


# --- graphs ---------------------------------------------------------------------------------------

def on_graph(plan: Plan, shape: Any, make: Callable[..., Any],
             records: Callable[[Any], Iterator[Record]],
             device: torch.device | None = None) -> Iterator[Record]:
    """The facts of the graph that ``make(shape, device, seed, order)`` gives, and its ``records``;
    a note where it cannot be made. Nothing of it is kept."""
    device = device or plan.device

    def made() -> tuple[Any, dict]:
        graph = make(shape, device, plan.seed, plan.order)
        return graph, graph.facts()

    found, error = guarded(made, device)
    if found is None:
        yield Record("note", shape.name, "graph", error=error)
        return
    yield Record("shape", shape.name, device=device.type, values=found[1])
    yield from records(found[0])
    accel.clear_cache()
    del found
    timing.release(device)


def in_modes(layers, budget: Budget, cell: Callable[[Any, str], Any]) -> Iterator[Record]:
    """The records of ``cell(layer, mode)``, while the budget lasts."""
    for layer in layers:
        for mode in steps.MODES:
            if budget.spent:
                return
            yield from cell(layer, mode)


# --- layers ---------------------------------------------------------------------------------------

def measure_step(step: Any, effort: timing.Effort) -> tuple[dict, dict]:
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
    return dict(shape=graph.shape.name, layer=layer.name, mode=mode, device=graph.device.type)


def records_of(kind: str, place: dict, impls: tuple[str, ...], make_step: Callable[[], Any],
               effort: timing.Effort, context_of: Callable | None = None, turns: bool = True,
               **values: int) -> list[Record]:
    """The records of a cell, one per implementation, and their comparison when both ran.

    ``context_of(impl)``: what it runs in, and None; or None, and why it is left out. On a CPU,
    whose pace drifts, implementations take turns, unless ``turns`` is off or one is left out.
    ``values``: further ones of each record that was not made in turns.
    """
    contexts = {impl: context_of(impl) if context_of else (accel.CONTEXTS[impl], None)
                for impl in impls}
    refusals = any(refused for _, refused in contexts.values())
    if turns and place["device"] == "cpu" and len(impls) > 1 and not refusals:
        return checked_turns(kind, place, make_step, effort)
    records, tensors = [], {}
    for impl, (context, refused) in contexts.items():
        if refused:
            records.append(Record(kind, **place, impl=impl, error=refused))
            continue
        record, tensors[impl] = step_record(kind, {**place, "impl": impl}, context, make_step,
                                            effort)
        record.values = {**values, **record.values}
        records.append(record)
    return records + comparison(place, tensors)


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


def comparison(place: dict, tensors: dict[str, dict]) -> list[Record]:
    """The check of gnnaccel's tensors against native's; none unless both made some."""
    if not all(tensors.get(impl) for impl in accel.CONTEXTS):
        return []
    values, error = guarded(lambda: steps.differences(tensors["gnnaccel"], tensors["native"]),
                            torch.device(place["device"]))
    return [Record("check", **place, values=values or {}, error=error)]


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
    checks = comparison(place, tensors)
    tensors.clear()
    records = alternating_records(kind, place, make_step, effort)
    for record in records:
        record.values = dict(routes[record.impl])
    return records + checks


# --- fresh sampled batches, whose structure nobody has seen ---------------------------------------

class FreshStep(steps.Step):
    """A training step on another batch each time, of another size and in a new tensor, as from a
    neighbour loader.

    As there, the input features need no gradient.
    """

    def __init__(self, batches: list[shapes.Graph], module: torch.nn.Module) -> None:
        largest = max(batches, key=lambda batch: batch.num_nodes)
        super().__init__(module, largest, "training", CLASSES)
        self.x.requires_grad_(False)
        self.batches = enumerate(itertools.cycle(batches))

    def __call__(self) -> torch.Tensor:
        number, batch = next(self.batches)
        # A tensor no cache can know and a size no memo has seen, at a price (a small copy) that
        # everybody pays. The edges are grouped by destination, and so are those that remain when
        # some are cut off at the end.
        edge_index = batch.edge_index[:, :batch.num_edges - number % 997].clone()
        self.clear()
        out = self.module(self.x[:batch.num_nodes], edge_index)
        out.backward(self.grad[:batch.num_nodes])
        return out.detach()


def fresh_records(kind: str, shape: shapes.Shape, models: Mapping[str, Callable[..., Any]],
                  plan: Plan) -> list[Record]:
    """Training on batches whose edges are grouped by destination. ``models``: by their names, what
    makes each for a device."""
    made = shapes.scaled(shape, 0.01) if plan.quick else shape
    graphs = [shapes.make(dataclasses.replace(made, num_nodes=made.num_nodes + 16 * seed),
                          plan.device, seed, "dst")
              for seed in range(8)]
    return [record for name, build in models.items() for record in alternating_records(
        kind, dict(shape=shape.name, layer=name, mode="training", device=plan.device.type),
        lambda: FreshStep(graphs, build(plan.device, classes=CLASSES)), plan.effort)]


# --- calls ----------------------------------------------------------------------------------------

def call_record(place: Record, call: Callable | None, error: str | None, device: torch.device,
                effort: timing.Effort, more: Callable[[], dict] = dict) -> Record:
    """``place`` with the time of ``call``, and with the values that ``more()`` finds afterwards;
    with ``error`` where there is no call."""
    if call is None:
        return dataclasses.replace(place, error=error)
    timed, error = guarded(lambda: dataclasses.asdict(timing.measure(call, device, effort)), device)
    values, failed = guarded(more, device) if timed else (None, None)
    return dataclasses.replace(place, timing=timed, values={**place.values, **(values or {})},
                               error=error or failed)


def pair_records(kind: str, place: dict[str, Any], make: Callable[[], Pair], device: torch.device,
                 effort: timing.Effort, values: Callable[[str], dict] = lambda mode: {},
                 more: Callable[[Pair, str], dict] = lambda pair, mode: {},
                 error: str | None = None) -> list[Record]:
    """A record for each mode of what ``make`` makes. ``values(mode)`` are known beforehand,
    ``more(pair, mode)`` found out after the timing; ``error``: why there is nothing to make."""
    pair, error = (None, error) if error else guarded(make, device)
    found = [call_record(Record(kind, **place, mode=mode, device=device.type, values=values(mode)),
                         pair and pair[index], error, device, effort,
                         lambda mode=mode: more(pair, mode) if pair else {})  # type: ignore[misc]
             for index, mode in enumerate(steps.MODES)]
    pair = None
    timing.release(device)
    return found


def peak_mib(call: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Extra memory of a call at its peak, in MiB; empty without a GPU."""
    peak = timing.peak_extra_bytes(call, device)
    return {} if peak is None else {"peak_mib": peak / MIB}


def copy_bandwidth(plan: Plan) -> float:
    """Bytes per second that a copy reads and writes on this device."""
    source = torch.empty((256 if plan.device.type == "cuda" else 8) * MIB, dtype=torch.uint8,
                         device=plan.device)
    target = torch.empty_like(source)
    seconds = timing.measure(lambda: target.copy_(source), plan.device, plan.effort).ms / 1e3
    return 2 * source.numel() / seconds


def rel_l2(got: torch.Tensor, expected: torch.Tensor) -> float:
    gap = torch.linalg.vector_norm(got.float() - expected, dtype=torch.float64)
    return float(gap / torch.linalg.vector_norm(expected, dtype=torch.float64))


# --- the floor ------------------------------------------------------------------------------------

# Gathering every edge's source row once along the CSC and summing, and nothing else. Measured on
# the graph itself and on one with the same size and uniform degrees; the latter is the floor that
# targets are stated against, as its work is balanced without effort.

def floor_records(graph: shapes.Graph, widths: Collection[int],
                  effort: timing.Effort) -> list[Record]:
    """One record per width (in features, as ``layer``) and degree law (``impl``: "actual" or
    "uniform")."""
    records = []
    for impl in ("uniform", "actual"):
        def prepared(impl=impl):
            same = (graph if impl == "actual"
                    else shapes.make(shapes.uniform(graph.shape), graph.device))
            return GraphView(same.edge_index, graph.num_nodes, graph.num_nodes).csc(places=False)

        rows, error = guarded(prepared, graph.device)
        for width in sorted(widths):
            call, failed = (None, error) if error else guarded(
                lambda: _gathering(rows, graph, width), graph.device)
            place = Record("floor", graph.shape.name, str(width), impl=impl,
                           device=graph.device.type)
            records.append(call_record(place, call, failed, graph.device, effort))
        rows = call = None
        timing.release(graph.device)
    return records


def _gathering(rows: Any, graph: shapes.Graph, width: int) -> Callable[[], object]:
    x = torch.randn(graph.num_nodes, width, device=graph.device)
    return lambda: row_gather(rows, x)
