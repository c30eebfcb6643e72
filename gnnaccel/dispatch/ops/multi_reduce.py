"""Several reduces of the messages that enter each node, as one operation: by torch operations, and
by kernels that read each row once and nothing of the size of the edges times the features.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import MAX_WIDTH, TYPES, dense, fp32
from gnnaccel.cuda.structures.structure import Rows, split_rows
from gnnaccel.cuda.traverse import (multi_reduce as kernels,
                                    multi_reduce_backward as backward_kernels)
from gnnaccel.dispatch.ops import cuda_functions, torch_ops
from gnnaccel.dispatch.ops.aggregation import deviation
from gnnaccel.dispatch.ops.call import Kernel, OpCall
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.run.autograd import Operation, wants_grad

REDUCES = kernels.REDUCES
_FORWARD, _BACKWARD = ("forward", "merge"), ("spread", "backward", "add_parts")
_HALF = (torch.float16, torch.bfloat16)


def multi_reduce(graph: OpGraph, x: Tensor, reduces: tuple[str, ...], weight: Tensor | None = None,
                 zero_share: bool = True, of_edges: bool = False,
                 added: Tensor | None = None) -> OpCall:
    """[num_dst, reduces, *features]: each of ``reduces`` (some of `REDUCES`) of ``x`` [num_src,
    *features] over the edges that enter a node, times ``weight`` [E] or, with features [H, D], [E,
    H]; or plus ``added`` [E, *features]. With ``of_edges`` x is [E, *features], by edge id.

    Details are those of PyG: nodes that no edge enters get 0; equal messages share the gradient of
    "max" and "min" evenly, an extremum of exactly 0 keeping a share for itself (not with
    ``zero_share`` False); "std" is 0 where the variance is at most 1e-5.
    """
    return OpCall(x.device, x.dtype,
                  lambda: by_operations(graph, x, reduces, weight, zero_share, of_edges, added),
                  _kernel(graph, x, tuple(reduces), weight, zero_share, of_edges, added), graph)


# --- by torch operations --------------------------------------------------------------------------

def by_operations(graph: OpGraph, x: Tensor, reduces: tuple[str, ...], weight: Tensor | None,
                  zero_share: bool, of_edges: bool = False, added: Tensor | None = None) -> Tensor:
    """`multi_reduce`, on any device, differentiable any number of times. Messages have the size of
    the edges here."""
    message, index = torch_ops.take(graph, x, "e" if of_edges else "u"), graph.index("v").long()
    if added is not None:
        message = message + added
    if weight is not None:
        message = message * weight.to(x.dtype).view(*weight.shape,
                                                    *(1,) * (message.dim() - weight.dim()))
    wide = message.float() if x.dtype in _HALF else message
    count = torch.bincount(index, minlength=graph.num_dst).view(-1, *(1,) * (x.dim() - 1))

    def mean(t: Tensor) -> Tensor:
        return torch_ops.added(t, index, graph.num_dst) / count.clamp(min=1)

    def variance() -> Tensor:
        # about one of the row's messages, as in the kernels: squares of messages far from zero
        # would leave few digits, and PyG's deviation is nothing below a limit
        with torch.no_grad():
            shift = wide.new_zeros(graph.num_dst, *wide.shape[1:]).index_copy_(0, index, wide)
        distance = wide - shift.index_select(0, index)
        return mean(distance * distance) - mean(distance).square()

    def extremum(name: str) -> Tensor:
        to = index.view(-1, *(1,) * (wide.dim() - 1)).expand_as(wide)
        shape = graph.num_dst, *wide.shape[1:]
        if zero_share:
            return wide.new_zeros(shape).scatter_reduce(0, to, wide, "a" + name, include_self=False)
        worst = wide.new_full(shape, float("-inf" if name == "max" else "inf"))
        return worst.scatter_reduce(0, to, wide, "a" + name).masked_fill(count == 0, 0.0)

    calls = {"sum": lambda: torch_ops.added(wide, index, graph.num_dst), "mean": lambda: mean(wide),
             "var": variance, "std": lambda: deviation(variance()), "max": lambda: extremum("max"),
             "min": lambda: extremum("min")}
    return torch.stack([calls[name]() for name in reduces], 1).to(x.dtype)


# --- by kernels -----------------------------------------------------------------------------------

def _kernel(graph: OpGraph, x: Tensor, reduces: tuple[str, ...], weight: Tensor | None,
            zero_share: bool, of_edges: bool, added: Tensor | None) -> Kernel | Reason:
    if not graph.num_edges or graph.num_edges >= 2**31:
        return reason("GA303", "there are no edges, or too many")
    features = math.prod(x.shape[1:])
    if x.dtype not in TYPES or not features:
        return reason("GA203",
                      f"features are {x.dtype} {list(x.shape[1:])}; the kernels take "
                      f"{', '.join(map(str, TYPES))}")
    if (weight is not None) + of_edges + (added is not None) > 1:
        return reason("GA206", "weights for messages that are features of edges",
                      "multiply them beforehand")
    if added is not None and (added.dtype != x.dtype
                              or added.shape != (graph.num_edges, *x.shape[1:])):
        return reason("GA206", f"rows {list(added.shape)} of {added.dtype} to be added to "
                      f"{list(x.shape)} of {x.dtype} over {graph.num_edges} edges")
    if weight is not None and weight.dim() == 2:
        if x.dim() != 3 or weight.shape[1] != x.shape[1] or x.shape[2] > MAX_WIDTH:
            return reason("GA206", f"weights {list(weight.shape)} for features {list(x.shape[1:])}")
    variant = kernels.variant_of(x, reduces, weight, added=added is not None)
    return Kernel(f"fused {', '.join(reduces)}", ("multi_reduce", variant), compiler(variant),
                  lambda: run(graph, x, reduces, weight, zero_share,
                              of_edges, added).view(-1, len(reduces), *x.shape[1:]))


class _OfEdgesToo(Operation):
    """[num_dst, reduces, *features] of x [num_src, *features] and of rows [E, *features] that are
    added to it."""

    __slots__ = ("graph", "reduces", "zero_share")
    keeps_inputs = True

    def __init__(self, graph: OpGraph, reduces: tuple[str, ...], zero_share: bool):
        self.graph, self.reduces, self.zero_share = graph, reduces, zero_share

    def forward(self, needs, x, added):
        result = kernels.reduced(self.graph.view().csc(), x, self.reduces, dense(added), True, True)
        variance = self.reduces in (("var",), ("std",))  # as `_MultiReduce` says
        return result.out.clone() if variance else result.out.detach(), (x, added, *result)

    def backward(self, needs, saved, grad):
        x, added, *fields = saved
        d_added = backward_kernels.added_grad(self.graph.view().csc(), self.reduces, x,
                                              dense(added), kernels.Reduced(*fields), grad,
                                              self.zero_share)
        d_x = cuda_functions.edge_sum(self.graph, d_added, "u") if needs[0] else None
        return d_x, d_added if needs[1] else None

    def reference(self, x, added):
        out = by_operations(self.graph, x, self.reduces, None, self.zero_share, added=added)
        return out if len(self.reduces) > 1 else out.squeeze(1)


def run(graph: OpGraph, x: Tensor, reduces: tuple[str, ...], weight: Tensor | None = None,
        zero_share: bool = True, of_edges: bool = False, added: Tensor | None = None) -> Tensor:
    """`multi_reduce` by the kernels, which must be there: [num_dst, reduces, *features], of a
    single reduce [num_dst, *features]. Weights [E, H] are each for a part of the features, in any
    shape."""
    if added is not None:
        if wants_grad(x, added):
            return _OfEdgesToo(graph, reduces, zero_share).apply(x, added)
        return kernels.reduced(graph.view().csc(), x, reduces, dense(added), added=True).out
    if wants_grad(x, weight):
        return _MultiReduce(graph, reduces, zero_share, of_edges).apply(x, weight)
    return _forward(graph, reduces, x, weight, of_edges, False).out


def _forward(graph: OpGraph, reduces: tuple[str, ...], x: Tensor, weight: Tensor | None,
             of_edges: bool, train: bool) -> kernels.Reduced:
    by_dst = graph.view().csc(places=of_edges or weight is not None)
    if of_edges:
        by_dst = replace(by_dst, other=by_dst.place, launched=None, made={})
    return kernels.reduced(by_dst, x, reduces, fp32(weight), train)


def compiler(variant: kernels.Variant) -> Callable[[], None]:
    """The function that compiles all kernels of a call and its backward."""
    def compile_() -> None:
        backward: tuple[str, ...] = _BACKWARD
        if variant.weight == "added":
            backward = "spread", "edge_grad"
            sums = cuda_functions.sum_variant(variant.heads * variant.width, variant.row).kernels
            for entry in ("forward", "merge"):
                sums(entry)
        elif variant.weight != "none":
            backward += ("edge_grad",)
        entries = [(variant.kernels, _FORWARD), (backward_kernels.kernels(variant), backward)]
        for kernel, names in entries:
            for name in names:
                kernel(name)

    return compile_


class _MultiReduce(Operation):
    __slots__ = ("graph", "of_edges", "reduces", "zero_share")
    keeps_inputs = True

    def __init__(self, graph: OpGraph, reduces: tuple[str, ...], zero_share: bool, of_edges: bool):
        self.graph, self.reduces = graph, reduces
        self.zero_share, self.of_edges = zero_share, of_edges

    def forward(self, needs, x, weight):
        result = _forward(self.graph, self.reduces, x, weight, self.of_edges, True)
        # A variance may be changed in place, as the host's may; its maximum may not, and several
        # reduces are joined anyway.
        variance = self.reduces in (("var",), ("std",))
        return result.out.clone() if variance else result.out.detach(), (x, weight, *result)

    def backward(self, needs, saved, grad):
        (x, weight, *fields), graph, reduces = saved, self.graph, self.reduces
        by_dst, weights, result = graph.view().csc(places=weight is not None), fp32(
            weight), kernels.Reduced(*fields)
        if not needs[1] and not self.of_edges:
            by_src = _by_source(graph, weight)
            return backward_kernels.gradient(by_dst, by_src, reduces, x, weights, result, grad,
                                             self.zero_share), None
        variant = kernels.variant_of(x, reduces, weight)
        rows, result = _rows(variant, x), result._replace(
            out=result.out.view(-1, len(reduces), variant.heads, variant.width))
        grad = dense(grad).view(result.out.shape)
        terms = backward_kernels.spread(variant, by_dst, result, grad, self.zero_share)
        d_x = d_weight = None
        if needs[0]:
            by_src = _by_edge(graph) if self.of_edges else _by_source(graph, weight)
            d_x = backward_kernels.rows_grad(variant, by_src, rows, weights, result.out,
                                             terms).view(x.shape)
        if needs[1]:
            d_weight = backward_kernels.weight_grad(variant, by_dst, rows, weights, result.out,
                                                    terms).to(weight.dtype)
        return d_x, d_weight

    def reference(self, x, weight):
        parts = x
        if weight is not None and weight.dim() > 1:
            parts = x.reshape(x.shape[0], weight.shape[1], -1)
        out = by_operations(self.graph, parts, self.reduces, weight, self.zero_share, self.of_edges)
        several = (len(self.reduces),) if len(self.reduces) > 1 else ()
        return out.view(-1, *several, *x.shape[1:])


def _rows(variant: kernels.Variant, x: Tensor) -> Tensor:
    return dense(x).view(-1, variant.heads, variant.width)


def _by_source(graph: OpGraph, weight: Tensor | None) -> Rows:
    """Edges by source, with ids where weights are looked up by edge id."""
    return graph.view().csr(places=False) if weight is None else graph.view().csr_by_id()


def _by_edge(graph: OpGraph) -> Rows:
    """Each edge as a row of its own, with its destination at the other end."""
    dst = graph.index("v").to(torch.int32).contiguous()
    indptr = torch.arange(dst.shape[0] + 1, dtype=torch.int32, device=dst.device)
    return Rows(indptr, dst, indptr[:0], split_rows(indptr, dst.shape[0]))
