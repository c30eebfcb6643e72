"""Gated graph convolution's operation: scores of edges, and what neighbours send weighted by their sigmoids.

``score[e] = left[j] + right[i] + edge[e]`` for every edge e = (j, i); ``out[i] = sum of sigmoid(score[e]) * values[j]`` over the
edges that enter i, divided by the sum of the gates plus `EPSILON` (Bresson and Laurent, "Residual Gated Graph ConvNets").
"""
from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.cuda import gated
from gnnaccel.dispatch.ops import torch_ops
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.relational.cuda_maps import by_torch, dense

OPERANDS = ("left", "right", "edge", "values")
EPSILON = 1e-6
FORMULAS = {"gated": "score[e] = left[j] + right[i] + edge[e]; "
                     "out[i] = (sum of sigmoid(score[e]) * values[j]) / (sum of sigmoid(score[e]) + epsilon)"}


def by_operations(graph: OpGraph, reduce: str, left: Tensor, right: Tensor, edge: Tensor,
                  values: Tensor) -> tuple[Tensor, Tensor]:
    """(score [E, F], out [num_dst, F]), on torch operations, differentiable any number of times. All operands [rows, F]."""
    score = torch_ops.take(graph, left, "u") + torch_ops.take(graph, right, "v") + edge
    gate, index = score.sigmoid(), graph.index("v")
    sums = torch_ops.added(gate * torch_ops.take(graph, values, "u"), index, graph.num_dst)
    return score, sums / (torch_ops.added(gate, index, graph.num_dst) + EPSILON)


def by_kernels(graph: OpGraph, reduce: str, left: Tensor, right: Tensor, edge: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The same by the CUDA kernels."""
    return _Gated.apply(graph, left, right, edge, values)


def prepare(reduce: str, width: int, dtype: torch.dtype, weighted: bool) -> None:
    """Compile what `by_kernels` launches."""
    for entry in gated.ENTRIES:
        gated.kernels(width, dtype, False)(entry)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph, left, right, edge, values):
        ctx.graph = graph
        ctx.set_materialize_grads(False)
        found = gated.forward(graph.view().csc(), dense(left), dense(right), dense(edge), dense(values), EPSILON)
        ctx.save_for_backward(left, right, edge, values, *found)
        return found.score, found.out

    @staticmethod
    def backward(ctx, score_grad, grad):
        (*operands, score, out, total), graph = ctx.saved_tensors, ctx.graph
        grad = torch.zeros_like(out) if grad is None else grad
        if torch.is_grad_enabled():
            given = torch.zeros_like(score) if score_grad is None else score_grad
            return None, *by_torch(lambda *t: by_operations(graph, "gated", *t), tuple(operands), ctx.needs_input_grad[1:],
                                   (given, grad))
        found, ratio = gated.Gated(score, out, total), grad.float() / total
        score_grad = None if score_grad is None else dense(score_grad)
        d_edge, d_right = gated.by_row(graph.view().csc(), found, dense(operands[3]), ratio, score_grad)
        d_left, d_values = gated.by_other(graph.view().csr_by_id(), score, d_edge, ratio)
        return None, d_left, d_right, d_edge, d_values
