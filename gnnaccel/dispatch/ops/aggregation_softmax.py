"""Softmax over neighbours by CUDA kernels: of their rows as they are, and of rectified messages
with features of edges.

Forward gathers once, backward twice; nothing has the size of the edges times the features but the
gradient of features of edges. A backward that is itself recorded runs on torch operations.
"""
from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import dense
from gnnaccel.cuda.traverse import column_sum, softmax_sum
from gnnaccel.cuda.traverse.softmax_sum import Messages
from gnnaccel.dispatch.ops import aggregation
from gnnaccel.dispatch.ops.aggregation import Aggregation
from gnnaccel.dispatch.ops.aggregation_means import Softmax
from gnnaccel.dispatch.ops.call import Kernel
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.ops.messages import Rectified
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.run.autograd import Operation, wants_grad

if TYPE_CHECKING:
    from gnnaccel.dispatch.ops.aggregation_means import OfSoftmax


def kernel(graph: OpGraph, given: OfSoftmax) -> Kernel | Reason:
    """The way of `aggregation.plain` by kernels, or why there is none."""
    if type(given.more) not in (type(None), Rectified):
        return reason("GA208", f"a softmax of messages {given.more}")
    width, dtype, edge = math.prod(given.shape), given.reduce.dtype(given.x), given.more is not None
    learnt = isinstance(given.reduce.t, Tensor)

    def compile_() -> None:
        for entry in softmax_sum.ENTRIES:
            softmax_sum.kernels(width, dtype, edge, False)(entry)
        if learnt:
            column_sum.prepare(width, torch.float32)

    name = "fused softmax" + " of relu messages" * edge
    return Kernel(name, (name, width, dtype, learnt), compile_, lambda: run(graph, given))


def run(graph: OpGraph, given: OfSoftmax) -> Tensor:
    """`aggregation.plain` by kernels."""
    dtype = given.reduce.dtype(given.x)
    x, edge, constant = given.x.to(dtype), None, 0.0
    if given.more is not None:
        edge, constant = given.more.edge.to(dtype), given.more.constant  # type: ignore[union-attr]
    t, whole = _temperature(given), given.reduce.whole
    number, learnt = (None, t) if isinstance(t, Tensor) else (t, None)
    if wants_grad(x, edge, learnt):
        return _SoftmaxSum(graph, constant, whole, number).apply(x, edge, learnt)
    return _forward(graph, constant, x, edge, t, False)[0].view(-1, *x.shape[1:])


def _temperature(given: OfSoftmax) -> Tensor | float:
    """Temperature for the kernels: a number, or fp32 [1] or [F]; without a gradient where none goes
    through the softmax."""
    t = given.reduce.t
    if not isinstance(t, Tensor):
        return float(t)
    t = (t.reshape(1)
         if t.numel() == 1 else t.expand(1, *given.shape).reshape(-1)).float().contiguous()
    return t if given.reduce.whole else t.detach()


def _messages(constant: float, x: Tensor, edge: Tensor | None, t: Tensor | float) -> Messages:
    return Messages(dense(x.flatten(1)), None if edge is None else dense(edge.flatten(1)), constant,
                    t)


def _forward(graph: OpGraph, constant: float, x: Tensor, edge: Tensor | None, t: Tensor | float,
             train: bool) -> tuple[Tensor, softmax_sum.Kept | None]:
    return softmax_sum.forward(graph.view().csc(places=edge is not None),
                               _messages(constant, x, edge, t), train)


class _SoftmaxSum(Operation):
    """[num_dst, *features] of x [num_src, *features], features of edges [E, *features] or None, and
    t, or None where that is a ``number``."""

    __slots__ = ("constant", "graph", "number", "whole")
    keeps_inputs = True

    def __init__(self, graph: OpGraph, constant: float, whole: bool, number: float | None):
        self.graph, self.constant, self.whole, self.number = graph, constant, whole, number

    def forward(self, needs, x, edge, t):
        temperature = self.number if t is None else t
        out, state = _forward(self.graph, self.constant, x, edge, temperature, True)
        out = out.view(-1, *x.shape[1:]).detach()  # no view, which no user could change in place
        return out, (x, edge, t, *state)

    def backward(self, needs, saved, grad):
        (x, edge, t, center, total), view = saved, self.graph.built or self.graph.view()
        by_src = view.csr(places=False) if edge is None else view.csr_by_id()
        messages = _messages(self.constant, x, edge, self.number if t is None else t)
        share = dense(grad.flatten(1) / total)
        d_x, d_edge, d_t = softmax_sum.backward(by_src, messages, center, share, self.whole,
                                                needs[1], needs[2])
        if d_t is not None:
            d_t = column_sum.column_sum(d_t)
            d_t = d_t.sum().view(1) if t.numel() == 1 else d_t
        return d_x.view(x.shape), None if d_edge is None else d_edge.view(edge.shape), d_t

    def reference(self, x, edge, t):
        number = self.number if t is None else t if t.numel() == 1 else t.view(x.shape[1:])
        more = None if edge is None else Rectified(edge, self.constant)
        call = Aggregation(Softmax(number, self.whole), x, None, tuple(x.shape[1:]), more)
        return aggregation.plain(self.graph, call)
