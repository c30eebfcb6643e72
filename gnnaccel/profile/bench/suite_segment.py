"""``--suite segment-gemm``: rows times one matrix per segment, gnnaccel's kernels against torch's
ways of doing it."""
from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch

from gnnaccel.profile.bench import plan as plans
from gnnaccel.profile.bench import segment_calls, segment_shapes, timing
from gnnaccel.profile.bench.guard import Budget, guarded
from gnnaccel.profile.bench.layer_cells import MIB
from gnnaccel.profile.bench.result import Record
from gnnaccel.profile.bench.segment_shapes import Case, SegmentShape
from gnnaccel.profile.bench.steps import MODES

PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class SegmentPlan(plans.Measuring):
    """``precisions`` are from PRECISIONS; on the command line they stand where other suites have
    their layers."""

    shapes: tuple[SegmentShape, ...]
    precisions: tuple[str, ...]


def from_options(options) -> SegmentPlan:
    """A plan from parsed options. Raises ValueError on names that do not exist and devices that are
    not there."""
    device = plans.device(options)
    known = [name for name in PRECISIONS if name != "tf32" or device.type == "cuda"]
    wanted = plans.flat(options.layers) or known
    if unknown := set(wanted) - set(known):
        raise ValueError(f"no precision {', '.join(sorted(unknown))} on a {device.type}; known: "
                         f"{', '.join(known)}")
    plans.parts(options, (), [])  # the suite has none: naming one is an error
    small = options.quick or device.type == "cpu"
    names = plans.flat(options.shapes) or (["tiny 16"] if small
                                           else [n for n in segment_shapes.SHAPES
                                                 if n[:4] != "tiny"])
    return SegmentPlan(tuple(segment_shapes.resolve(name) for name in names), tuple(wanted),
                       **plans.measuring(options))


def segment_gemm(plan: SegmentPlan, budget: Budget) -> Iterator[Record]:
    """The records, by shape and precision."""
    bandwidth = copy_bandwidth(plan)
    for shape in plan.shapes:
        for precision in plan.precisions:
            if budget.spent:
                return
            yield from case_records(plan, shape, precision, bandwidth)


def case_records(plan: SegmentPlan, shape: SegmentShape, precision: str,
                 bandwidth: float) -> list[Record]:
    """One record per mode and way of computing; ``floor_ms`` is the time to move the bytes that
    must be moved."""
    case, error = guarded(lambda: segment_shapes.make(shape, PRECISIONS[precision], plan.device,
                                                      plan.seed), plan.device)
    place: dict[str, Any] = dict(shape=shape.name, layer=precision, device=plan.device.type)
    if case is None:
        return [Record("note", shape.name, "segment-gemm", error=error)]
    records = []
    with _allowed_tf32(precision == "tf32"):
        for name, make in segment_calls.CALLS.items():
            if not segment_calls.available(name, precision, plan.device):
                continue
            pair, failed = guarded(functools.partial(make, case, precision), plan.device)
            for index, mode in enumerate(MODES):
                values = {"floor_ms": moved_bytes(case, mode) / bandwidth * 1e3}
                records.append(_record(plan, {**place, "mode": mode, "impl": name},
                                       pair and pair[index], failed, values))
                if name == "gnnaccel" and pair and mode == "forward":
                    records[-1].values.update(_difference(plan, case, pair[0]))
    case = pair = None
    timing.release(plan.device)
    return records


def moved_bytes(case: Case, mode: str) -> int:
    """Bytes of the operands, each read once, and of the results, each written once."""
    rows, matrices = (tensor.numel() * tensor.element_size() for tensor in (case.x, case.w))
    return (2 * rows + matrices) * (3 if mode == "training" else 1)


def copy_bandwidth(plan: plans.Measuring) -> float:
    """Bytes per second that a copy reads and writes on this device."""
    source = torch.empty((256 if plan.device.type == "cuda" else 8) * MIB, dtype=torch.uint8,
                         device=plan.device)
    target = torch.empty_like(source)
    seconds = timing.measure(lambda: target.copy_(source), plan.device, plan.effort).ms / 1e3
    return 2 * source.numel() / seconds


def _record(plan: SegmentPlan, place: dict, call, failed: str | None, values: dict) -> Record:
    timed, error = (None, failed) if failed else guarded(
        lambda: dataclasses.asdict(timing.measure(call, plan.device, plan.effort)), plan.device)
    return Record("segment-gemm", **place, timing=timed, error=error, values=values)


def _difference(plan: SegmentPlan, case: Case, forward) -> dict[str, float]:
    """gnnaccel's product against a loop's in float32 arithmetic, relative L2."""
    def compare() -> float:
        with _allowed_tf32(False):
            exact = segment_calls.loop(dataclasses.replace(case, x=case.x.float(),
                                                           w=case.w.float()), "fp32")[0]()
        gap = torch.linalg.vector_norm(forward().float() - exact, dtype=torch.float64)
        return float(gap / torch.linalg.vector_norm(exact, dtype=torch.float64))

    value, _ = guarded(compare, plan.device)
    return {} if value is None else {"rel_l2": value}


@contextlib.contextmanager
def _allowed_tf32(allowed: bool):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
