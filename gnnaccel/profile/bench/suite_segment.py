"""``--suite segment-gemm``: rows times one matrix per segment, gnnaccel's kernels against torch's
ways of doing it. Row counts are those of the relations of well-known graphs."""
from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch

from gnnaccel.adapters.pyg.bench.layers import named
from gnnaccel.profile.bench import cells, plan, relation_graph
from gnnaccel.profile.bench.cells import Pair
from gnnaccel.profile.bench.guard import Budget, guarded
from gnnaccel.profile.bench.plan import Plan
from gnnaccel.profile.bench.result import Record

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
    names = plan.flat(options.shapes) or [name for name in SHAPES
                                          if name.startswith("tiny") == small]
    return Plan(tuple((resolve(name), tuple(wanted)) for name in names), **plan.measuring(options))


def segment_gemm(plan: Plan, budget: Budget) -> Iterator[Record]:
    bandwidth = cells.copy_bandwidth(plan)
    for shape, precisions in plan.jobs:
        for precision in precisions:
            if budget.spent:
                return
            yield from case_records(plan, shape, precision, bandwidth)


def case_records(plan: Plan, shape: SegmentShape, precision: str,
                 bandwidth: float) -> list[Record]:
    """One record per mode and way of computing; ``floor_ms`` is the time to move the bytes that
    must be moved."""
    case, error = guarded(lambda: make(shape, PRECISIONS[precision], plan.device,
                                                     plan.seed), plan.device)
    if case is None:
        return [Record("note", shape.name, "segment-gemm", error=error)]
    records = []
    with _allowed_tf32(precision == "tf32"):
        for name, way in CALLS.items():
            if available(name, precision, plan.device):
                records += cells.pair_records(
                    "segment-gemm", dict(shape=shape.name, layer=precision, impl=name),
                    functools.partial(way, case, precision), plan.device, plan.effort,
                    lambda mode: {"floor_ms": moved_bytes(case, mode) / bandwidth * 1e3},
                    lambda pair, mode: (_difference(case, pair[0])
                                        if name == "gnnaccel" and mode == "forward" else {}))
    return records


def moved_bytes(case: Case, mode: str) -> int:
    """Bytes of the operands, each read once, and of the results, each written once."""
    rows, matrices = (tensor.numel() * tensor.element_size() for tensor in (case.x, case.w))
    return (2 * rows + matrices) * (3 if mode == "training" else 1)


def _difference(case: Case, forward) -> dict[str, float]:
    """gnnaccel's product against a loop's in float32 arithmetic, relative L2."""
    with _allowed_tf32(False):
        exact = loop(dataclasses.replace(case, x=case.x.float(), w=case.w.float()), "fp32")[0]()
    return {"rel_l2": cells.rel_l2(forward(), exact)}


@contextlib.contextmanager
def _allowed_tf32(allowed: bool):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


# --- shapes ---------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class SegmentShape:
    """``rows`` in ``segments``, each times a ``width`` x ``width`` matrix of its own. Sizes follow
    ``relation``'s."""

    name: str
    rows: int
    segments: int
    width: int
    relation: str = ""


@dataclasses.dataclass(frozen=True)
class Case:
    """The tensors of one multiplication. ``bounds`` is where each segment starts and, last, where
    the last one ends, as plain numbers; ``ptr`` the same on the device, int64."""

    shape: SegmentShape
    bounds: tuple[int, ...]
    ptr: torch.Tensor
    x: torch.Tensor
    w: torch.Tensor
    grad: torch.Tensor


SHAPES = {shape.name: shape for shape in (
    SegmentShape("tiny 16", 600, 12, 16),
    SegmentShape("aifb 64", 49_000, 78, 64),
    SegmentShape("fb15k 64", 620_000, 474, 64),
    SegmentShape("fb15k 128", 620_000, 474, 128),
    SegmentShape("am 64", 5_700_000, 96, 64),
    SegmentShape("am 128", 5_700_000, 96, 128),
    SegmentShape("mag 64", 21_111_007, 4, 64, "mag-size"),
    SegmentShape("mag 128", 21_111_007, 4, 128, "mag-size"),
)}


def resolve(name: str) -> SegmentShape:
    """The shape called ``name``, see `named`."""
    return named(name, SHAPES, "shape")


