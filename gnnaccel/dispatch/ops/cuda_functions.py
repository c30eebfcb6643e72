"""The operations by CUDA kernels, with their backward. `torch_ops` says what they compute.

`edge_sum` and `take` are each other's gradient, and `elementwise` is made of both and itself, so their backward can be
differentiated again as it is; where backward of the others is recorded it runs on torch operations.

Operands may be changed in place after the call where the host allows it, so only those that backward reads are saved; and so may
results, which are detached where they were views: autograd refuses the views that a Function returns.
"""
from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel.cuda import aggregate as sums
from gnnaccel.cuda import edge_softmax as softmax_kernels
from gnnaccel.cuda import extremum as extremum_kernels
from gnnaccel.cuda import sddmm, structure
from gnnaccel.cuda.structure import Rows
from gnnaccel.dispatch.ops import torch_ops
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.ops.operands import Operands
from gnnaccel.dispatch.relational.cuda_maps import by_torch, dense


def _rows_by(graph: OpGraph, target: str) -> Rows:
    """The edges grouped by their destination ("v") or source ("u"); ``place`` is the edge's number."""
    return graph.view().csc() if target == "v" else graph.view().csr_by_id()


def _edges_by(graph: OpGraph, target: str) -> Rows:
    """The same, with the edge itself at the other end."""
    rows = _rows_by(graph, target)
    return replace(rows, other=rows.place, _launch=None, made={})


# --- between nodes and edges -------------------------------------------------------------------------------------------

def edge_sum(graph: OpGraph, x: Tensor, target: str) -> Tensor:
    """[nodes, *features]: the sums of the rows ``x`` [E, *features] of the edges that share the node at ``target``."""
    return _EdgeSum.apply(graph, x, target)


def take(graph: OpGraph, x: Tensor, target: str) -> Tensor:
    """[E, *features]: each edge's row of ``x`` [nodes, *features], of the node at ``target``."""
    return _Take.apply(graph, x, target)


def sum_variant(width: int, dtype: torch.dtype) -> sums.Variant:
    """The kernels of `edge_sum` for rows of ``width`` numbers."""
    return sums.variant(*sums.factored(width), dtype, dtype, "none", "position", False, False, False)


class _EdgeSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph, x, target):
        ctx.graph, ctx.target = graph, target
        variant = sum_variant(x[0].numel(), x.dtype)
        out = sums.forward(variant, _edges_by(graph, target), dense(x).view(-1, variant.heads, variant.width))
        return out.view(-1, *x.shape[1:]).detach()

    @staticmethod
    def backward(ctx, grad):
        return None, take(ctx.graph, grad, ctx.target), None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph, x, target):
        ctx.graph, ctx.target = graph, target
        return x.index_select(0, graph.index(target))

    @staticmethod
    def backward(ctx, grad):
        return None, edge_sum(ctx.graph, grad, ctx.target), None


def elementwise(graph: OpGraph, op: str, lhs: Tensor, rhs: Tensor, targets: tuple[str, str]) -> Tensor:
    """[E, F]: ``lhs`` op ``rhs``, "add" or "mul", each [rows of its target, F]."""
    return _Elementwise.apply(graph, op, lhs, rhs, targets)


class _Elementwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph, op, lhs, rhs, targets):
        ctx.graph, ctx.op, ctx.targets = graph, op, targets
        ctx.save_for_backward(*((lhs, rhs) if op == "mul" else ()))
        indices = (None if target == "e" else graph.index(target).contiguous() for target in targets)
        return sddmm.elementwise(op, graph.num_edges, dense(lhs), dense(rhs), *indices).detach()

    @staticmethod
    def backward(ctx, grad):
        graph, targets = ctx.graph, ctx.targets
        grads = []
        for side in (0, 1):
            if not ctx.needs_input_grad[2 + side]:
                grads.append(None)
                continue
            at_edges = grad
            if ctx.op == "mul":
                at_edges = elementwise(graph, "mul", grad, ctx.saved_tensors[1 - side], ("e", targets[1 - side]))
            grads.append(at_edges if targets[side] == "e" else edge_sum(graph, at_edges, targets[side]))
        return None, None, *grads, None


# --- inner products ----------------------------------------------------------------------------------------------------

def dot(graph: OpGraph, left: Tensor, right: Tensor) -> Tensor:
    """[E, H]: inner products of ``left`` [num_dst, H, D] at the destination and ``right`` [num_src, H, D] at the source."""
    return _Dot.apply(graph, left, right)


def dot_variant(heads: int, width: int, dtype: torch.dtype) -> sums.Variant:
    """The kernels of `dot`, and of the weighted sums that are its gradient."""
    return sums.variant(heads, width, dtype, dtype, "head", "place", False, False, False)


