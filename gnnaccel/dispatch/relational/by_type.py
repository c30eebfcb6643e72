"""HGT's maps by node type on CUDA: what stands before and after its attention, one node of autograd each.

All types' rows lie in one array, type after type, so a map by type is a product by segment. Where backward is itself recorded it
runs on torch operations.
"""
from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.cuda import segment_gemm, segment_gemm_grad
from gnnaccel.dispatch.relational.cuda_maps import by_torch, dense, product
from gnnaccel.dispatch.relational.cuda_program import column_sums, outer
from gnnaccel.dispatch.relational.view import RelationView
from gnnaccel.dispatch.tall import precision


def project(view: RelationView, parts: int, weight: Tensor, bias: Tensor | None, x: list[Tensor]) -> tuple[Tensor, ...]:
    """The rows of all types in one array, and ``parts`` maps of them by type, each [nodes, C].

    weight [types, parts * C, K], bias [types, parts * C]. The first result is for `finish` alone, whose gradient of it this adds
    to.
    """
    return _Project.apply(view, parts, weight, bias, *x)


def _project_by_torch(parts: int, weight: Tensor, bias: Tensor | None, *x: Tensor) -> tuple[Tensor, ...]:
    mapped = [F.linear(rows, w, None if bias is None else bias[t]) for t, (rows, w) in enumerate(zip(x, weight))]
    return torch.cat(x), *torch.cat(mapped).chunk(parts, 1)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx, view, parts, weight, bias, *x):
        sizes = tuple(rows.shape[0] for rows in x)
        rows, segments = torch.cat(x), view.blocks(sizes).segments
        ctx.view, ctx.parts, ctx.sizes = view, parts, sizes
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight, bias, *x)
        biases = [None] * parts if bias is None else bias.unflatten(1, (parts, -1)).transpose(0, 1).contiguous()
        return rows, *(product(segments, rows, w, True, None, b) for w, b in zip(weight.chunk(parts, 1), biases))

    @staticmethod
    def backward(ctx, d_rows, *grads):
        weight, bias, *x = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            given = [(t, g) for t, g in enumerate((d_rows, *grads)) if g is not None]

            def again(*inputs: Tensor | None) -> tuple[Tensor, ...]:
                found = _project_by_torch(ctx.parts, *inputs)
                return tuple(found[t] for t, _ in given)

            return None, None, *by_torch(again, (weight, bias, *x), needs, tuple(g for _, g in given))
        return None, None, *_project_backward(ctx, weight, bias, x, needs, d_rows, [dense(g) for g in grads])


def _project_backward(ctx, weight: Tensor, bias: Tensor | None, x: list[Tensor], needs: tuple[bool, ...], d_rows: Tensor | None,
                      grads: list[Tensor]) -> tuple:
    segments, chunks = ctx.view.blocks(ctx.sizes).segments, weight.chunk(ctx.parts, 1)
    d_weight = d_bias = None
    d_x = [None] * len(x)
    if needs[0]:
        rows = torch.cat(x)
        d_weight = torch.cat([outer(segments, rows, g, w, True, None, None) for g, w in zip(grads, chunks)], 1).to(weight.dtype)
    if needs[1] and bias is not None:
        d_bias = torch.cat([column_sums(ctx.view, ctx.sizes, g) for g in grads], 1).to(bias.dtype)
    if any(needs[2:]):
        for grad, matrix in zip(grads, chunks):
            d_rows = _add_product(segments, grad, matrix, d_rows)
        d_x = d_rows.split(ctx.sizes)
    return d_weight, d_bias, *(d if need else None for d, need in zip(d_x, needs[2:]))


def _add_product(segments: segment_gemm.Segments, rows: Tensor, matrix: Tensor, into: Tensor | None) -> Tensor:
    if into is None:
        return product(segments, rows, matrix, False, None)
    if into.dtype is not torch.float32:  # what the kernel adds to
        return into.add_(product(segments, rows, matrix, False, None))
    return product(segments, rows, matrix, False, None, into=into)


# --- after the attention -----------------------------------------------------------------------------------------------

