"""Gated graph convolution's operation: scores of edges, and neighbours' values weighted by their
sigmoids.

``score[e] = left[j] + right[i] + edge[e]`` for every edge e = (j, i); ``out[i] = sum of
sigmoid(score[e]) * values[j]`` over the edges that enter i, divided by the sum of the gates plus
`EPSILON` (Bresson and Laurent, "Residual Gated Graph ConvNets").
"""
from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import dense
from gnnaccel.cuda.traverse import gated
from gnnaccel.dispatch.ops import torch_ops
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.plan import cost
from gnnaccel.dispatch.run.autograd import Operation

OPERANDS = ("left", "right", "edge", "values")
seconds = cost.plain  # as of a `Candidate`, by us or natively
EPSILON = 1e-6
FORMULAS = {"gated": "score[e] = left[j] + right[i] + edge[e]; "
                     "out[i] = (sum of sigmoid(score[e]) * values[j]) / (sum of "
            "sigmoid(score[e]) + epsilon)"}


def by_operations(graph: OpGraph, reduce: str, left: Tensor, right: Tensor, edge: Tensor,
                  values: Tensor) -> tuple[Tensor, Tensor]:
    """(score [E, F], out [num_dst, F]), on torch operations, differentiable any number of times.
    All operands [rows, F]."""
    score = torch_ops.take(graph, left, "u") + torch_ops.take(graph, right, "v") + edge
    gate, index = score.sigmoid(), graph.index("v")
    sums = torch_ops.added(gate * torch_ops.take(graph, values, "u"), index, graph.num_dst)
    return score, sums / (torch_ops.added(gate, index, graph.num_dst) + EPSILON)


def by_kernels(graph: OpGraph, reduce: str, left: Tensor, right: Tensor, edge: Tensor,
               values: Tensor) -> tuple[Tensor, Tensor]:
    """The gated sums by the CUDA kernels."""
    return _Gated(graph).apply(left, right, edge, values)


def prepare(reduce: str, width: int, dtype: torch.dtype, weighted: bool) -> None:
    """Compile the kernels that `by_kernels` launches."""
    for entry in gated.ENTRIES:
        gated.kernels(width, dtype, False)(entry)


class _Gated(Operation):
    __slots__ = ("graph",)
    keeps_inputs = True

    def __init__(self, graph: OpGraph):
        self.graph = graph

    def forward(self, needs, *operands):
        result = gated.forward(self.graph.view().csc(), *map(dense, operands), EPSILON)
        return (result.score, result.out), (*operands, *result)

    def backward(self, needs, saved, score_grad, grad):
        (*operands, score, out, total), graph = saved, self.graph
        summed = grad is not None  # else the values have no gradient
        grad = grad if summed else torch.zeros_like(out)
        state, ratio = gated.Gated(score, out, total), dense(grad.float() / total)
        score_grad = None if score_grad is None else dense(score_grad)
        by_dst, values = graph.view().csc(), dense(operands[3])
        d_edge, d_right = gated.by_row(by_dst, state, values, ratio, score_grad)
        d_left, d_values = gated.by_other(graph.view().csr_by_id(), score, d_edge, ratio)
        return d_left, d_right, d_edge, d_values if summed else None

    def reference(self, *operands):
        return by_operations(self.graph, "gated", *operands)
