"""Maps by relation and sums over edges on torch operations: any device, and any derivative.

The operations are closed under differentiation: each backward is made of the others.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.ir.program import RELATION
from gnnaccel.dispatch.relational.gather import Gather
from gnnaccel.dispatch.relational.pairs import Blocks, Pairs
from gnnaccel.dispatch.run import torch_segments
from gnnaccel.dispatch.run.autograd import Closed

_ALONE = 4096  # elements of a block's result from which another call costs less than a copy of it
_CPU_DTYPES = (torch.float32, torch.float64)
_NARROW = 64  # numbers of a row up to which gradients of relations are added up in double precision


# --- maps by relation -----------------------------------------------------------------------------

def multiply(pairs: Pairs | Blocks, rows: Tensor, weight: Tensor, transposed: bool = False,
             gather: Gather | None = None, bias: Tensor | None = None) -> Tensor:
    """[U, blocks, N]: each row times its relation's matrix, block by block; plus its ``bias``
    [relations, N], for one block.

    pairs: the `Pairs` whose rows these are; rows [U, blocks, K], or rows of the coarser domain that
    ``gather`` reads; weight [relations, blocks, K, N], or [.., N, K] when ``transposed``.
    """
    rows = rows if gather is None else take(rows, gather)
    return _Multiply(pairs, transposed).apply(rows, weight, bias)


def outer(pairs: Pairs, left: Tensor, right: Tensor) -> Tensor:
    """[relations, blocks, K, N]: the sum over a relation's rows of left [U, blocks, K] times right
    [U, blocks, N]."""
    return _Outer(pairs).apply(left, right)


class _Multiply(Closed):
    __slots__ = ("pairs", "transposed")

    def __init__(self, pairs: Pairs | Blocks, transposed: bool):
        self.pairs, self.transposed = pairs, transposed

    def forward(self, needs, rows, weight, bias):
        pairs, saved = self.pairs, (rows, weight)
        matrix = weight.transpose(-1, -2) if self.transposed else weight
        out = rows.new_empty(rows.shape[0], rows.shape[1], matrix.shape[-1])
        if rows.shape[1] == 1:
            _by_segment(pairs, rows.squeeze(1), matrix.squeeze(1), bias, out.squeeze(1))
            return out, saved
        for r, a, b in pairs.bounds:
            if (b - a) * out.shape[2] >= _ALONE:
                for block in range(rows.shape[1]):
                    torch.mm(rows[a:b, block], matrix[r, block], out=out[a:b, block])
            else:
                out[a:b] = torch.bmm(rows[a:b].transpose(0, 1), matrix[r]).transpose(0, 1)
        return out, saved

    def backward(self, needs, saved, grad):
        (rows, weight), pairs = saved, self.pairs
        d_rows = multiply(pairs, grad, weight, not self.transposed) if needs[0] else None
        d_weight = None
        if needs[1]:
            d_weight = outer(pairs, grad, rows) if self.transposed else outer(pairs, rows, grad)
        return d_rows, d_weight, _sums(pairs, grad) if needs[2] else None


def _by_segment(pairs: Pairs | Blocks, rows: Tensor, matrix: Tensor, bias: Tensor | None,
                out: Tensor) -> None:
    """The product for one block. Views are made by one call for all: each costs as much as a small
    product."""
    bounds, sizes = pairs.bounds, pairs.sizes
    for (r, _, _), part, product in zip(bounds, rows.split(sizes), out.split(sizes)):
        if bias is None:
            torch.mm(part, matrix[r], out=product)
        else:
            torch.addmm(bias[r], part, matrix[r], out=product)


def _sums(pairs: Pairs | Blocks, grad: Tensor) -> Tensor:
    """[relations, N]: the sums over each relation's rows, of one block."""
    by_relation = {r: grad[a:b, 0].sum(0) for r, a, b in pairs.bounds}
    none = grad.new_zeros(grad.shape[2])
    return torch.stack([by_relation.get(r, none) for r in range(pairs.ptr.shape[0] - 1)])


