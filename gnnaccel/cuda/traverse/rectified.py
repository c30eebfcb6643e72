"""Launchers for sums of rectified messages over a graph's edges, and their gradients
(``src/rectified.cu``)."""
from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import Kernels, check_dense, layout_of, over_rows, row_kernels
from gnnaccel.cuda.structures.structure import Rows

ENTRIES = ("forward", "merge", "backward", "add_parts")


@functools.lru_cache(maxsize=256)
def kernels(width: int, dtype: torch.dtype, wide: bool) -> Kernels:
    """The kernels for rows of ``width`` numbers of ``dtype``, over a graph with int64 offsets if
    ``wide``. ValueError for a form that none covers."""
    return row_kernels("rectified", layout_of(width), dtype, wide)


def forward(graph: Rows, x: Tensor, edge: Tensor, constant: float, mean: bool) -> Tensor:
    """[rows, F]: ``out[r]``, the sum of ``relu(x[other[e]] + edge[e]) + constant`` over the edges e
    of row r, divided by their number if ``mean``; 0 without edges.

    graph: built with places, one for each edge. x: [nodes of the other side, F]; edge: [edges, F]
    by place; both contiguous, 16-byte aligned, of one dtype: fp32, fp16 or bf16. Sums are fp32, in
    a fixed order. ValueError for a tensor that does not fit.
    """
    width, edges = x.shape[-1], graph.other.shape[0]
    check_dense(graph, x, x=(x, None), edge=(edge, edges))
    out = torch.empty((graph.rows, width), dtype=x.dtype, device=x.device)
    end = np.float32(constant), np.int32(mean), out.data_ptr()
    over_rows(graph, layout_of(width), kernels(width, x.dtype, graph.wide), "forward",
              (x.data_ptr(), edge.data_ptr(), *end), (width,), "merge", end, arrays=1)
    return out


def backward(graph: Rows, x: Tensor, edge: Tensor, grad: Tensor,
             edges_too: bool) -> tuple[Tensor, Tensor | None]:
    """The gradients of ``x`` [rows, F] and, if ``edges_too``, of ``edge`` [edges, F].

    graph: that of `forward` by the other end, with the same places; x, edge: of it; grad: [nodes of
    the other side, F], that of the sums. ValueError for a tensor that does not fit.
    """
    width, edges = x.shape[-1], graph.other.shape[0]
    check_dense(graph, x, x=(x, graph.rows), edge=(edge, edges), grad=(grad, None))
    x_grad, edge_grad = torch.empty_like(x), torch.empty_like(edge) if edges_too else None
    end = x_grad.data_ptr(),
    over_rows(graph, layout_of(width), kernels(width, x.dtype, graph.wide), "backward",
              (x.data_ptr(), edge.data_ptr(), grad.data_ptr(),
               0 if edge_grad is None else edge_grad.data_ptr(), *end), (width,), "add_parts", end)
    return x_grad, edge_grad
