"""The operations of `torch_ops` by CUDA kernels, with their backward.

`edge_sum` and `take` are each other's gradient, and `elementwise` is made of both and itself, so
their backward can be differentiated again as it is; where backward of the others is recorded it
runs on torch operations.

Operands may be changed in place after the call where the host allows it, so only those that
backward reads are saved; and so may results, which are detached where they were views: autograd
refuses the views that a Function returns.
"""
from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import dense, fp32
from gnnaccel.cuda.structures import structure
from gnnaccel.cuda.structures.structure import Rows
from gnnaccel.cuda.traverse import (aggregate as sums, edge_softmax as softmax_kernels,
                                    extremum as extremum_kernels, sddmm)
from gnnaccel.dispatch.ops import torch_ops
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.ops.operands import Operands
from gnnaccel.dispatch.run.autograd import Closed, Operation


def _rows_by(graph: OpGraph, target: str) -> Rows:
    """The edges grouped by their destination ("v") or source ("u"); ``place`` is the edge's
    number."""
    return graph.view().csc() if target == "v" else graph.view().csr_by_id()


def _edges_by(graph: OpGraph, target: str) -> Rows:
    """The edges of each node of ``target``, with the edge itself at the other end."""
    rows = _rows_by(graph, target)
    return replace(rows, other=rows.place, launched=None, made={})


# --- between nodes and edges ----------------------------------------------------------------------

def edge_sum(graph: OpGraph, x: Tensor, target: str) -> Tensor:
    """[nodes, *features]: the sums of the rows ``x`` [E, *features] of the edges that share the
    node at ``target``."""
    return _EdgeSum(graph, target).apply(x)


def take(graph: OpGraph, x: Tensor, target: str) -> Tensor:
    """[E, *features]: each edge's row of ``x`` [nodes, *features], of the node at ``target``."""
    return _Take(graph, target).apply(x)


def sum_variant(width: int, dtype: torch.dtype) -> sums.Variant:
    """The kernels of `edge_sum` for rows of ``width`` numbers."""
    return sums.variant(*sums.factored(width), dtype, dtype, "none", "position", False, False,
                        False)


class _ByEnd(Closed):
    __slots__ = ("graph", "target")

    def __init__(self, graph: OpGraph, target: str):
        self.graph, self.target = graph, target


class _EdgeSum(_ByEnd):
    __slots__ = ()

    def forward(self, needs, x):
        variant = sum_variant(x[0].numel(), x.dtype)
        out = sums.forward(variant, _edges_by(self.graph, self.target),
                           dense(x).view(-1, variant.heads, variant.width))
        return out.view(-1, *x.shape[1:]).detach(), ()

    def backward(self, needs, saved, grad):
        return take(self.graph, grad, self.target),


class _Take(_ByEnd):
    __slots__ = ()

    def forward(self, needs, x):
        return x.index_select(0, self.graph.index(self.target)), ()

    def backward(self, needs, saved, grad):
        return edge_sum(self.graph, grad, self.target),


def elementwise(graph: OpGraph, op: str, lhs: Tensor, rhs: Tensor,
                targets: tuple[str, str]) -> Tensor:
    """[E, F]: ``lhs`` op ``rhs``, "add" or "mul", each [rows of its target, F]."""
    return _Elementwise(graph, op, targets).apply(lhs, rhs)


class _Elementwise(Closed):
    __slots__ = ("graph", "op", "targets")

    def __init__(self, graph: OpGraph, op: str, targets: tuple[str, str]):
        self.graph, self.op, self.targets = graph, op, targets

    def forward(self, needs, lhs, rhs):
        graph, op = self.graph, self.op
        indices = (None if target == "e" else graph.index(target).contiguous()
                   for target in self.targets)
        out = sddmm.elementwise(op, graph.num_edges, dense(lhs), dense(rhs), *indices)
        return out.detach(), (lhs, rhs) if op == "mul" else ()

    def backward(self, needs, saved, grad):
        graph, targets = self.graph, self.targets
        grads = []
        for side in (0, 1):
            if not needs[side]:
                grads.append(None)
                continue
            at_edges = grad
            if self.op == "mul":
                at_edges = elementwise(graph, "mul", grad, saved[1 - side],
                                       ("e", targets[1 - side]))
            grads.append(at_edges
                         if targets[side] == "e" else edge_sum(graph, at_edges, targets[side]))
        return grads


# --- inner products -------------------------------------------------------------------------------

def dot(graph: OpGraph, left: Tensor, right: Tensor) -> Tensor:
    """[E, H]: inner products of ``left`` [num_dst, H, D] at the destination and ``right`` [num_src,
    H, D] at the source."""
    return _Dot(graph).apply(left, right)


def dot_variant(heads: int, width: int, dtype: torch.dtype) -> sums.Variant:
    """The kernels of `dot`, and of the weighted sums that are its gradient."""
    return sums.variant(heads, width, dtype, dtype, "head", "place", False, False, False)


