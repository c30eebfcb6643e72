"""Weighted neighbours summed by CUDA kernels straight from the caller's list of edges, with their
backward: for graphs that may not come again, whose structure would cost more than it saves.
The operations are those of `aggregation`.

A backward that is itself recorded runs on torch operations.
"""
from __future__ import annotations

import math

import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import dense
from gnnaccel.cuda.traverse import edge_list
from gnnaccel.dispatch.graph.edge_arrays import EdgeArrays
from gnnaccel.dispatch.ops import aggregation
from gnnaccel.dispatch.ops.aggregation import Aggregation
from gnnaccel.dispatch.ops.call import Kernel
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.run.autograd import Operation, gradients, stand_in, wants_grad
from gnnaccel.errors import VALID, GraphError


def kernel(graph: OpGraph, aggregation: Aggregation) -> Kernel | None:
    """The way of `aggregation.plain` without a structure, or None: for sums and means in fp32 of
    rows that have one weight at most, which wants no gradient, and nothing else in their messages,
    where their order may vary, over a list of edges [2, E]."""
    weight = aggregation.weight
    if aggregation.more is not None or type(graph.edge_index) is EdgeArrays:
        return None
    if (aggregation.x.dtype is not torch.float32 or aggregation.reduce not in ("sum", "mean")
        or aggregation.kind not in ("none", "edge")):
        return None
    if ((weight is not None and weight.requires_grad)
        or torch.are_deterministic_algorithms_enabled()):
        return None
    width, index = math.prod(aggregation.shape), graph.edge_index.dtype

    def compile_() -> None:
        for entry in ("add_edges", "average"):
            edge_list.kernels(width, index)(entry)

    return Kernel(f"fused {aggregation.reduce} over the list of edges", ("edge list", width, index),
                  compile_, lambda: run(graph, aggregation))


def run(graph: OpGraph, aggregation: Aggregation) -> Tensor:
    """`aggregation.plain` by kernels. GraphError once the device has reported ids out of range in
    an earlier call."""
    x, weight, mean = aggregation.x, aggregation.weight, aggregation.reduce == "mean"
    if edge_list.alarmed(x.device):
        raise GraphError("the edge_index of an earlier call holds ids outside its graph, "
                         "found on the GPU after that call; such "
                         "edges were left out. Check num_nodes and the first dimension of "
                         f"the node features. {VALID}")
    if weight is not None:
        weight = weight.detach().reshape(-1).contiguous()
    if wants_grad(x):
        return _Once(graph, mean).apply(x, weight)
    return _summed(graph, mean, x, weight)[0]


def _ends(graph: OpGraph) -> Tensor:
    ends = graph.edge_index
    return ends if ends.stride(1) == 1 else ends.contiguous()


def _summed(graph: OpGraph, mean: bool, x: Tensor,
            weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The result, and the reciprocal of each sum's divisor, None without a mean."""
    rows, ends = dense(x).flatten(1), _ends(graph)
    count = torch.zeros(graph.num_dst, dtype=torch.float32, device=x.device) if mean else None
    out = edge_list.add_edges(ends, int(graph.flipped), rows, graph.num_dst, weight, None, count)
    inverse = edge_list.average(out, count, ends.dtype) if mean else None  # type: ignore[arg-type]
    return out if x.dim() == 2 else out.view(-1, *x.shape[1:]), inverse


class _Once(Operation):
    """[num_dst, *features] of x [num_src, *features] and weights [E] or None."""

    __slots__ = ("graph", "mean")

    def __init__(self, graph: OpGraph, mean: bool):
        self.graph, self.mean = graph, mean

    def forward(self, needs, x, weight):
        out, inverse = _summed(self.graph, self.mean, x, weight)
        out = out if x.dim() == 2 else out.detach()  # no view, which no user could change in place
        # The edges too are saved, so that autograd objects if they are changed before backward.
        return out, (self.graph.edge_index, weight, inverse)

    def backward(self, needs, saved, grad):
        (_, weight, inverse), graph = saved, self.graph
        ends, flipped, rows = _ends(graph), 1 - graph.flipped, dense(grad).flatten(1)
        d_x = edge_list.add_edges(ends, flipped, rows, graph.num_src, weight, inverse)
        return d_x if grad.dim() == 2 else d_x.view(-1, *grad.shape[1:]), None

    def recorded(self, needs, saved, grad):
        weight = None if saved[1] is None else saved[1].view(-1, *(1,) * (grad.dim() - 1))

        def reference(x: Tensor) -> Tensor:
            call = Aggregation("mean" if self.mean else "sum", x, weight, tuple(x.shape[1:]))
            return aggregation.plain(self.graph, call)

        return *gradients(reference, (stand_in(grad, self.graph.num_src),), (True,), (grad,)), None