def finish(view: RelationView, sizes: tuple[int, ...], out: Tensor, weight: Tensor, bias: Tensor | None, alpha: Tensor | None,
           rows: Tensor) -> tuple[Tensor, ...]:
    """Each type's GELU of ``out``, mapped by type; with ``alpha`` [types], that share of it and the rest of ``rows``.

    The results are no views: each may be changed in place.
    """
    return _Finish.apply(view, sizes, out, weight, bias, alpha, None if alpha is None else rows)


def _finish_by_torch(sizes: tuple[int, ...], out: Tensor, weight: Tensor, bias: Tensor | None, alpha: Tensor | None,
                     rows: Tensor | None) -> tuple[Tensor, ...]:
    mapped = [F.linear(F.gelu(part), weight[t], None if bias is None else bias[t]) for t, part in enumerate(out.split(sizes))]
    if alpha is None:
        return tuple(mapped)
    return tuple(torch.lerp(x, part, a) for x, part, a in zip(rows.split(sizes), mapped, alpha))


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, view, sizes, out, weight, bias, alpha, rows):
        blocks = view.blocks(sizes)
        found = product(blocks.segments, F.gelu(out), weight, True, None, bias)
        if alpha is not None:
            torch.lerp(rows, found, alpha.index_select(0, blocks.relation).unsqueeze(1), out=found)
        ctx.view, ctx.sizes = view, sizes
        ctx.save_for_backward(out, weight, bias, alpha, rows)
        return tuple(part.data for part in found.split(sizes))

    @staticmethod
    def backward(ctx, *grads):
        inputs, needs = ctx.saved_tensors, ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            return None, None, *by_torch(functools.partial(_finish_by_torch, ctx.sizes), inputs, needs, grads)
        return None, None, *_finish_backward(ctx.view, ctx.sizes, inputs, needs, torch.cat(grads))


def _finish_backward(view: RelationView, sizes: tuple[int, ...], inputs: tuple, needs: tuple[bool, ...], grad: Tensor) -> tuple:
    """With y = gelu(out) W + b and the result alpha y + (1 - alpha) rows, the sum of <grad, y> over a type's rows, which the
    gradient of alpha takes, follows from the sums that those of W and b take: <W, sum of gelu(out)^T grad> + <b, sum of grad>."""
    out, weight, bias, alpha, rows = inputs
    blocks, grown = view.blocks(sizes), F.gelu(out)
    by_weight = outer(blocks.segments, grown, grad, weight, True, None, None) if needs[1] or needs[3] else None
    by_bias = column_sums(view, sizes, grad) if bias is not None and (needs[2] or needs[3]) else None
    d_alpha = d_rows = d_out = None
    if alpha is not None and needs[3]:
        d_alpha = (weight * by_weight).sum((1, 2)) - _inner(blocks.segments, rows, grad)
        d_alpha = (d_alpha if bias is None else d_alpha + (bias * by_bias).sum(1)).to(alpha.dtype)
    if alpha is not None:
        share = alpha.view(-1, 1)
        d_rows = grad * (1 - share).index_select(0, blocks.relation) if needs[4] else None
        weight, by_weight, by_bias = (None if t is None else t * share.view(-1, *(1,) * (t.dim() - 1))
                                      for t in (weight, by_weight, by_bias))
    if needs[0]:
        d_out = torch.ops.aten.gelu_backward(product(blocks.segments, grad, weight, False, None), out)
    return d_out, _like(by_weight, inputs[1], needs[1]), _like(by_bias, bias, needs[2]), d_alpha, d_rows


def _like(grad: Tensor | None, t: Tensor | None, need: bool) -> Tensor | None:
    return grad.to(t.dtype) if need and t is not None else None


def _inner(segments: segment_gemm.Segments, left: Tensor, right: Tensor) -> Tensor:
    """[types]: the sum over a type's rows of their inner products: the trace of what one pass over both makes."""
    found = segment_gemm_grad.weight_grad(segments, dense(left), right, precision=precision())
    return found[:, 0].diagonal(dim1=1, dim2=2).sum(1)
