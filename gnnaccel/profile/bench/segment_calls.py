"""Rows times one matrix per segment: row counts of the relations of well-known graphs, and ways to
multiply, each as (forward, forward and backward).

Forward is ``y[r] = x[r] @ w[segment(r)]``; backward, from a given gradient of y, makes those of x
and w. All make new tensors in every call, as a layer does. What is prepared once (pointers on the
host, gnnaccel's `Segments`) is what a layer keeps with its graph.
"""
from __future__ import annotations

import dataclasses
from typing import Any

import torch

from gnnaccel.adapters.pyg.bench.layers import named
from gnnaccel.profile.bench import relation_shapes
from gnnaccel.profile.bench.cells import Pair


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
    return relation_shapes.relation_sizes(
        relation_shapes.SHAPES[shape.relation] if shape.relation
        else relation_shapes.RelationShape("", (1,), shape.rows, shape.segments))


# --- ways to multiply -----------------------------------------------------------------------------

def gnnaccel(case: Case, precision: str) -> Pair:
    """gnnaccel's own kernels: the only place of the benchmark that knows how they are called."""
    from gnnaccel.cuda.segment_backward import gradients
    from gnnaccel.cuda.segment_gemm import Segments, multiply

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