def make(shape: SegmentShape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Case:
    """Random rows and matrices. The segments are shuffled, so that no kernel profits from the
    largest coming first."""
    generator = torch.Generator(device).manual_seed(seed)
    sizes = _sizes(shape)
    sizes = sizes[torch.randperm(len(sizes), generator=torch.Generator("cpu").manual_seed(seed),
                                 device="cpu")]
    ptr = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    width = shape.width

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device, dtype=dtype, generator=generator)

    return Case(shape, tuple(ptr.tolist()), ptr.to(device), random(shape.rows, width),
                random(shape.segments, width, width) / width**0.5, random(shape.rows, width))


def _sizes(shape: SegmentShape) -> torch.Tensor:
    return relation_graph.relation_sizes(
        relation_graph.SHAPES[shape.relation] if shape.relation
        else relation_graph.RelationShape("", (1,), shape.rows, shape.segments))


# --- ways to multiply -----------------------------------------------------------------------------

# Each as (forward, forward and backward). Forward is ``y[r] = x[r] @ w[segment(r)]``; backward,
# from a given gradient of y, makes those of x and w. All make new tensors in every call, as a layer
# does. What is prepared once (pointers on the host, gnnaccel's `Segments`) is what a layer keeps
# with its graph.

def gnnaccel(case: Case, precision: str) -> Pair:
    """gnnaccel's own kernels: the only place of the benchmark that knows how they are called."""
    from gnnaccel.cuda.segment.segment_backward import gradients
    from gnnaccel.cuda.segment.segment_gemm import Segments, multiply

    segments = Segments(case.ptr.int(), case.shape.rows)
    # for half types the option means nothing
    how: dict[str, Any] = {"precision": "fp32" if precision == "bf16" else precision}

    def forward() -> torch.Tensor:
        found = multiply(segments, case.x, case.w, **how)
        assert isinstance(found, torch.Tensor)  # two only with attention vectors
        return found

    def training():
        return forward(), *gradients(segments, case.x, case.grad, case.w, **how)[:2]

    return forward, training


def loop(case: Case, precision: str) -> Pair:
    """One ``torch.mm`` per segment."""
    parts = [(index, slice(start, end))
             for index, (start, end) in enumerate(zip(case.bounds, case.bounds[1:]))
             if end > start]

    def multiply(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(rows)
        for index, part in parts:
            torch.mm(rows[part], matrices[index], out=out[part])
        return out

    def training():
        weights = torch.zeros_like(case.w)
        for index, part in parts:
            torch.mm(case.x[part].T, case.grad[part], out=weights[index])
        return multiply(case.x, case.w), multiply(case.grad, case.w.transpose(1, 2)), weights

    return lambda: multiply(case.x, case.w), training


def grouped(case: Case, precision: str) -> Pair:
    """``torch.nn.functional.grouped_mm``. Raises NotImplementedError where this torch has none."""
    multiply = getattr(torch.nn.functional, "grouped_mm", None)
    if multiply is None:
        raise NotImplementedError("this torch has no grouped_mm")
    ends = case.ptr[1:].int()

    def training():
        return (multiply(case.x, case.w, offs=ends), multiply(case.grad, case.w.transpose(1, 2),
                                                              offs=ends),
                multiply(case.x.T, case.grad, offs=ends))

    return lambda: multiply(case.x, case.w, offs=ends), training


def dense(case: Case, precision: str) -> Pair:
    """One ``torch.mm`` of as many FLOPs, by a single matrix: what segments cost nothing would
    take."""
    matrix = case.w[0]

    def training():
        return (torch.mm(case.x, matrix), torch.mm(case.grad, matrix.T),
                torch.mm(case.x.T, case.grad))

    return lambda: torch.mm(case.x, matrix), training


CALLS = {"loop": loop, "grouped_mm": grouped, "dense": dense, "gnnaccel": gnnaccel}


def available(name: str, precision: str, device: torch.device) -> bool:
    """Is this way measured at this precision? ``grouped_mm`` is bf16's; gnnaccel's kernels need a
    GPU."""
    return not (name == "grouped_mm" and precision != "bf16" or name == "gnnaccel"
                and device.type != "cuda")
