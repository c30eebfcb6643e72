"""Maps by relation and sums over edges by the CUDA kernels, with their backward; `torch_maps` says
what they compute.

Where backward is itself recorded it runs on torch operations, so that second derivatives are right.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import TYPES, dense
from gnnaccel.cuda.segment import segment_backward, segment_gemm
from gnnaccel.cuda.segment.segment_gemm_grad import weight_grad
from gnnaccel.cuda.traverse import aggregate as sums
from gnnaccel.cuda.traverse.aggregate import total
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.relational import torch_maps
from gnnaccel.dispatch.relational.gather import Gather
from gnnaccel.dispatch.relational.pairs import Pairs
from gnnaccel.dispatch.run import autograd
from gnnaccel.dispatch.run.autograd import Operation, stand_in, wants_grad
from gnnaccel.dispatch.run.skinny_matmul import precision


def multiply(pairs: Pairs, rows: Tensor, weight: Tensor, transposed: bool = False,
             gather: Gather | None = None) -> Tensor:
    """`torch_maps.multiply`; rows that ``gather`` reads are never copied."""
    if wants_grad(rows, weight):
        return _Multiply(pairs, transposed, gather).apply(rows, weight)
    return _multiply(pairs, rows, weight, transposed, gather)


def aggregate(graph: GraphView, rows: Tensor, weight: Tensor | None = None) -> Tensor:
    """`torch_maps.aggregate`."""
    if wants_grad(rows, weight):
        return _Aggregate(graph).apply(rows, weight)
    by, placed, at = graph.weighted(weight)
    return total(by, rows, placed, at)


def take(rows: Tensor, gather: Gather) -> Tensor:
    """`torch_maps.take`, whose gradient is summed in a fixed order."""
    if rows.requires_grad and torch.is_grad_enabled() and rows.dtype in TYPES:
        return torch_maps.Take(gather, aggregate).apply(rows)
    return rows.index_select(0, gather.index)


# --- maps by relation -----------------------------------------------------------------------------

def product(segments: segment_gemm.Segments, rows: Tensor, weight: Tensor, transposed: bool,
            index: Tensor | None, bias: Tensor | None = None, **more: Any) -> Tensor:
    """[rows of ``segments``, blocks * N]: rows [any, blocks * K], those of ``index`` if there is
    one, times their segment's matrix [K, N] or [blocks, K, N], plus its bias. ``more``: as of
    `segment_gemm.multiply`."""
    if not rows.is_contiguous() or rows.data_ptr() % 16:
        rows = dense(rows)
    if weight.stride(-1) != 1 or weight.stride(-2) != weight.shape[-1]:
        weight = matrices(weight)
    return segment_gemm.multiply(  # type: ignore[return-value]  # two only with dots
        segments, rows, weight, index=index, transposed=transposed,
        precision=precision(), blocks=weight.shape[1] if weight.ndim == 4 else 1,
        bias=None if bias is None else bias.contiguous(), **more)


def gradients(segments: segment_gemm.Segments, rows: Tensor, grad: Tensor, weight: Tensor,
              transposed: bool, index: Tensor | None, where: Tensor | None = None,
              sums: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of `product`: of the segments' rows, of the matrices (fp32, of ``weight``'s shape),
    and with ``sums`` of the biases (fp32). where: which rows of ``grad`` are the segments', as
    ``index`` says it of ``rows``."""
    d_rows, d_weight, d_bias = segment_backward.gradients(
        segments, dense(rows), dense(grad), matrices(weight), index=index, dy_index=where,
        transposed=transposed,
        blocks=_blocks(weight), sums=sums, precision=precision())
    return d_rows, d_weight.view(weight.shape), d_bias


