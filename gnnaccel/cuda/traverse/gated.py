"""Launchers for gated sums over a graph's edges, and their gradients (``src/gated.cu``)."""
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
def kernels(width: int, dtype: torch.dtype, wide: bool) -> Kernels:
    """The kernels for rows of ``width`` numbers of ``dtype``, over a graph with int64 offsets if
    ``wide``. ValueError for a form that none covers."""
    return row_kernels("gated", layout_of(width), dtype, wide)


class Gated(NamedTuple):
    """``score`` [edges, F] by place; ``out`` [rows, F]; ``total`` fp32 [rows, F], the divisors of
    the sums."""

    score: Tensor
    out: Tensor
    total: Tensor


def forward(graph: Rows, left: Tensor, right: Tensor, edge: Tensor, values: Tensor,
            epsilon: float) -> Gated:
    """``score[e] = left[other[e]] + right[r] + edge[e]``, and ``out[r]``, the sum of
    ``sigmoid(score[e]) * values[other[e]]`` over the edges e of row r, divided by that of the gates
    plus ``epsilon``.

    graph: built with places, one for each edge. left, values: [nodes of the other side, F]; right:
    [rows, F]; edge: [edges, F] by place; all contiguous, 16-byte aligned, of one dtype: fp32, fp16
    or bf16. Sums are fp32, in a fixed order. ValueError for a tensor that does not fit.
    """
    edges, width, device = graph.other.shape[0], left.shape[-1], graph.indptr.device
    check_dense(graph, left, left=(left, None), right=(right, graph.rows), edge=(edge, edges),
                values=(values, left.shape[0]))
    result = Gated(torch.empty_like(edge), torch.empty_like(right),
                   torch.empty((graph.rows, width), dtype=torch.float32, device=device))
    number, results = np.float32(epsilon), (result.out.data_ptr(), result.total.data_ptr())
    over_rows(graph, layout_of(width), kernels(width, left.dtype, graph.wide), "forward",
              (left.data_ptr(), right.data_ptr(), edge.data_ptr(), values.data_ptr(), number,
               result.score.data_ptr(), *results), (2 * width,), "merge", (number, *results))
    return result


def by_row(graph: Rows, found: Gated, values: Tensor, ratio: Tensor,
           score_grad: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of ``edge`` [edges, F] and of ``right`` [rows, F].

    graph, found, values: of `forward`. ratio: fp32 [rows, F], the gradient of its ``out`` over its
    ``total``; score_grad: [edges, F], that of its ``score``, if it has any. ValueError for a tensor
    that does not fit.
    """
    width, edges = values.shape[-1], graph.other.shape[0]
    extra = {} if score_grad is None else dict(score_grad=(score_grad, edges))
    check_dense(graph, values, values=(values, None), score=(found.score, edges),
                out=(found.out, graph.rows), **extra)
    check_dense(graph, ratio, ratio=(ratio, graph.rows))
    edge_grad, right_grad = torch.empty_like(found.score), torch.empty_like(found.out)
    end = right_grad.data_ptr(),
    over_rows(graph, layout_of(width), kernels(width, values.dtype, graph.wide), "by_row",
              (found.score.data_ptr(), values.data_ptr(), found.out.data_ptr(), ratio.data_ptr(),
               pointer(score_grad), edge_grad.data_ptr(), *end), (width,), "add_parts", end)
    return edge_grad, right_grad


def by_other(graph: Rows, score: Tensor, edge_grad: Tensor, ratio: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of ``left`` and ``values``, both [rows, F].

    graph: that of `forward` by the other end, with the same places; score: of it; edge_grad, ratio:
    of and as in `by_row`. ValueError for a tensor that does not fit.
    """
    width, edges, device = score.shape[-1], graph.other.shape[0], graph.indptr.device
    check_dense(graph, score, score=(score, edges), edge_grad=(edge_grad, edges))
    check_dense(graph, ratio, ratio=(ratio, None))
    left_grad, values_grad = (torch.empty((graph.rows, width), dtype=score.dtype, device=device)
                              for _ in range(2))
    results = (left_grad.data_ptr(), values_grad.data_ptr())
    over_rows(graph, layout_of(width), kernels(width, score.dtype, graph.wide), "by_other",
              (score.data_ptr(), edge_grad.data_ptr(), ratio.data_ptr(), *results), (2 * width,),
              "add_both", results)
    return left_grad, values_grad
