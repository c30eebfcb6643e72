"""Launchers for sums of gated messages that leave nothing at the edges, and their gradients
(``src/gated_sum.cu``)."""
from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import (Kernels, check_dense, layout_of, over_rows, pointer,
                                          row_kernels)
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
    width, out = operands.left.shape[-1], torch.empty_like(operands.right)
    end = np.int32(mean), out.data_ptr()
    over_rows(graph, layout_of(width), operands.kernels(graph.wide), "forward",
              (*operands.pointers, *end), (width,), "merge", end, arrays=1)
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
    width, end = grad.shape[-1], (right_grad.data_ptr(),)
    over_rows(graph, layout_of(width), operands.kernels(graph.wide), "by_row",
              (*operands.pointers, grad.data_ptr(), pointer(edge_grad), pointer(beside_grad), *end),
              (width,), "add_parts", end)
    return right_grad, edge_grad, beside_grad


def by_other(graph: Rows, operands: Operands, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of ``left`` and ``values``, both [rows, F].

    graph: that of `forward` by the other end, with the same places; given, grad: as in `by_row`.
    ValueError for a tensor that does not fit.
    """
    _check(graph, operands, grad, graph.rows, operands.right.shape[0])
    left_grad, values_grad = torch.empty_like(operands.left), torch.empty_like(operands.values)
    width, results = grad.shape[-1], (left_grad.data_ptr(), values_grad.data_ptr())
    over_rows(graph, layout_of(width), operands.kernels(graph.wide), "by_other",
              (*operands.pointers, grad.data_ptr(), *results), (2 * width,), "add_both", results)
    return left_grad, values_grad


def _check(graph: Rows, operands: Operands, grad: Tensor | None, sources: int,
           targets: int) -> None:
    edges = graph.other.shape[0]
    rows = dict(left=sources, right=targets, values=sources, edge=edges, beside=edges)
    named = {name: (t, rows[name]) for name, t in operands._asdict().items() if t is not None}
    gradient = {} if grad is None else dict(grad=(grad, targets))
    check_dense(graph, operands.left, **named, **gradient)