class _Dot(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph, left, right):
        ctx.graph = graph
        ctx.save_for_backward(left, right)
        variant = dot_variant(left.shape[1], left.shape[2], left.dtype)
        return sums.edge_dot(variant, graph.view().csc(), dense(left), dense(right))[:graph.num_edges].to(left.dtype).detach()

    @staticmethod
    def backward(ctx, grad):
        (left, right), graph, needs = ctx.saved_tensors, ctx.graph, ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            def again(left: Tensor, right: Tensor) -> Tensor:
                return (torch_ops.take(graph, left, "v") * torch_ops.take(graph, right, "u")).sum(-1)

            return None, *by_torch(again, (left, right), needs, grad)
        variant, weight = dot_variant(left.shape[1], left.shape[2], left.dtype), grad.float().contiguous()
        d_left = sums.forward(variant, _rows_by(graph, "v"), dense(right), weight) if needs[0] else None
        return None, d_left, sums.forward(variant, _rows_by(graph, "u"), dense(left), weight) if needs[1] else None


# --- softmax -----------------------------------------------------------------------------------------------------------

def edge_softmax(graph: OpGraph, logits: Tensor, by: str) -> Tensor:
    """`torch_ops.edge_softmax`."""
    return _EdgeSoftmax.apply(graph, logits, by)


class _EdgeSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph, logits, by):
        ctx.graph, ctx.by = graph, by
        out = softmax_kernels.forward(_rows_by(graph, by), logits.contiguous().view(logits.shape[0], -1))
        out = out.view(logits.shape).detach()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,), graph, by = ctx.saved_tensors, ctx.graph, ctx.by
        if torch.is_grad_enabled():  # out leads back to here
            share = out * grad
            return None, share - out * take(graph, edge_sum(graph, share, by), by), None
        flat = (t.contiguous().view(t.shape[0], -1) for t in (out, grad))
        return None, softmax_kernels.backward(_rows_by(graph, by), *flat).view(out.shape), None


# --- largest and smallest ----------------------------------------------------------------------------------------------

class Extremum(NamedTuple):
    """What `extremum` computes: the largest (or smallest) message of the edges that enter each node. ``op``: "copy", the row of
    the source, or of the edge with ``of_edges``; "add" or "mul": the source's and a weight [E] or [E, heads]."""

    op: str
    largest: bool
    of_edges: bool

    def variant(self, heads: int, width: int, dtype: torch.dtype, weight: str) -> extremum_kernels.Variant:
        return extremum_kernels.variant(heads, width, dtype, self.op, weight, self.largest, False, False)


def extremum(graph: OpGraph, form: Extremum, x: Tensor, weight: Tensor | None) -> Tensor:
    """[num_dst, H, D], of ``x`` [num_src or E, H, D]; -inf (or inf) where no edge enters."""
    return _Extremum.apply(graph, form, x, weight)


class _Extremum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph, form, x, weight):
        ctx.graph, ctx.form = graph, form
        rows = _edges_by(graph, "v") if form.of_edges else _rows_by(graph, "v")
        ctx.variant = _variant_of(form, x, weight)
        out, arg = extremum_kernels.forward(ctx.variant, rows, dense(x), _fp32(weight))
        ctx.like = None if weight is None else torch.empty_like(weight, device="meta")
        ctx.save_for_backward(*((x, weight) if form.op == "mul" else (None, None)), arg)
        return out.detach()

    @staticmethod
    def backward(ctx, grad):
        (x, weight, arg), graph, form, needs = ctx.saved_tensors, ctx.graph, ctx.form, ctx.needs_input_grad[2:]
        if form.of_edges:
            return None, None, _to_places(arg, grad, graph.num_edges), None
        if torch.is_grad_enabled():
            if form.op != "mul":
                d_weight = _weight_grad(graph, form, x, ctx.like, arg, grad) if needs[1] else None
                return None, None, _to_sources(graph, arg, grad), d_weight

            def again(x: Tensor, weight: Tensor) -> Tensor:
                return _extremum_by_torch(graph, form, x, weight)

            return None, None, *by_torch(again, (x, weight), needs, grad)
        d_x = d_weight = None
        if needs[0]:
            if form.op == "add":  # reads none, but is compiled for one
                weight = grad.new_empty(0, *ctx.like.shape[1:], dtype=torch.float32)
            d_x = extremum_kernels.pick(ctx.variant, _rows_by(graph, "u"), arg, dense(grad), _fp32(weight))
        if needs[1]:
            d_weight = _weight_grad(graph, form, x, ctx.like, arg, grad)
        return None, None, d_x, d_weight