class _Outer(Closed):
    __slots__ = ("pairs",)

    def __init__(self, pairs: Pairs):
        self.pairs = pairs

    def forward(self, needs, left, right):
        pairs = self.pairs
        out = left.new_zeros(pairs.ptr.shape[0] - 1, left.shape[1], left.shape[2], right.shape[2])
        if left.shape[1] == 1:
            ends, sums = (t.squeeze(1).split(pairs.sizes) for t in (left, right)), out.squeeze(1)
            for (r, _, _), left_rows, right_rows in zip(pairs.bounds, *ends):
                torch.mm(left_rows.t(), right_rows, out=sums[r])
        else:
            for r, a, b in pairs.bounds:
                torch.bmm(left[a:b].permute(1, 2, 0), right[a:b].transpose(0, 1), out=out[r])
        return out, (left, right)

    def backward(self, needs, saved, grad):
        left, right = saved
        return (multiply(self.pairs, right, grad, True) if needs[0] else None,
                multiply(self.pairs, left, grad) if needs[1] else None)


# --- sums over edges ------------------------------------------------------------------------------

def aggregate(graph: GraphView, rows: Tensor, weight: Tensor | None = None) -> Tensor:
    """[num_dst, width] or, with a weight [E, heads], [num_dst, heads, width]: the sum over the
    edges that enter a node of the weight times the row of the source.

    rows: [num_src, width], or [num_src, heads, width] with a weight per head. weight: [E] or [E,
    heads], in the order of the graph's edge ids.
    """
    edges = graph.edges(ids=weight is not None)
    if weight is not None and edges.eid is not None:
        weight = weight.index_select(0, edges.eid)
    if (rows.device.type != "cpu" or rows.dtype not in _CPU_DTYPES or not edges.src.shape[0]
        or _forward_mode()):
        message = rows.index_select(0, edges.src)
        if weight is not None:
            message = message * weight.reshape(*weight.shape, *(1,) * (rows.dim() - weight.dim()))
        sums = message.new_zeros((graph.num_dst, *message.shape[1:]))
        return sums.index_add(0, edges.dst, message).to(rows.dtype)
    segments = edges.segments(graph.num_src)
    if weight is None or weight.dim() == 1:
        weight = None if weight is None else weight.to(rows.dtype)
        out = torch_segments.weighted_sum(segments, weight, rows.flatten(1))
        return out.view(-1, *rows.shape[1:])
    per_head = [torch_segments.weighted_sum(segments, w.to(rows.dtype), x)
                for w, x in zip(weight.unbind(1), rows.unbind(1))]
    return torch.stack(per_head, 1)


def take(rows: Tensor, gather: Gather) -> Tensor:
    """The rows of a coarser domain as a finer one reads them."""
    if rows.device.type != "cpu" or _forward_mode():
        return rows.index_select(0, gather.index)
    # on the CPU adding rows to their places is several times as slow
    relations = isinstance(gather, Gather) and gather.coarse == RELATION
    long = relations and rows.shape[1:].numel() <= _NARROW
    return Take(gather, _sum_in_double if long else aggregate).apply(rows)


def _sum_in_double(graph: GraphView, rows: Tensor) -> Tensor:
    """`aggregate` for long sums: a relation has thousands of edges, one after the other.
    """
    return aggregate(graph, rows.double()).to(rows.dtype)


class Take(Closed):
    """`take`, whose gradient is the sum of the rows of each place by ``aggregate``, `aggregate`
    here or another way to it."""

    __slots__ = ("aggregate", "gather")

    def __init__(self, gather: Gather, aggregate: Callable[..., Tensor]):
        self.gather, self.aggregate = gather, aggregate

    def forward(self, needs, rows):
        return rows.index_select(0, self.gather.index), ()

    def backward(self, needs, saved, grad):
        sums = self.aggregate(self.gather.members, grad.flatten(1))
        return sums.view(-1, *grad.shape[1:]),


def _forward_mode() -> bool:
    return torch.autograd.forward_ad._current_level >= 0
