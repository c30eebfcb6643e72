"""Launchers for softmax aggregation by channel over a graph's edges, and its gradients
(``src/softmax_sum.cu``)."""
from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import Kernels, layout_of, no_places, over_rows, row_kernels
from gnnaccel.cuda.structures.structure import Rows
from gnnaccel.cuda.traverse.multi_reduce import check

ENTRIES = ("forward", "merge", "backward", "add")


@functools.lru_cache(maxsize=256)
def kernels(width: int, dtype: torch.dtype, edge: bool, wide: bool) -> Kernels:
    """The kernels for rows of ``width`` numbers of ``dtype``, with features of edges if ``edge``,
    over a graph with int64 offsets if ``wide``. ValueError for a form that none covers."""
    return row_kernels("softmax_sum", layout_of(width), dtype, wide, EDGE=edge)


class Messages(NamedTuple):
    """Inputs of messages m(e) and scores ``t * m(e)``.

    ``x``: [nodes that send, F]; m is its row, or ``relu(x[j] + edge[e]) + constant`` where there is
    an ``edge``, [edges, F] by place. Both contiguous, aligned, of one dtype: fp32, fp16 or bf16.
    ``t``: fp32 [1] or [F], contiguous, or a number.
    """

    x: Tensor
    edge: Tensor | None
    constant: float
    t: Tensor | float

    @property
    def parameters(self) -> tuple:
        """Kernel arguments, t last."""
        first = (self.x.data_ptr(), 0 if self.edge is None else self.edge.data_ptr(),
                 np.float32(self.constant))
        if isinstance(self.t, Tensor):
            return (*first, self.t.data_ptr(), np.int32(self.t.shape[0] > 1), np.float32(1.0))
        return (*first, 0, np.int32(0), np.float32(self.t))

    def kernels(self, wide: bool) -> Kernels:
        return kernels(self.x.shape[-1], self.x.dtype, self.edge is not None, wide)


class Kept(NamedTuple):
    """Tensors for `backward`: fp32 [rows, F]. ``center``: the sums before they are rounded to their
    dtype; ``total``: sums of ``exp(t * (m - center))``, 1 without edges."""

    center: Tensor
    total: Tensor


def forward(graph: Rows, given: Messages, train: bool) -> tuple[Tensor, Kept | None]:
    """[rows, F]: ``out[r]``, the sum of ``a(e) * m(e)`` over row r's edges e, ``a`` the softmax of
    ``t * m`` over them, channel by channel (Li et al., arXiv 2006.07739; PyG's SoftmaxAggregation);
    0 without edges. With ``train``, the tensors for `backward`.

    graph: by the nodes that receive, built with places, one for each edge, where there are features
    of edges. Sums are fp32, in a fixed order. ValueError for a tensor that does not fit.
    """
    _check(graph, given, None)
    width, device = given.x.shape[-1], given.x.device
    out = torch.empty((graph.rows, width), dtype=given.x.dtype, device=device)
    saved = (Kept(torch.empty((graph.rows, width), dtype=torch.float32, device=device),
                  torch.empty((graph.rows, width), dtype=torch.float32, device=device))
             if train else None)
    results = (out.data_ptr(), 0, 0) if saved is None else (
        out.data_ptr(), saved.center.data_ptr(), saved.total.data_ptr())
    parameters = given.parameters
    over_rows(graph, layout_of(width), given.kernels(graph.wide), "forward", parameters + results,
              (width, width, 2 * width), "merge", results, parameters[3:])
    return out, saved


def backward(graph: Rows, given: Messages, center: Tensor, share: Tensor, whole: bool, edge: bool,
             t: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of ``x`` [rows, F] and, if asked for, of ``edge`` [edges, F]; and of ``t``,
    fp32 [rows, F], each row's part of the gradient of its channel's.

    graph: that of `forward` by the other end, with the same places; given: of it. center: of
    `Kept`; share: fp32 [nodes that receive, F], the gradient of the sums over `Kept.total`. whole:
    gradients go through the softmax too, which for t they must. ValueError for a tensor that does
    not fit.
    """
    _check(graph, given, graph.rows, center=center, share=share)
    width, device = given.x.shape[-1], given.x.device
    x_grad, edge_grad = torch.empty_like(given.x), None
    if edge and given.edge is not None:
        edge_grad = torch.empty_like(given.edge)
    t_grad = torch.empty((graph.rows, width), dtype=torch.float32, device=device) if t else None
    results = x_grad.data_ptr(), 0 if t_grad is None else t_grad.data_ptr()
    over_rows(graph, layout_of(width), given.kernels(graph.wide), "backward", (
        *given.parameters, center.data_ptr(), share.data_ptr(), np.int32(whole),
        0 if edge_grad is None else edge_grad.data_ptr(), *results),
        (width, width if t else 0), "add", results)
    return x_grad, edge_grad, t_grad


def _check(graph: Rows, given: Messages, sources: int | None, **sums: Tensor) -> None:
    (x, edge, _, t), device, edges = given, graph.indptr.device, graph.other.shape[0]
    width = x.shape[-1]
    vec = layout_of(width).vec
    check("x", x, (sources, width), x.dtype, device, vec)
    for name, rows in sums.items():
        check(name, rows, (None, width), torch.float32, device, vec)
    if isinstance(t, Tensor):
        check("t", t, (1 if t.numel() == 1 else width,), torch.float32, device, 1)
    if edge is None:
        return
    check("edge", edge, (edges, width), x.dtype, device, vec)
    if graph.place.shape[0] != edges:
        raise no_places(graph)