def backward(segments: segment_gemm.Segments, rows: Tensor, grad: Tensor, weight: Tensor,
             transposed: bool, index: Tensor | None, where: Tensor | None, by_rows: bool,
             by_weight: bool) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `product`: of the segments' rows and of the matrices, where they are asked for;
    ``where`` as in `gradients`."""
    if by_rows and by_weight:
        return gradients(segments, rows, grad, weight, transposed, index, where)[:2]
    if by_rows:
        return product(segments, grad, weight, not transposed, where), None
    if not by_weight:
        return None, None
    x, dy = dense(rows), dense(grad)
    ends = (dy, x, where, index) if transposed else (x, dy, index, where)
    return None, weight_grad(segments, ends[0], ends[1], index=ends[2], dy_index=ends[3],
                             blocks=_blocks(weight), precision=precision()).view(weight.shape)


def matrices(weight: Tensor) -> Tensor:
    """``weight`` with its last two dimensions contiguous."""
    return (weight if weight.stride(-1) == 1
            and weight.stride(-2) == weight.shape[-1] else weight.contiguous())


def _blocks(weight: Tensor) -> int:
    return weight.shape[1] if weight.dim() == 4 else 1


def _multiply(pairs: Pairs, rows: Tensor, weight: Tensor, transposed: bool,
              gather: Gather | None) -> Tensor:
    out = product(pairs.segments, rows.flatten(1), weight, transposed,
                  None if gather is None else gather.index)
    return out.unflatten(1, (weight.shape[1], -1))


# Results of forward are detached: autograd lets nobody change a Function's result in place that is
# a view.

class _Multiply(Operation):
    __slots__ = ("gather", "pairs", "transposed")
    keeps_inputs = True

    def __init__(self, pairs: Pairs, transposed: bool, gather: Gather | None):
        self.pairs, self.transposed, self.gather = pairs, transposed, gather

    def forward(self, needs, rows, weight):
        out = _multiply(self.pairs, rows, weight, self.transposed, self.gather)
        return out.detach(), (rows, weight)

    def backward(self, needs, saved, grad):
        (rows, weight), gather = saved, self.gather
        index = None if gather is None else gather.index
        d_rows, d_weight = backward(self.pairs.segments, rows.flatten(1), grad.flatten(1), weight,
                                    self.transposed, index, None, *needs)
        if needs[0]:
            d_rows = d_rows.unflatten(1, (weight.shape[1], -1))
            d_rows = d_rows if gather is None else total(gather.members.csc(places=False), d_rows)
        return d_rows, None if d_weight is None else d_weight.to(weight.dtype)

    def reference(self, rows, weight):
        return torch_maps.multiply(self.pairs, rows, weight, self.transposed, self.gather)


# --- sums over edges ------------------------------------------------------------------------------

def _kind(weight: Tensor) -> str:
    return "edge" if weight.dim() == 1 else "head"


def _sizes(rows: Tensor, weight: Tensor) -> tuple[int, int]:
    """Heads and width as which the kernels see a row."""
    if weight.dim() == 2:
        return rows.shape[1], rows.shape[2]
    return sums.factored(rows[0].numel() if rows.shape[0] else rows.flatten(1).shape[1])


def _variant(rows: Tensor, weight: Tensor, wide: bool) -> sums.Variant:
    heads, width = _sizes(rows, weight)
    return sums.variant(heads, width, rows.dtype, rows.dtype, _kind(weight), "place", False, False,
                        wide)


class _Aggregate(Operation):
    __slots__ = ("graph",)

    def __init__(self, graph: GraphView):
        self.graph = graph

    def forward(self, needs, rows, weight):
        by, placed, at = self.graph.weighted(weight)
        return total(by, rows, placed, at).detach(), (rows if needs[1] else None, weight)

    def backward(self, needs, saved, grad):
        (rows, weight), graph = saved, self.graph
        d_rows = d_weight = None
        if needs[0]:
            by, placed, at = graph.weighted(weight, by_src=True)
            d_rows = total(by, grad, placed, at)
        if needs[1]:
            variant = _variant(rows, weight, graph.wide)
            grads, values = (dense(t).view(-1, variant.heads, variant.width) for t in (grad, rows))
            d_weight = sums.edge_dot(variant, graph.csc(), grads, values)
            d_weight = (d_weight.sum(1) if weight.dim() == 1 else d_weight)[:weight.shape[0]]
            d_weight = d_weight.to(weight.dtype)
        return d_rows, d_weight

    def recorded(self, needs, saved, grad):
        rows, weight = saved
        rows = stand_in(grad, self.graph.num_src) if rows is None else rows
        return autograd.gradients(self.reference, (rows, weight), needs, (grad,))

    def reference(self, rows, weight):
        return torch_maps.aggregate(self.graph, rows, weight)