class _Dot(Operation):
    __slots__ = ("graph",)

    def __init__(self, graph: OpGraph):
        self.graph = graph

    def forward(self, needs, left, right):
        graph, variant = self.graph, dot_variant(left.shape[1], left.shape[2], left.dtype)
        out = sums.edge_dot(variant, graph.view().csc(), dense(left), dense(right))
        return out[:graph.num_edges].to(left.dtype).detach(), (left, right)

    def backward(self, needs, saved, grad):
        (left, right), graph, weight = saved, self.graph, grad.float().contiguous()
        variant = dot_variant(left.shape[1], left.shape[2], left.dtype)
        d_left = d_right = None
        if needs[0]:
            d_left = sums.forward(variant, _rows_by(graph, "v"), dense(right), weight)
        if needs[1]:
            d_right = sums.forward(variant, _rows_by(graph, "u"), dense(left), weight)
        return d_left, d_right

    def reference(self, left, right):
        ends = torch_ops.take(self.graph, left, "v"), torch_ops.take(self.graph, right, "u")
        return (ends[0] * ends[1]).sum(-1)


# --- softmax --------------------------------------------------------------------------------------

def edge_softmax(graph: OpGraph, logits: Tensor, by: str) -> Tensor:
    """`torch_ops.edge_softmax`."""
    return _EdgeSoftmax(graph, by).apply(logits)


class _EdgeSoftmax(Operation):
    __slots__ = ("by", "graph")

    def __init__(self, graph: OpGraph, by: str):
        self.graph, self.by = graph, by

    def forward(self, needs, logits):
        rows = _rows_by(self.graph, self.by)
        out = softmax_kernels.forward(rows, logits.contiguous().view(logits.shape[0], -1))
        out = out.view(logits.shape).detach()
        return out, (out,)

    def backward(self, needs, saved, grad):
        (out,), rows = saved, _rows_by(self.graph, self.by)
        flat = (t.contiguous().view(t.shape[0], -1) for t in (out, grad))
        return (softmax_kernels.backward(rows, *flat).view(out.shape),)

    def recorded(self, needs, saved, grad):
        (out,), graph, by = saved, self.graph, self.by  # the result leads back to here
        share = out * grad
        return (share - out * take(graph, edge_sum(graph, share, by), by),)


# --- largest and smallest -------------------------------------------------------------------------

class Extremum(NamedTuple):
    """Form of `extremum`: the largest (or smallest) message of the edges that enter each node.
    ``op``: "copy", the row of the source, or of the edge with ``of_edges``; "add" or "mul": the
    source's and a weight [E] or [E, heads]."""

    op: str
    largest: bool
    of_edges: bool

    def variant(self, heads: int, width: int, dtype: torch.dtype,
                weight: str) -> extremum_kernels.Variant:
        return extremum_kernels.variant(heads, width, dtype, self.op, weight, self.largest, False,
                                        False)


def extremum(graph: OpGraph, form: Extremum, x: Tensor, weight: Tensor | None) -> Tensor:
    """[num_dst, H, D], of ``x`` [num_src or E, H, D]; -inf (or inf) where no edge enters."""
    return _Extremum(graph, form).apply(x, weight)


class _Extremum(Operation):
    """``variant``: of the kernels; ``like``: the weight's form, where there is one."""

    __slots__ = ("form", "graph", "like", "variant")

    def __init__(self, graph: OpGraph, form: Extremum):
        self.graph, self.form = graph, form

    def forward(self, needs, x, weight):
        graph, form, self.variant = self.graph, self.form, _variant_of(self.form, x, weight)
        rows = _edges_by(graph, "v") if form.of_edges else _rows_by(graph, "v")
        out, arg = extremum_kernels.forward(self.variant, rows, dense(x), fp32(weight))
        self.like = None if weight is None else torch.empty_like(weight, device="meta")
        return out.detach(), (*((x, weight) if form.op == "mul" else (None, None)), arg)

    def backward(self, needs, saved, grad):
        (x, weight, arg), graph, form = saved, self.graph, self.form
        if form.of_edges:
            return _to_places(arg, grad, graph.num_edges), None
        d_x = d_weight = None
        if needs[0]:
            if form.op == "add":  # reads no weight, but is compiled for one
                weight = grad.new_empty(0, *self.like.shape[1:], dtype=torch.float32)
            by_src = _rows_by(graph, "u")
            d_x = extremum_kernels.pick(self.variant, by_src, arg, dense(grad), fp32(weight))
        if needs[1]:
            d_weight = _weight_grad(graph, form, x, self.like, arg, grad)
        return d_x, d_weight

    def recorded(self, needs, saved, grad):
        (x, _, arg), graph, form = saved, self.graph, self.form
        if form.of_edges:
            return _to_places(arg, grad, graph.num_edges), None
        if form.op == "mul":
            return super().recorded(needs, saved, grad)
        d_weight = _weight_grad(graph, form, x, self.like, arg, grad) if needs[1] else None
        return _to_sources(graph, arg, grad), d_weight

    def reference(self, x, weight):
        operands = Operands(self.form.op, x, weight.view(weight.shape[0], -1, 1), (), False)
        return torch_ops.gspmm(self.graph, operands, "max" if self.form.largest else "min")


