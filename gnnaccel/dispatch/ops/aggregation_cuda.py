"""Weighted neighbours summed by CUDA kernels, with their backward; `aggregation` says what is computed.

A backward that is itself recorded runs on torch operations.
"""
from __future__ import annotations

import math

import torch
from torch import Tensor

from gnnaccel.cuda import aggregate as sums
from gnnaccel.cuda.layout import MAX_WIDTH, TYPES
from gnnaccel.dispatch.ops import aggregation
from gnnaccel.dispatch.ops.aggregation import Aggregation
from gnnaccel.dispatch.ops.call import Kernel
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.reasons import Reason, reason
from gnnaccel.dispatch.relational.cuda_maps import by_torch, dense

#: whether max and min go to the kernels of `multi_reduce`, which divide gradients evenly among equals; otherwise they stay native
EVEN_SHARES = False
_MAX_EDGES = 2**31


def kernel(graph: OpGraph, given: Aggregation) -> Kernel | Reason:
    """The way of `aggregation.plain` by kernels, or why there is none."""
    if given.reduce in ("max", "min") and not EVEN_SHARES:
        return reason("GA208", f"no kernel divides the gradient of {given.reduce} evenly among equals")
    if given.x.dtype not in TYPES:
        return reason("GA203", f"{given.x.dtype} features; the kernels take {', '.join(map(str, TYPES))}")
    if not all(given.shape) or graph.num_edges >= _MAX_EDGES:
        return reason("GA206", "rows are empty" if not all(given.shape) else f"{graph.num_edges} edges; int32 counts them")
    if not graph.num_edges:
        return reason("GA303")
    if given.reduce in ("max", "min"):
        found = _multi(graph, given)
        return found._replace(run=lambda: run(graph, given)) if type(found) is Kernel else found
    heads, width, weight = _layout(given)
    mean, dtype = given.reduce == "mean", given.x.dtype

    def compile_() -> None:
        for averaged in {mean, False}:  # backward never averages
            kernels = _variant(heads, width, dtype, weight, averaged).kernels
            for entry in ("forward", "merge") if weight == "none" else ("forward", "merge", "edge_dot"):
                kernels(entry)

    return Kernel(f"aggregate: {given.reduce}", ("aggregation", heads, width, weight, dtype, mean), compile_,
                  lambda: run(graph, given))


def run(graph: OpGraph, given: Aggregation) -> Tensor:
    """`aggregation.plain` by kernels."""
    if given.reduce in ("max", "min"):
        return _multi(graph, given).run().view(-1, *given.shape)
    return _Aggregate.apply(graph, given.reduce == "mean", *_operands(given)).view(-1, *given.shape)


def _operands(given: Aggregation) -> tuple[Tensor, Tensor | None]:
    """Rows [num_src, H, D] and weights [E] or [E, H], which autograd follows back."""
    heads, width, weight = _layout(given)
    x, w = given.x, given.weight
    if x.shape[1:] != given.shape:
        x = x.expand(-1, *given.shape)
    if w is not None:
        w = w.reshape(-1) if weight == "edge" else w.expand(-1, *given.shape[:-1], 1 if width > 1 else -1).reshape(-1, heads)
    return x.reshape(-1, heads, width), w


def _multi(graph: OpGraph, given: Aggregation) -> Kernel | Reason:
    from gnnaccel.dispatch.ops import multi_reduce

    rows, weight = _operands(given)
    return multi_reduce.multi_reduce(graph, rows, (given.reduce,), weight).kernel


def _layout(given: Aggregation) -> tuple[int, int, str]:
    """Heads and width of a row as the kernels see it, and what they call the weights."""
    kind, features, last = given.kind, math.prod(given.shape), given.shape[-1]
    if kind in ("none", "edge"):
        return *sums.factored(features), kind
    return (features // last, last, "head") if kind == "head" and last <= MAX_WIDTH else (features, 1, "head")


def _variant(heads: int, width: int, dtype: torch.dtype, weight: str, mean: bool) -> sums.Variant:
    return sums.variant(heads, width, dtype, dtype, weight, "place", False, mean, False)


class _Aggregate(torch.autograd.Function):
    """[num_dst, H, D] of x [num_src, H, D] and weights [E], [E, H] or None."""

    @staticmethod
    def forward(ctx, graph, mean, x, weight):
        ctx.graph, ctx.mean, ctx.kind, ctx.shape = graph, mean, _kind(weight), x.shape
        ctx.save_for_backward(x if ctx.needs_input_grad[3] else None, weight)
        variant = _variant(x.shape[1], x.shape[2], x.dtype, ctx.kind, mean)
        return sums.forward(variant, graph.view().csc(places=weight is not None), dense(x), _fp32(weight))

    @staticmethod
    def backward(ctx, grad):
        (x, weight), graph, needs = ctx.saved_tensors, ctx.graph, ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            if x is None:  # linear in x, so its value is nothing to the gradient
                x = grad.new_zeros(ctx.shape).requires_grad_()
            return None, None, *by_torch(lambda x, w: _by_torch(graph, ctx.mean, x, w), (x, weight), needs, grad)
        view = graph.view()
        if ctx.mean:
            grad = (grad * view.inverse_degree().view(-1, 1, 1)).to(grad.dtype)
        grad = dense(grad)
        variant = _variant(grad.shape[1], grad.shape[2], grad.dtype, ctx.kind, False)
        d_x = d_weight = None
        if needs[0]:
            d_x = sums.forward(variant, view.csr(places=False) if weight is None else view.csr_by_id(), grad, _fp32(weight))
        if needs[1]:
            d_weight = sums.edge_dot(variant, view.csc(), grad, dense(x))
            d_weight = (d_weight.sum(1) if weight.dim() == 1 else d_weight)[:weight.shape[0]].to(weight.dtype)
        return None, None, d_x, d_weight


def _kind(weight: Tensor | None) -> str:
    return "none" if weight is None else "edge" if weight.dim() == 1 else "head"


def _fp32(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.float().contiguous()


def _by_torch(graph: OpGraph, mean: bool, x: Tensor, weight: Tensor | None) -> Tensor:
    weight = None if weight is None else weight.view(weight.shape[0], -1, 1)
    return aggregation.plain(graph, Aggregation("mean" if mean else "sum", x, weight, tuple(x.shape[1:])))
