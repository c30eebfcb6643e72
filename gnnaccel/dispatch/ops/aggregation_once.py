"""Weighted neighbours summed by CUDA kernels straight from the caller's list of edges, with their backward: for graphs that may
not come again, whose structure would cost more than it saves. `aggregation` says what is computed.

A backward that is itself recorded runs on torch operations.
"""
from __future__ import annotations

import math

import torch
from torch import Tensor

from gnnaccel.cuda import edge_list
from gnnaccel.dispatch.ops import aggregation
from gnnaccel.dispatch.ops.aggregation import Aggregation
from gnnaccel.dispatch.ops.call import Kernel
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.relational.cuda_maps import by_torch, dense
from gnnaccel.errors import VALID, GraphError


def kernel(graph: OpGraph, given: Aggregation) -> Kernel | None:
    """The way of `aggregation.plain` without a structure; None where there is none: it is for sums and means in fp32 of rows that
    have one weight at most, which wants no gradient, and nothing else in their messages, where their order may vary."""
    weight = given.weight
    if given.more is not None:
        return None
    if given.x.dtype is not torch.float32 or given.reduce not in ("sum", "mean") or given.kind not in ("none", "edge"):
        return None
    if (weight is not None and weight.requires_grad) or torch.are_deterministic_algorithms_enabled():
        return None
    width, index = math.prod(given.shape), graph.edge_index.dtype

    def compile_() -> None:
        for entry in ("add_edges", "average"):
            edge_list.kernels(width, index)(entry)

    return Kernel(f"aggregate: {given.reduce} over the list of edges", ("edge list", width, index), compile_,
                  lambda: run(graph, given))


def run(graph: OpGraph, given: Aggregation) -> Tensor:
    """`aggregation.plain` by kernels. GraphError once the device has told of an earlier call that ids were out of range."""
    x, weight, mean = given.x, given.weight, given.reduce == "mean"
    if edge_list.alarmed(x.device):
        raise GraphError("the edge_index of an earlier call holds ids outside its graph, found on the GPU after that call; such "
                         f"edges were left out. Check num_nodes and the first dimension of the node features. {VALID}")
    if weight is not None:
        weight = weight.detach().reshape(-1).contiguous()
    if x.requires_grad and torch.is_grad_enabled():
        return _Once.apply(graph, mean, x, weight)
    return _summed(graph, mean, x, weight)[0]


def _ends(graph: OpGraph) -> Tensor:
    ends = graph.edge_index
    return ends if ends.stride(1) == 1 else ends.contiguous()


def _summed(graph: OpGraph, mean: bool, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The result, and what divided each sum, as a factor."""
    rows, ends = dense(x).flatten(1), _ends(graph)
    count = torch.zeros(graph.num_dst, device=x.device) if mean else None
    out = edge_list.add_edges(ends, int(graph.flipped), rows, graph.num_dst, weight, None, count)
    inverse = edge_list.average(out, count, ends.dtype) if mean else None
    return out if x.dim() == 2 else out.view(-1, *x.shape[1:]), inverse


class _Once(torch.autograd.Function):
    """[num_dst, *features] of x [num_src, *features] and weights [E] or None."""

    @staticmethod
    def forward(ctx, graph, mean, x, weight):
        out, inverse = _summed(graph, mean, x, weight)
        ctx.graph, ctx.shape, ctx.mean = graph, x.shape, mean
        ctx.save_for_backward(graph.edge_index, weight, inverse)  # the edges as well: who changes them before backward is to know
        return out if x.dim() == 2 else out.detach()  # users may not change in place a view that a Function made

    @staticmethod
    def backward(ctx, grad):
        (_, weight, inverse), graph, shape = ctx.saved_tensors, ctx.graph, ctx.shape
        if torch.is_grad_enabled():
            def again(x: Tensor) -> Tensor:
                rows = None if weight is None else weight.view(-1, *(1,) * (len(shape) - 1))
                return aggregation.plain(graph, Aggregation("mean" if ctx.mean else "sum", x, rows, tuple(shape[1:])))

            return None, None, *by_torch(again, (grad.new_zeros(shape).requires_grad_(),), (True,), grad), None
        found = edge_list.add_edges(_ends(graph), 1 - graph.flipped, dense(grad).flatten(1), graph.num_src, weight, inverse)
        return None, None, found if len(shape) == 2 else found.view(shape), None