def _variant_of(form: Extremum, x: Tensor, weight: Tensor | None) -> extremum_kernels.Variant:
    return form.variant(x.shape[1], x.shape[2], x.dtype,
                        "none" if weight is None else "edge" if weight.dim() == 1 else "head")


def _to_places(arg: Tensor, grad: Tensor, edges: int) -> Tensor:
    """[edges, H, D]: each gradient at the edge that it belongs to. No two meet, as an edge ends in
    one node."""
    out = grad.new_zeros(edges + 1, *grad.shape[1:])
    return out.scatter(0, torch.where(arg < 0, edges, arg).long(), grad)[:edges]


def _to_sources(graph: OpGraph, arg: Tensor, grad: Tensor) -> Tensor:
    """[num_src, H, D]: the gradients added up at the sources of the edges that they belong to."""
    source = graph.index("u").long()[arg.clamp(min=0).long().view(-1)].view(arg.shape)
    return grad.new_zeros(graph.num_src,
                          *grad.shape[1:]).scatter_add(0, source, grad.masked_fill(arg < 0, 0.0))


def _weight_grad(graph: OpGraph, form: Extremum, x: Tensor | None, weight: Tensor, arg: Tensor,
                 grad: Tensor) -> Tensor:
    """Gradient of the weight. Channels of a head may have chosen the same edge, so this adds.
    weight: only its form is read; x: with "mul"."""
    place, heads = arg.clamp(min=0).long(), arg.shape[1]
    value = grad.float()
    if form.op == "mul":
        value = value * x.gather(0,  # type: ignore[union-attr]
                                 graph.index("u").long()[place.view(-1)].view(place.shape)).float()
    value = value.masked_fill(arg < 0, 0.0)
    at = (place
          if weight.dim() == 1
          else place * heads + torch.arange(heads, device=place.device).view(1, -1, 1))
    return value.new_zeros(weight.numel()).index_add(0, at.view(-1),
                                                     value.reshape(-1)).view(weight.shape).to(
                                                         weight.dtype)


# --- by segment -----------------------------------------------------------------------------------

def segment_sum(x: Tensor, offsets: Tensor) -> Tensor:
    """[n, *features]: the sums of the rows of each segment."""
    return _SegmentSum().apply(x, offsets)


def segment_extremum(x: Tensor, offsets: Tensor, largest: bool) -> Tensor:
    """[n, *features]: the largest (or smallest) row of each segment, by channel."""
    return _SegmentExtremum(largest).apply(x, offsets)


def segment_variant(width: int, dtype: torch.dtype) -> sums.Variant:
    """The kernels of `segment_sum`."""
    return sums.variant(*sums.factored(width), dtype, dtype, "none", "position", True, False, False)


def segment_extremum_variant(width: int, dtype: torch.dtype,
                             largest: bool) -> extremum_kernels.Variant:
    """The kernels of `segment_extremum`."""
    return extremum_kernels.variant(*sums.factored(width), dtype, "copy", "none", largest, True,
                                    False)


def _segments(offsets: Tensor, edges: int) -> Rows:
    """Segments as rows whose edges are the positions themselves, so that no array over edges is
    read. Users give their lengths: kernels read and write nothing beyond the edges."""
    indptr = offsets.clamp(0, edges).to(torch.int32).contiguous()
    return Rows(indptr, indptr.new_empty(edges), indptr.new_empty(0),
                structure.split_rows(indptr, edges))


class _SegmentSum(Closed):
    __slots__ = ("rows",)

    def forward(self, needs, x, offsets):
        self.rows = x.shape[0]
        variant = segment_variant(x[0].numel(), x.dtype)
        out = sums.forward(variant, _segments(offsets, x.shape[0]),
                           dense(x).view(-1, variant.heads, variant.width))
        return out.view(-1, *x.shape[1:]).detach(), (offsets,)

    def backward(self, needs, saved, grad):
        index = torch_ops.segment_index(saved[0], self.rows)
        # for rows behind the last segment
        grad = torch.cat([grad, grad.new_zeros(1, *grad.shape[1:])])
        return grad.index_select(0, index), None


class _SegmentExtremum(Closed):
    __slots__ = ("largest", "rows")

    def __init__(self, largest: bool):
        self.largest = largest

    def forward(self, needs, x, offsets):
        self.rows = x.shape[0]
        variant = segment_extremum_variant(x[0].numel(), x.dtype, self.largest)
        rows = dense(x).view(-1, variant.heads, variant.width)
        out, arg = extremum_kernels.forward(variant, _segments(offsets, x.shape[0]), rows)
        return out.view(-1, *x.shape[1:]).detach(), (arg,)

    def backward(self, needs, saved, grad):
        arg, = saved
        return _to_places(arg, grad.reshape(arg.shape), self.rows).view(-1, *grad.shape[1:]), None
