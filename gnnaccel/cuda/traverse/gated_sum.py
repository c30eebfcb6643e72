"""Launchers for sums of gated messages that leave nothing at the edges, and their gradients
(``src/gated_sum.cu``)."""
from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import (THREADS, Kernels, check_dense, grid, layout_of, pointer,
                                          row_kernels, workspace)
from gnnaccel.cuda.structures.structure import Rows

ENTRIES = ("forward", "merge", "by_row", "add_parts", "by_other", "add_both")


@functools.lru_cache(maxsize=256)
def kernels(width: int, dtype: torch.dtype, edge: int, wide: bool) -> Kernels:
    """The kernels for rows of ``width`` numbers of ``dtype``, with ``edge`` (0 to 2) features of
    edges, over a graph with int64 offsets if ``wide``. ValueError for a form that none covers."""
    return row_kernels("gated_sum", layout_of(width), dtype, wide, EDGE=edge)


class Operands(NamedTuple):
    """``left``, ``values``: [nodes of the other side, F]; ``right``: [rows, F]; ``edge``: [edges,
    F] by place, or None; ``beside``: likewise, and only next to ``edge``. All contiguous, 16-byte
    aligned, of one dtype: fp32, fp16 or bf16."""

    left: Tensor
    right: Tensor
    values: Tensor
    edge: Tensor | None = None
    beside: Tensor | None = None

    def kernels(self, wide: bool) -> Kernels:
        return kernels(self.left.shape[-1], self.left.dtype,
                       (self.edge is not None) + (self.beside is not None), wide)

    @property
    def pointers(self) -> tuple[int, ...]:
        return (self.left.data_ptr(), self.right.data_ptr(), pointer(self.edge),
                self.values.data_ptr(), pointer(self.beside))


def forward(graph: Rows, operands: Operands, mean: bool) -> Tensor:
    """[rows, F]: ``out[r]``, the sum of ``sigmoid(left[other[e]] + right[r] + edge[e]) *
    (values[other[e]] + beside[e])`` over the edges e of row r, divided by their number if ``mean``;
    0 without edges.

    graph: built with places, one for each edge. Sums are fp32, in a fixed order. ValueError for a
    tensor that does not fit.
    """
    _check(graph, operands, None, operands.left.shape[0], graph.rows)
    width, out, compiled = (operands.left.shape[-1], torch.empty_like(operands.right),
                            operands.kernels(graph.wide))
    launch, layout = graph.launch(), layout_of(width)
    memory, (part, _, _) = workspace(launch.chunks, (width, 0, 0), out.device)
    compiled("forward")(grid(launch.slots + graph.rows, layout), THREADS, 0,
                        launch.graph + launch.split + (
        *operands.pointers, np.int32(mean), out.data_ptr(), part))
    if launch.heavy:
        compiled("merge")(grid(launch.heavy, layout), THREADS, 0, launch.merge + (
            graph.indptr.data_ptr(), part, np.int32(mean), out.data_ptr()))
    return out


def by_row(graph: Rows, operands: Operands, grad: Tensor, edge: bool,
           beside: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of ``right`` [rows, F] and, if asked for, of ``edge`` and ``beside``, [edges,
    F].

    graph, given: of `forward`. grad: [rows, F], that of the sums. ValueError for a tensor that does
    not fit.
    """
    _check(graph, operands, grad, operands.left.shape[0], graph.rows)
    right_grad = torch.empty_like(operands.right)
    edge_grad, beside_grad = (None if t is None or not needed else torch.empty_like(t)
                              for t, needed in ((operands.edge, edge), (operands.beside, beside)))
    width, compiled = grad.shape[-1], operands.kernels(graph.wide)
    launch, layout = graph.launch(), layout_of(width)
    memory, (part, _, _) = workspace(launch.chunks, (width, 0, 0), grad.device)
    compiled("by_row")(grid(launch.slots + graph.rows, layout), THREADS, 0,
                       launch.graph + launch.split + (
        *operands.pointers, grad.data_ptr(), pointer(edge_grad), pointer(beside_grad),
        right_grad.data_ptr(), part))
    if launch.heavy:
        compiled("add_parts")(grid(launch.heavy, layout), THREADS, 0,
                              launch.merge + (part, right_grad.data_ptr()))
    return right_grad, edge_grad, beside_grad


def by_other(graph: Rows, operands: Operands, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of ``left`` and ``values``, both [rows, F].

    graph: that of `forward` by the other end, with the same places; given, grad: as in `by_row`.
    ValueError for a tensor that does not fit.
    """
    _check(graph, operands, grad, graph.rows, operands.right.shape[0])
    left_grad, values_grad = torch.empty_like(operands.left), torch.empty_like(operands.values)
    width, compiled = grad.shape[-1], operands.kernels(graph.wide)
    launch, layout = graph.launch(), layout_of(width)
    memory, (part, _, _) = workspace(launch.chunks, (2 * width, 0, 0), grad.device)
    results = (left_grad.data_ptr(), values_grad.data_ptr())
    compiled("by_other")(grid(launch.slots + graph.rows, layout), THREADS, 0,
                         launch.graph + launch.split + (
        *operands.pointers, grad.data_ptr(), *results, part))
    if launch.heavy:
        compiled("add_both")(grid(launch.heavy, layout), THREADS, 0,
                             launch.merge + (part, *results))
    return left_grad, values_grad


def _check(graph: Rows, operands: Operands, grad: Tensor | None, sources: int,
           targets: int) -> None:
    edges = graph.other.shape[0]
    rows = dict(left=sources, right=targets, values=sources, edge=edges, beside=edges)
    named = {name: (t, rows[name]) for name, t in operands._asdict().items() if t is not None}
    gradient = {} if grad is None else dict(grad=(grad, targets))
    check_dense(graph, operands.left, **named, **gradient)
