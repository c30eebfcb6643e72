"""The one operation of plain layers: the sum or maximum of a node's neighbours. Scales and bias,
which such layers apply before and after, are part of it, so that kernels do that on the way.

``out[i] = scale_dst[i] * sum over the edges e = (j, i) of weight[e] * scale_src[j] * x[j] + bias``,
or the largest of x[j].
"""
from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import dense
from gnnaccel.cuda.traverse import aggregate as sums
from gnnaccel.cuda.traverse.extremum import Variant as Extremum
from gnnaccel.dispatch.ops import cuda_functions, torch_ops
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.plan import cost
from gnnaccel.dispatch.run.autograd import Operation, gradients, stand_in, wants_grad

#: names of the operands; all but the first may be missing, and "max" takes no other but the weight
OPERANDS = ("x", "weight", "scale_src", "scale_dst", "bias")
seconds = cost.plain  # as of a `Candidate`, by us or natively
#: the formulas over the edges e = (j, i), for reading; terms in brackets where the layer has them
FORMULAS = {"sum": "out[i] = [scale_dst[i] *] sum of [weight[e] *] [scale_src[j] *] x[j] [+ bias]",
            "max": "out[i] = largest of [weight[e] *] x[j]"}


def by_operations(graph: OpGraph, reduce: str, x: Tensor, weight: Tensor | None = None,
                  scale_src: Tensor | None = None, scale_dst: Tensor | None = None,
                  bias: Tensor | None = None) -> Tensor:
    """[num_dst, F] of x's dtype, on torch operations, differentiable any number of times.

    x: [num_src, F]; weight: [E]; scale_src [num_src] and scale_dst [num_dst]: constants; bias: [F].
    Of "max", a node without edges and every infinity is 0, and the first among equals gets the
    gradient, as in DGL.
    """
    rows = x if scale_src is None else x * scale_src.to(x.dtype).unsqueeze(1)
    message = torch_ops.take(graph, rows, "u")
    if weight is not None:
        message = message * weight.to(x.dtype).unsqueeze(1)
    out = torch_ops.reduced(message, graph.index("v"), graph.num_dst, reduce)
    if reduce == "max":
        return out.masked_fill(out.isinf(), 0.0)
    out = out if scale_dst is None else out * scale_dst.to(x.dtype).unsqueeze(1)
    return out if bias is None else out + bias


def by_kernels(graph: OpGraph, reduce: str, x: Tensor, weight: Tensor | None = None,
               scale_src: Tensor | None = None, scale_dst: Tensor | None = None,
               bias: Tensor | None = None) -> Tensor:
    """The operation by the CUDA kernels; scales and bias are fp32 there."""
    if reduce == "max":
        variant = form(reduce, x.shape[1], x.dtype, weight is not None)
        out = cuda_functions.extremum(graph, _extremum(weight is not None),
                                      x.view(-1, variant.heads, variant.width), weight)
        out = out.view(-1, x.shape[1])
        return out.masked_fill(out.isinf(), 0.0)
    if wants_grad(x, weight, bias):
        return _Sum(graph).apply(x, weight, scale_src, scale_dst, bias)
    return _sum(graph, x, weight, scale_src, scale_dst, bias)


def _extremum(weighted: bool) -> cuda_functions.Extremum:
    return cuda_functions.Extremum("mul" if weighted else "copy", True, False)


def form(reduce: str, width: int, dtype: torch.dtype, weighted: bool,
         at: str = "place") -> sums.Variant | Extremum:
    """The kernels' variant for rows of ``width`` channels."""
    heads, channels = sums.factored(width)
    kind = "edge" if weighted else "none"
    if reduce == "max":
        return _extremum(weighted).variant(heads, channels, dtype, kind)
    return sums.variant(heads, channels, dtype, dtype, kind, at, False, False, False)


def prepare(reduce: str, width: int, dtype: torch.dtype, weighted: bool) -> None:
    """Compile the kernels that `by_kernels` launches, so that a failure to compile is known before
    anything runs."""
    entries = (("forward", "merge", "pick", "add_parts") if reduce == "max"
               else ("forward", "forward_short", "merge"))
    for entry in entries + (("edge_dot",) if weighted and reduce == "sum" else ()):
        form(reduce, width, dtype, weighted).kernels(entry)
    if weighted and reduce == "sum":
        for entry in entries:
            form(reduce, width, dtype, weighted, "position").kernels(entry)


class _Sum(Operation):
    """`_sum`, of scales that are constants of the graph."""

    __slots__ = ("graph",)

    def __init__(self, graph: OpGraph):
        self.graph = graph

    def forward(self, needs, x, weight, scale_src, scale_dst, bias):
        out = _sum(self.graph, x, weight, scale_src, scale_dst, bias)
        return out, (x if needs[1] else None, weight, scale_src, scale_dst)

    def backward(self, needs, saved, grad):
        (x, weight, scale_src, scale_dst), graph = saved, self.graph
        inner = _scaled(grad, scale_dst)
        d_x = d_weight = None
        if needs[0]:
            rows, placed, at = graph.view().weighted(weight, by_src=True)
            d_x = sums.total(rows, inner, placed, at, scale=scale_src)
        if needs[1]:
            variant = form("sum", grad.shape[1], grad.dtype, True)
            ends = inner, _scaled(x, scale_src)
            left, right = (dense(t).view(-1, variant.heads, variant.width) for t in ends)
            d_weight = sums.edge_dot(variant, graph.view().csc(), left, right)[:graph.num_edges]
            d_weight = d_weight.sum(1).to(weight.dtype)
        return d_x, d_weight, None, None, grad.sum(0) if needs[4] else None

    def recorded(self, needs, saved, grad):
        (x, weight, *scales), graph = saved, self.graph
        x = stand_in(grad, graph.num_src) if x is None else x

        def reference(x: Tensor, weight: Tensor | None) -> Tensor:
            return by_operations(graph, "sum", x, weight, *scales)

        grads = gradients(reference, (x, weight), needs[:2], (grad,))
        return *grads, None, None, grad.sum(0) if needs[4] else None


def _sum(graph: OpGraph, x: Tensor, weight: Tensor | None, scale_src: Tensor | None,
         scale_dst: Tensor | None, bias: Tensor | None) -> Tensor:
    rows, placed, at = graph.view().weighted(weight)
    return sums.total(rows, _scaled(x, scale_src), placed, at, scale=scale_dst, bias=bias)


def gradient(graph: OpGraph, grad: Tensor, weight: Tensor | None) -> Tensor:
    """Gradient of the weighted sum's x, by the CUDA kernels: the sum over the transposed graph."""
    rows, placed, at = graph.view().weighted(weight, by_src=True)
    return sums.total(rows, grad, placed, at)


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else (x * scale.unsqueeze(1)).to(x.dtype)
