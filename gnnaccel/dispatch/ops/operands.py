"""The two operands of an operation, brought to shapes that torch broadcasts."""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.policy.reasons import Reason, reason

COPIES = {"copy_lhs": (True, False), "copy_rhs": (False, True)}
OPS = ("add", "sub", "mul", "div", "dot", "copy_lhs", "copy_rhs")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Operands(NamedTuple):
    """``lhs`` and ``rhs`` [rows, *features], of equally many dimensions, None where the operation
    does not use it; ``op`` is one of add, mul, dot, copy_lhs, copy_rhs. ``shape``: of the result's
    features; ``scalar``: it loses the last of them, a 1."""

    op: str
    lhs: Tensor | None
    rhs: Tensor | None
    shape: tuple[int, ...]
    scalar: bool

    @property
    def first(self) -> Tensor:
        return self.rhs if self.lhs is None else self.lhs  # type: ignore[return-value]

    def result(self, out: Tensor) -> Tensor:
        """``out`` [rows, *shape] as the caller gets it."""
        return out.squeeze(-1) if self.scalar else out


def prepare(op: str, lhs: Any, rhs: Any) -> Operands | Reason:
    """The operands of ``op``, or why they do not fit.

    Features broadcast as numpy's arrays do; tensors of one dimension have one feature. "dot" sums
    products over the last dimension, of one size, and leaves 1. Subtracting is adding the negative,
    dividing multiplying with the reciprocal, as in DGL.
    """
    if op not in OPS:
        return reason("GA208", f"op={op!r} is none of {', '.join(OPS)}")
    use_lhs, use_rhs = COPIES.get(op, (True, True))
    used = [t for t, use in ((lhs, use_lhs), (rhs, use_rhs)) if use]
    why = _reason(used)
    if why is not None:
        return why
    if op in ("sub", "div"):
        op, rhs = ("add", -rhs) if op == "sub" else ("mul", 1.0 / rhs)
    rank = max(used[0].dim(), used[-1].dim())
    scalar, dims = rank == 1, max(2, rank)
    lhs, rhs = _padded(lhs, dims) if use_lhs else None, _padded(rhs, dims) if use_rhs else None
    shape = _shape(op, lhs, rhs)
    return shape if type(shape) is Reason else Operands(op, lhs, rhs, shape, scalar)


def size_reason(graph: OpGraph, operands: Operands, targets: tuple[str, str]) -> Reason | None:
    """Why the operands do not belong to this graph: other numbers of rows."""
    for t, target in zip((operands.lhs, operands.rhs), targets):
        if t is not None and t.shape[0] != graph.rows(target):
            return reason("GA206",
                          f"features of {target} have {t.shape[0]} rows, the graph "
                          f"{graph.rows(target)}")
    return None


def _reason(used: list) -> Reason | None:
    for t in used:
        if not isinstance(t, Tensor) or t.dim() == 0:
            return reason("GA206", "an operand is missing, or has no dimensions")
        if t.layout != torch.strided or t.dtype not in DTYPES:
            return reason("GA203",
                          f"features are {t.dtype}, {t.layout}; message passing takes "
                          "floating numbers")
    first, last = used[0], used[-1]
    if first.dtype != last.dtype:
        return reason("GA203",
                      f"the operands are {first.dtype} and {last.dtype}; convert them to one dtype")
    if first.device != last.device:
        return reason("GA206", f"the operands are on {first.device} and {last.device}")
    return None


def _padded(t: Tensor, dims: int) -> Tensor:
    """``t`` with leading features of 1."""
    return t if t.dim() >= dims else t.view(t.shape[0], *(1,) * (dims - t.dim()), *t.shape[1:])


def _shape(op: str, lhs: Tensor | None, rhs: Tensor | None) -> tuple[int, ...] | Reason:
    if lhs is None or rhs is None:
        return tuple((rhs if lhs is None else lhs).shape[1:])  # type: ignore[union-attr]
    if op == "dot" and lhs.shape[-1] != rhs.shape[-1]:
        return reason("GA206",
                      f"dot needs one size of the last dimension, got {list(lhs.shape)} "
                      f"and {list(rhs.shape)}")
    # torch.broadcast_shapes takes longer than the whole decision
    pairs = list(zip(lhs.shape[1:], rhs.shape[1:]))
    if any(a != b and a != 1 and b != 1 for a, b in pairs):
        return reason("GA206",
                      f"features {list(lhs.shape[1:])} and {list(rhs.shape[1:])} do not broadcast")
    shape = tuple(b if a == 1 else a for a, b in pairs)
    return (*shape[:-1], 1) if op == "dot" else shape
