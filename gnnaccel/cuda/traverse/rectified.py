"""Launchers for sums of rectified messages over a graph's edges, and their gradients
(``src/rectified.cu``)."""
from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import (NOTHING, THREADS, Kernels, check_dense, grid, layout_of,
                                          row_kernels, workspace)
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
    launch, layout, compiled = graph.launch(), layout_of(width), kernels(width, x.dtype, graph.wide)
    memory, (part, _, _) = (workspace(launch.chunks, (width, 0, 0), x.device) if launch.chunks
                            else NOTHING)
    scalars = np.float32(constant), np.int32(mean)
    compiled("forward")(grid(launch.slots + graph.rows, layout), THREADS, 0,
                        launch.graph + launch.split + (
        x.data_ptr(), edge.data_ptr(), *scalars, out.data_ptr(), part))
    if launch.heavy:
        compiled("merge")(grid(launch.heavy, layout), THREADS, 0, launch.merge + (
            graph.indptr.data_ptr(), part, *scalars, out.data_ptr()))
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
    launch, layout, compiled = graph.launch(), layout_of(width), kernels(width, x.dtype, graph.wide)
    memory, (part, _, _) = (workspace(launch.chunks, (width, 0, 0), x.device) if launch.chunks
                            else NOTHING)
    compiled("backward")(grid(launch.slots + graph.rows, layout), THREADS, 0,
                         launch.graph + launch.split + (
        x.data_ptr(), edge.data_ptr(), grad.data_ptr(),
        0 if edge_grad is None else edge_grad.data_ptr(), x_grad.data_ptr(), part))
    if launch.heavy:
        compiled("add_parts")(grid(launch.heavy, layout), THREADS, 0,
                              launch.merge + (part, x_grad.data_ptr()))
    return x_grad, edge_grad
