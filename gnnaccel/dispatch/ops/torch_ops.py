"""The operations on plain torch operations: any device, any floating dtype, any derivative.

Messages have the size of the edges here. Half types are added up in fp32.
"""
from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.ops.operands import Operands

_HALF = (torch.float16, torch.bfloat16)
_INFINITY = float("inf")


def gsddmm(graph: OpGraph, operands: Operands, lhs_target: str, rhs_target: str) -> Tensor:
    """[E, *shape]: op of the two operands' rows at each edge: at its source ("u"), its destination
    ("v") or itself ("e")."""
    lhs = None if operands.lhs is None else take(graph, operands.lhs, lhs_target)
    rhs = None if operands.rhs is None else take(graph, operands.rhs, rhs_target)
    if lhs is None or rhs is None:
        return rhs if lhs is None else lhs  # type: ignore[return-value]
    if operands.op == "dot":
        return (lhs * rhs).sum(-1, keepdim=True)
    return lhs + rhs if operands.op == "add" else lhs * rhs


def gspmm(graph: OpGraph, operands: Operands, reduce: str) -> Tensor:
    """[num_dst, *shape]: ``reduce`` ("sum", "max", "min"), over the edges that enter a node, of op
    of the first operand at the source and the second at the edge.

    Nodes without edges get 0 of a sum and -inf of "max" (inf of "min"), but 0 where the whole graph
    has no edges.
    """
    message = (apart(operands.rhs)  # type: ignore[arg-type]
               if operands.lhs is None else gsddmm(graph, operands, "u", "e"))
    return reduced(message, graph.index("v"), graph.num_dst, reduce)


def apart(x: Tensor) -> Tensor:
    """``x``, in memory of its own if it is differentiated: torch keeps the tensor that it adds up
    or picks from, and would refuse to go back once the caller has changed it in place, which the
    host allows."""
    return x.clone() if x.requires_grad and torch.is_grad_enabled() else x


def take(graph: OpGraph, x: Tensor, target: str) -> Tensor:
    """[E, *features]: the rows of ``x`` as the edges see them. Gradients of a row are added up in
    fp32, as `added` adds messages: on a CPU torch does so only for indices in int64."""
    if target == "e":
        return x
    wide = x.float() if x.dtype in _HALF and x.requires_grad and torch.is_grad_enabled() else x
    return wide.index_select(0, graph.index(target)).to(x.dtype)


def reduced(message: Tensor, index: Tensor, rows: int, reduce: str) -> Tensor:
    """[rows, *features]: the ``reduce`` of the messages [E, *features] that ``index`` [E] sends to
    each row."""
    if reduce == "sum" or not message.shape[0]:
        return added(message, index, rows)
    return extremum(message, index, rows, reduce == "max")


def added(message: Tensor, index: Tensor, rows: int) -> Tensor:
    """[rows, *features]: the sums of the messages of each row."""
    wide = message.float() if message.dtype in _HALF else message
    return wide.new_zeros(rows, *wide.shape[1:]).index_add(0, index, wide).to(message.dtype)


def extremum(message: Tensor, index: Tensor, rows: int, largest: bool) -> Tensor:
    """[rows, *features]: the largest (or smallest) message of each row, of which the first among
    equals gets the gradient.

    NaN loses against everything. Rows without messages are -inf (or inf).
    """
    worst = -_INFINITY if largest else _INFINITY
    if not message.shape[0]:
        # the result is differentiable, like any other
        return added(message, index, rows) + worst
    first = first_extremum(message.detach(), index, rows, largest)
    present = first < message.shape[0]
    return message.gather(0, first.clamp(max=message.shape[0] - 1)).masked_fill(~present, worst)


def first_extremum(message: Tensor, index: Tensor, rows: int, largest: bool) -> Tensor:
    """[rows, *features] int64: the position of each row's extremum, E where there is none."""
    edges, tail = message.shape[0], message.shape[1:]
    number = ~message.isnan()
    worst = -_INFINITY if largest else _INFINITY
    value = message.masked_fill(~number, worst)
    to = index.long().view(-1, *(1,) * len(tail)).expand_as(value)
    best = value.new_full((rows, *tail),
                          worst).scatter_reduce(0, to, value, "amax" if largest else "amin")
    position = torch.arange(edges, device=index.device).view(-1, *(1,) * len(tail))
    position = torch.where(number & (value == best.index_select(0, index)), position, edges)
    return position.new_full((rows, *tail), edges).scatter_reduce(0, to, position, "amin")


def edge_softmax(graph: OpGraph, logits: Tensor, by: str = "v") -> Tensor:
    """[E, *features]: the softmax of ``logits`` over the edges that share their destination ("v")
    or source ("u")."""
    index, rows = graph.index(by), graph.rows(by)
    if not logits.shape[0]:
        return logits * 1.0
    score = logits.float() if logits.dtype in _HALF else logits
    tail = score.shape[1:]
    to = index.long().view(-1, *(1,) * len(tail)).expand_as(score)
    top = score.new_full((rows, *tail), -_INFINITY).scatter_reduce(0, to, score.detach(), "amax")
    part = torch.exp(score - top.index_select(0, index))
    total = part.new_zeros(rows, *tail).index_add(0, index, part)
    return (part / total.index_select(0, index)).to(logits.dtype)


# --- by segment -----------------------------------------------------------------------------------

def segment_index(offsets: Tensor, rows: int) -> Tensor:
    """[rows] int64: the segment of each row, of segments that begin at ``offsets`` [n + 1]; n of
    rows behind the last one."""
    row = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets.contiguous(), row, right=True) - 1


def segment_reduce(x: Tensor, offsets: Tensor, reduce: str) -> Tensor:
    """[n, *features]: the ``reduce`` of the rows of each segment; rows behind the last segment
    count nowhere.

    Empty segments: 0 of a sum, -inf of "max", inf of "min".
    """
    count, index = offsets.shape[0] - 1, segment_index(offsets, x.shape[0])
    if reduce == "sum":
        out = added(apart(x), index, count + 1)[:count]
    else:
        out = extremum(apart(x), index, count + 1, reduce == "max")[:count]
    # no view: views made without gradients cannot be changed in place with
    return out if torch.is_grad_enabled() else out.detach()


def scatter_add(x: Tensor, index: Tensor, rows: int) -> Tensor:
    """[rows, *features]: row i of ``x`` added to row ``index[i]``."""
    return added(apart(x), index, rows)
