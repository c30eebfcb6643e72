"""Launchers for sums of gated messages that leave nothing at the edges, and their gradients (``src/gated_sum.cu``)."""
from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.aggregate import factored
from gnnaccel.cuda.launch import THREADS, Kernels, check_dense, pointer, workspace
from gnnaccel.cuda.layout import TYPES, Layout, grid, layout_for
from gnnaccel.cuda.structure import Rows

ENTRIES = ("forward", "merge", "by_row", "add_one", "by_other", "add_both")


@functools.lru_cache(maxsize=256)
def kernels(width: int, dtype: torch.dtype, edge: bool, wide: bool) -> Kernels:
    """The kernels for rows of ``width`` numbers of ``dtype``, with features of edges if ``edge``, over a graph with int64 offsets
    if ``wide``. ValueError for what none covers."""
    if dtype not in TYPES:
        raise ValueError(f"dtype={dtype}: the gated kernels know {', '.join(map(str, TYPES))}")
    return Kernels("gated_sum", _layout(width).defines() + (
        ("ROW_T", TYPES[dtype]), ("OFF_T", "i64" if wide else "int"), ("DROPOUT", "0"), ("EDGE", str(int(edge)))))


def forward(graph: Rows, left: Tensor, right: Tensor, edge: Tensor | None, values: Tensor, mean: bool) -> Tensor:
    """[rows, F]: ``out[r]``, the sum of ``sigmoid(left[other[e]] + right[r] + edge[e]) * values[other[e]]`` over the edges e of
    row r, divided by their number if ``mean``; 0 without edges.

    graph: built with places, one for each edge. left, values: [nodes of the other side, F]; right: [rows, F]; edge: [edges, F] by
    place, or None; all contiguous, 16-byte aligned, of one dtype: fp32, fp16 or bf16. Sums are fp32, in a fixed order.
    ValueError for a tensor that does not fit.
    """
    width, device = left.shape[-1], left.device
    _check(graph, edge, left=(left, None), right=(right, graph.rows), values=(values, left.shape[0]))
    out, compiled = torch.empty_like(right), kernels(width, left.dtype, edge is not None, graph.wide)
    launch, layout = graph.launch(), _layout(width)
    memory, (part, _, _) = workspace(launch.chunks, (width, 0, 0), device)
    compiled("forward")(grid(launch.slots + graph.rows, layout), THREADS, 0, launch.graph + launch.split + (
        left.data_ptr(), right.data_ptr(), pointer(edge), values.data_ptr(), np.int32(mean), out.data_ptr(), part))
    if launch.heavy:
        compiled("merge")(grid(launch.heavy, layout), THREADS, 0, launch.merge + (
            graph.indptr.data_ptr(), part, np.int32(mean), out.data_ptr()))
    return out


def by_row(graph: Rows, left: Tensor, right: Tensor, edge: Tensor | None, values: Tensor, grad: Tensor,
           edges_too: bool) -> tuple[Tensor, Tensor | None]:
    """The gradients of ``right`` [rows, F] and, if ``edges_too``, of ``edge`` [edges, F].

    graph, left, right, edge, values: of `forward`. grad: [rows, F], that of the sums. ValueError for a tensor that does not fit.
    """
    width = left.shape[-1]
    _check(graph, edge, left=(left, None), right=(right, graph.rows), values=(values, left.shape[0]), grad=(grad, graph.rows))
    right_grad, edge_grad = torch.empty_like(right), torch.empty_like(edge) if edges_too else None
    launch, layout, compiled = graph.launch(), _layout(width), kernels(width, left.dtype, edge is not None, graph.wide)
    memory, (part, _, _) = workspace(launch.chunks, (width, 0, 0), left.device)
    compiled("by_row")(grid(launch.slots + graph.rows, layout), THREADS, 0, launch.graph + launch.split + (
        left.data_ptr(), right.data_ptr(), pointer(edge), values.data_ptr(), grad.data_ptr(), pointer(edge_grad),
        right_grad.data_ptr(), part))
    if launch.heavy:
        compiled("add_one")(grid(launch.heavy, layout), THREADS, 0, launch.merge + (part, right_grad.data_ptr()))
    return right_grad, edge_grad


def by_other(graph: Rows, left: Tensor, right: Tensor, edge: Tensor | None, values: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of ``left`` and ``values``, both [rows, F].

    graph: that of `forward` by the other end, with the same places; the rest as in `by_row`. ValueError for a tensor that does not
    fit.
    """
    width = left.shape[-1]
    _check(graph, edge, left=(left, graph.rows), right=(right, None), values=(values, graph.rows), grad=(grad, right.shape[0]))
    left_grad, values_grad = torch.empty_like(left), torch.empty_like(values)
    launch, layout, compiled = graph.launch(), _layout(width), kernels(width, left.dtype, edge is not None, graph.wide)
    memory, (part, _, _) = workspace(launch.chunks, (2 * width, 0, 0), left.device)
    results = (left_grad.data_ptr(), values_grad.data_ptr())
    compiled("by_other")(grid(launch.slots + graph.rows, layout), THREADS, 0, launch.graph + launch.split + (
        left.data_ptr(), right.data_ptr(), pointer(edge), values.data_ptr(), grad.data_ptr(), *results, part))
    if launch.heavy:
        compiled("add_both")(grid(launch.heavy, layout), THREADS, 0, launch.merge + (part, *results))
    return left_grad, values_grad


def _layout(width: int) -> Layout:
    return layout_for(*factored(width))


def _check(graph: Rows, edge: Tensor | None, left: tuple, **more: tuple) -> None:
    edges = {} if edge is None else dict(edge=(edge, graph.other.shape[0]))
    check_dense(graph, left[0], left=left, **more, **edges)
