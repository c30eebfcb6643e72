"""``--suite segment-gemm``: rows times one matrix per segment, gnnaccel's kernels against torch's
ways of doing it."""
from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import torch

from gnnaccel.profile.bench import cells, plan, segment_calls, timing
from gnnaccel.profile.bench.guard import Budget, guarded
from gnnaccel.profile.bench.plan import Measuring, Plan
from gnnaccel.profile.bench.result import Record
from gnnaccel.profile.bench.segment_calls import Case, SegmentShape

PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}


def from_options(options) -> Plan:
    """A plan from parsed options; on the command line precisions stand where other suites have
    their layers. Raises ValueError on names that do not exist and devices that are not there."""
    device = plan.device(options)
    known = [name for name in PRECISIONS if name != "tf32" or device.type == "cuda"]
    wanted = plan.flat(options.layers) or known
    if unknown := set(wanted) - set(known):
        raise ValueError(f"no precision {', '.join(sorted(unknown))} on a {device.type}; known: "
                         f"{', '.join(known)}")
    plan.parts(options, ())  # the suite has none: naming one is an error
    small = options.quick or device.type == "cpu"
    names = plan.flat(options.shapes) or [name for name in segment_calls.SHAPES
                                          if name.startswith("tiny") == small]
    return Plan(tuple((segment_calls.resolve(name), tuple(wanted)) for name in names),
                **plan.measuring(options))


def segment_gemm(plan: Plan, budget: Budget) -> Iterator[Record]:
    """The records, by shape and precision."""
    bandwidth = copy_bandwidth(plan)
    for shape, precisions in plan.jobs:
        for precision in precisions:
            if budget.spent:
                return
            yield from case_records(plan, shape, precision, bandwidth)


def case_records(plan: Plan, shape: SegmentShape, precision: str,
                 bandwidth: float) -> list[Record]:
    """One record per mode and way of computing; ``floor_ms`` is the time to move the bytes that
    must be moved."""
    case, error = guarded(lambda: segment_calls.make(shape, PRECISIONS[precision], plan.device,
                                                     plan.seed), plan.device)
    if case is None:
        return [Record("note", shape.name, "segment-gemm", error=error)]
    records = []
    with _allowed_tf32(precision == "tf32"):
        for name, make in segment_calls.CALLS.items():
            if segment_calls.available(name, precision, plan.device):
                records += cells.pair_records(
                    "segment-gemm", dict(shape=shape.name, layer=precision, impl=name),
                    functools.partial(make, case, precision), plan.device, plan.effort,
                    lambda mode: {"floor_ms": moved_bytes(case, mode) / bandwidth * 1e3},
                    lambda pair, mode: (_difference(case, pair[0])
                                        if name == "gnnaccel" and mode == "forward" else {}))
    return records


def moved_bytes(case: Case, mode: str) -> int:
    """Bytes of the operands, each read once, and of the results, each written once."""
    rows, matrices = (tensor.numel() * tensor.element_size() for tensor in (case.x, case.w))
    return (2 * rows + matrices) * (3 if mode == "training" else 1)


def copy_bandwidth(plan: Measuring) -> float:
    """Bytes per second that a copy reads and writes on this device."""
    source = torch.empty((256 if plan.device.type == "cuda" else 8) * cells.MIB, dtype=torch.uint8,
                         device=plan.device)
    target = torch.empty_like(source)
    seconds = timing.measure(lambda: target.copy_(source), plan.device, plan.effort).ms / 1e3
    return 2 * source.numel() / seconds


def _difference(case: Case, forward) -> dict[str, float]:
    """gnnaccel's product against a loop's in float32 arithmetic, relative L2."""
    with _allowed_tf32(False):
        exact = segment_calls.loop(dataclasses.replace(case, x=case.x.float(), w=case.w.float()),
                                   "fp32")[0]()
    return {"rel_l2": cells.rel_l2(forward(), exact)}


@contextlib.contextmanager
def _allowed_tf32(allowed: bool):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