def _variant_of(form: Extremum, x: Tensor, weight: Tensor | None) -> extremum_kernels.Variant:
    return form.variant(x.shape[1], x.shape[2], x.dtype, "none" if weight is None else "edge" if weight.dim() == 1 else "head")


def _fp32(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.float().contiguous()


def _to_places(arg: Tensor, grad: Tensor, edges: int) -> Tensor:
    """[edges, H, D]: each gradient at the edge that it belongs to. No two meet, as an edge ends in one node."""
    out = grad.new_zeros(edges + 1, *grad.shape[1:])
    return out.scatter(0, torch.where(arg < 0, edges, arg).long(), grad)[:edges]


def _to_sources(graph: OpGraph, arg: Tensor, grad: Tensor) -> Tensor:
    """[num_src, H, D]: the gradients added up at the sources of the edges that they belong to."""
    source = graph.index("u").long()[arg.clamp(min=0).long().view(-1)].view(arg.shape)
    return grad.new_zeros(graph.num_src, *grad.shape[1:]).scatter_add(0, source, grad.masked_fill(arg < 0, 0.0))


def _weight_grad(graph: OpGraph, form: Extremum, x: Tensor | None, weight: Tensor, arg: Tensor, grad: Tensor) -> Tensor:
    """Channels of a head may have chosen the same edge, so this adds. weight: only its form is looked at; x: with "mul"."""
    place, heads = arg.clamp(min=0).long(), arg.shape[1]
    value = grad.float()
    if form.op == "mul":
        value = value * x.gather(0, graph.index("u").long()[place.view(-1)].view(place.shape)).float()
    value = value.masked_fill(arg < 0, 0.0)
    at = place if weight.dim() == 1 else place * heads + torch.arange(heads, device=place.device).view(1, -1, 1)
    return value.new_zeros(weight.numel()).index_add(0, at.view(-1), value.reshape(-1)).view(weight.shape).to(weight.dtype)


def _extremum_by_torch(graph: OpGraph, form: Extremum, x: Tensor, weight: Tensor) -> Tensor:
    given = Operands(form.op, x, weight.view(weight.shape[0], -1, 1), (), False)
    return torch_ops.gspmm(graph, given, "max" if form.largest else "min")


# --- by segment --------------------------------------------------------------------------------------------------------

def segment_sum(x: Tensor, offsets: Tensor) -> Tensor:
    """[n, *features]: the sums of the rows of each segment."""
    return _SegmentSum.apply(x, offsets)


def segment_extremum(x: Tensor, offsets: Tensor, largest: bool) -> Tensor:
    """[n, *features]: the largest (or smallest) of each segment."""
    return _SegmentExtremum.apply(x, offsets, largest)


def segment_variant(width: int, dtype: torch.dtype) -> sums.Variant:
    """The kernels of `segment_sum`."""
    return sums.variant(*sums.factored(width), dtype, dtype, "none", "position", True, False, False)


def segment_extremum_variant(width: int, dtype: torch.dtype, largest: bool) -> extremum_kernels.Variant:
    """The kernels of `segment_extremum`."""
    return extremum_kernels.variant(*sums.factored(width), dtype, "copy", "none", largest, True, False)


def _segments(offsets: Tensor, edges: int) -> Rows:
    """Segments as rows whose edges are the positions themselves, so that no array over edges is read."""
    indptr = offsets.to(torch.int32).contiguous()
    return Rows(indptr, indptr.new_empty(edges), indptr.new_empty(0), structure.split_rows(indptr, edges))


class _SegmentSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offsets):
        ctx.rows = x.shape[0]
        ctx.save_for_backward(offsets)
        variant = segment_variant(x[0].numel(), x.dtype)
        out = sums.forward(variant, _segments(offsets, x.shape[0]), dense(x).view(-1, variant.heads, variant.width))
        return out.view(-1, *x.shape[1:]).detach()

    @staticmethod
    def backward(ctx, grad):
        (offsets,) = ctx.saved_tensors
        index = torch_ops.segment_index(offsets, ctx.rows)
        grad = torch.cat([grad, grad.new_zeros(1, *grad.shape[1:])])  # for rows behind the last segment
        return grad.index_select(0, index), None


class _SegmentExtremum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offsets, largest):
        ctx.rows = x.shape[0]
        variant = segment_extremum_variant(x[0].numel(), x.dtype, largest)
        rows = dense(x).view(-1, variant.heads, variant.width)
        out, arg = extremum_kernels.forward(variant, _segments(offsets, x.shape[0]), rows)
        ctx.save_for_backward(arg)
        return out.view(-1, *x.shape[1:]).detach()

    @staticmethod
    def backward(ctx, grad):
        (arg,) = ctx.saved_tensors
        return _to_places(arg, grad.reshape(arg.shape), ctx.rows).view(-1, *grad.shape[1:]), None, None
