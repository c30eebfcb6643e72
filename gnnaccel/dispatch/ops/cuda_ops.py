"""The hot forms of the operations, and the kernels that run them.

Reduced to nodes: all forms; operands that broadcast are expanded, and a sum of sums is taken apart.
On edges: copies, functions of two operands number by number, and inner products of the two ends.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import MAX_WIDTH, TYPES, Kernels
from gnnaccel.cuda.traverse import aggregate as sums, edge_softmax as softmax_kernels, sddmm
from gnnaccel.dispatch.ops import cuda_functions as functions
from gnnaccel.dispatch.ops.call import Kernel
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.ops.operands import Operands
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.relational import cuda_maps

_SUM, _EXTREMUM = ("forward", "merge", "edge_dot"), ("forward", "merge", "pick", "add_parts")
_MAX_EDGES = 2**31

if TYPE_CHECKING:
    class _Both(Operands):
        """Two operands, neither of them None."""

        lhs: Tensor
        rhs: Tensor


def gspmm(graph: OpGraph, operands: Operands, reduce: str) -> Kernel | Reason:
    """The way of `torch_ops.gspmm` by kernels, or why there is none."""
    why = _reason(graph, operands.first, operands.shape)
    if why is not None:
        return why
    return _sum(graph, operands) if reduce == "sum" else _extremum(graph, operands, reduce == "max")


def gsddmm(graph: OpGraph, operands: Operands, targets: tuple[str, str]) -> Kernel | Reason:
    """The way of `torch_ops.gsddmm` by kernels, or why there is none."""
    why = _reason(graph, operands.first, operands.shape)
    if why is not None:
        return why
    if operands.op == "dot":
        return _dot(graph, operands, targets)  # type: ignore[arg-type]
    if operands.op in ("copy_lhs", "copy_rhs"):
        return _copy(graph, operands, targets)
    return _elementwise(graph, operands, targets)  # type: ignore[arg-type]


def edge_softmax(graph: OpGraph, logits: Tensor, by: str) -> Kernel | Reason:
    """The way of `torch_ops.edge_softmax` by kernels, or why there is none."""
    why = _reason(graph, logits, logits.shape[1:])
    if why is not None:
        return why
    heads = math.prod(logits.shape[1:])
    return _made("edge softmax", ("edge_softmax", heads, logits.dtype), lambda: [
        (softmax_kernels.kernels(heads, logits.dtype, False), softmax_kernels.ENTRIES)],
        lambda: functions.edge_softmax(graph, logits, by))


def edge_sum(graph: OpGraph, x: Tensor, target: str) -> Kernel | Reason:
    """The way of `cuda_functions.edge_sum`, or why there is none."""
    why = _reason(graph, x, x.shape[1:])
    if why is not None:
        return why
    width = math.prod(x.shape[1:])
    return _made("fused sum of edge features", ("edge sum", width, x.dtype), lambda: [
        (functions.sum_variant(width, x.dtype).kernels, _SUM[:2])],
                 lambda: functions.edge_sum(graph, x, target))


def segment_reduce(x: Tensor, offsets: Tensor, reduce: str) -> Kernel | Reason:
    """The way of `torch_ops.segment_reduce` by kernels, or why there is none."""
    why = _rows_reason(x, x.shape[1:])
    if why is not None or not x.shape[0] or x.shape[0] >= _MAX_EDGES:
        return why or reason("GA303", "there are no rows, or too many")
    width = math.prod(x.shape[1:])
    if reduce == "sum":
        return _made("fused sum by segment", ("segments", width, x.dtype), lambda: [
            (functions.segment_variant(width, x.dtype).kernels, _SUM[:2])],
                     lambda: functions.segment_sum(x, offsets))
    largest = reduce == "max"
    return _made(f"fused {reduce} by segment", ("segments", reduce, width, x.dtype), lambda: [
        (functions.segment_extremum_variant(width, x.dtype, largest).kernels, _EXTREMUM[:2])],
        lambda: functions.segment_extremum(x, offsets, largest))


def _reason(graph: OpGraph, x: Tensor, shape: tuple[int, ...]) -> Reason | None:
    if not graph.num_edges:
        return reason("GA303")
    if graph.num_edges >= _MAX_EDGES:
        return reason("GA206",
                      f"{graph.num_edges} edges; the kernels of single operations count "
                      "them in int32")
    return _rows_reason(x, shape)


def _rows_reason(x: Tensor, shape: tuple[int, ...]) -> Reason | None:
    if x.dtype not in TYPES:
        return reason("GA203", f"{x.dtype} features; the kernels take {', '.join(map(str, TYPES))}")
    return None if math.prod(shape) else reason("GA206", "rows are empty")


def _made(name: str, key: tuple, kernels: Callable[[], list[tuple[Kernels, tuple[str, ...]]]],
          run: Callable[[], Tensor]) -> Kernel:
    """Kernel whose ``kernels()`` gives the kernels to compile, with their entries."""
    def compile_() -> None:
        for kernel, entries in kernels():
            for entry in entries:
                kernel(entry)

    return Kernel(name, key, compile_, run)


# --- reduced to nodes -----------------------------------------------------------------------------

def _sum(graph: OpGraph, operands: Operands) -> Kernel:
    lhs, rhs, dtype = operands.lhs, operands.rhs, operands.first.dtype
    if operands.op == "mul":
        return _weighted_sum(graph, operands)  # type: ignore[arg-type]
    widths = [math.prod(t.shape[1:]) for t in (lhs, rhs) if t is not None]

    def run() -> Tensor:
        parts = [] if lhs is None else [cuda_maps.aggregate(graph.view(), lhs)]
        parts += [] if rhs is None else [functions.edge_sum(graph, rhs, "v")]
        return operands.result(parts[0] if len(parts) == 1 else parts[0] + parts[1])

    def kernels() -> list:
        forms = [sums.variant(*sums.factored(w), dtype, dtype, "none", "place", False, False, False)
                 for w in widths]
        forms += [functions.sum_variant(w, dtype) for w in widths]
        return [(v.kernels, _SUM[:2]) for v in forms]

    return _made("fused sum", ("sum", *widths, dtype), kernels, run)


def _weighted(given: _Both) -> tuple[tuple[int, int], str]:
    """Heads and width of a row, and whether the weights are the edges' ("edge") or the heads'
    ("head")."""
    features, width = math.prod(given.shape), given.shape[-1]
    tail = given.rhs.shape[1:]
    if math.prod(tail) == 1:
        return sums.factored(features), "edge"
    if width <= MAX_WIDTH and tail[-1] == 1:
        return (features // width, width), "head"
    return (features, 1), "head"


def _operands(given: _Both, heads: int, width: int, weight: str) -> tuple[Tensor, Tensor]:
    """Rows [n, H, D] and weights [E] or [E, H] as the kernels take them, which autograd follows
    back."""
    x = given.lhs.expand(-1, *given.shape).reshape(-1, heads, width)
    if weight == "edge":
        return x, given.rhs.reshape(-1)
    tail = given.shape[:-1] if width > 1 or given.rhs.shape[-1] == 1 else given.shape
    e = given.rhs.squeeze(-1) if len(tail) < len(given.shape) else given.rhs
    return x, e.expand(-1, *tail).reshape(-1, heads)


def _weighted_sum(graph: OpGraph, given: _Both) -> Kernel:
    (heads, width), weight = _weighted(given)
    dtype = given.first.dtype

    def run() -> Tensor:
        x, w = _operands(given, heads, width, weight)
        out = cuda_maps.aggregate(graph.view(), x if weight == "head" else x.flatten(1), w)
        return given.result(out.view(-1, *given.shape))

    def kernels() -> list:
        return [(sums.variant(heads, width, dtype, dtype, weight, "place", False, False,
                              False).kernels, _SUM)]

    return _made("fused weighted sum", ("weighted sum", heads, width, weight, dtype), kernels, run)


def _extremum(graph: OpGraph, operands: Operands, largest: bool) -> Kernel | Reason:
    of_edges, dtype = operands.lhs is None, operands.first.dtype
    if operands.op in ("add", "mul"):
        (heads, width), weight = _weighted(operands)  # type: ignore[arg-type]
        form = functions.Extremum(operands.op, largest, False)
    else:
        heads, width = sums.factored(math.prod(operands.shape))
        weight, form = "none", functions.Extremum("copy", largest, of_edges)

    def run() -> Tensor:
        x, w = ((operands.first.reshape(-1, heads, width), None)
                if weight == "none"
                else _operands(operands, heads, width, weight))  # type: ignore[arg-type]
        return operands.result(functions.extremum(graph, form, x, w).view(-1, *operands.shape))

    return _made("fused max" if largest else "fused min",
                 ("extremum", heads, width, weight, dtype, form), lambda: [
        (form.variant(heads, width, dtype, weight).kernels, _EXTREMUM)], run)


# --- brought to edges -----------------------------------------------------------------------------

def _copy(graph: OpGraph, operands: Operands, targets: tuple[str, str]) -> Kernel | Reason:
    x, target = operands.first, targets[operands.lhs is None]
    if target == "e":
        return reason("GA208", "the result is the features of edges themselves")
    width = math.prod(operands.shape)
    return _made("gathered rows", ("copy", width, x.dtype),
                 lambda: [(functions.sum_variant(width, x.dtype).kernels, _SUM[:2])],
                 lambda: operands.result(functions.take(graph, x, target)))


def _elementwise(graph: OpGraph, given: _Both, targets: tuple[str, str]) -> Kernel:
    width, dtype = math.prod(given.shape), given.first.dtype

    def run() -> Tensor:
        lhs, rhs = (t.expand(-1, *given.shape).reshape(-1, width) for t in (given.lhs, given.rhs))
        return given.result(functions.elementwise(graph, given.op, lhs, rhs,
                                                  targets).view(-1, *given.shape))

    def kernels() -> list:
        index = graph.edge_index.dtype
        pairs = [(sddmm.kernels(op, width, dtype, i), ("elementwise",)) for op in {given.op, "mul"}
                 for i in {index, torch.int32}]
        return [*pairs, (functions.sum_variant(width, dtype).kernels, _SUM[:2])]

    return _made(f"fused {given.op} at edges",
                 ("sddmm", given.op, width, dtype, graph.edge_index.dtype), kernels, run)


def _dot(graph: OpGraph, given: _Both, targets: tuple[str, str]) -> Kernel | Reason:
    if set(targets) != {"u", "v"}:
        return reason("GA208", "dot products with features of edges")
    width, dtype = given.lhs.shape[-1], given.first.dtype
    if not width:
        return reason("GA206", "rows are empty")
    outer = math.prod(given.shape)
    parts, inner = sums.factored(width) if width > MAX_WIDTH else (1, width)

    def run() -> Tensor:
        sides = [t.expand(-1, *given.shape[:-1], width).reshape(-1, outer * parts, inner)
                 for t in (given.lhs, given.rhs)]
        left, right = sides if targets == ("v", "u") else sides[::-1]
        out = functions.dot(graph, left, right)
        out = out if parts == 1 else out.view(-1, outer, parts).sum(-1)
        return given.result(out.view(-1, *given.shape))

    return _made("fused dot product at edges", ("dot", outer * parts, inner, dtype), lambda: [
        (functions.dot_variant(outer * parts, inner, dtype).kernels, _SUM)], run)
