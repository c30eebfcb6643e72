"""Ways to multiply rows by one matrix per segment, each as (forward, forward and backward).

Forward is ``y[r] = x[r] @ w[segment(r)]``; backward, from a given gradient of y, makes those of x
and w. All make new tensors in every call, as a layer does. What is prepared once (pointers on the
host, gnnaccel's `Segments`) is what a layer keeps with its graph.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gnnaccel.profile.bench.segment_shapes import Case

Pair = tuple[Callable[[], torch.Tensor], Callable[[], object]]


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
