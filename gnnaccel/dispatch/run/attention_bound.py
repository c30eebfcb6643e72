"""A GAT call bound to its weights and kernels, for graphs so small that most of the time goes into
the interpreter.

For a plain call the results of the general way's decisions are known: which kernels, which inputs,
what becomes of the result. A bound call goes from the features to the launches in a straight line,
and takes no more allocations and autograd arguments than it needs. Kernels and arithmetic are those
of the general way. A call that repeats another one, which the router knows by its signature, is
bound already.

A bound call holds the weights, not the graph, which is passed in each time: the structure cache
decides how long that lives.
"""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.attention import additive
from gnnaccel.cuda.runtime.launch import NOTHING, THREADS, Kernels, dense, grid, workspace
from gnnaccel.cuda.structures import bands
from gnnaccel.cuda.traverse import head_dot
from gnnaccel.cuda.traverse.column_sum import column_sum
from gnnaccel.cuda.traverse.dropout import OFF
from gnnaccel.dispatch.run import skinny_matmul
from gnnaccel.dispatch.run.autograd import Operation

if TYPE_CHECKING:
    from gnnaccel.dispatch.graph.view import GraphView
    from gnnaccel.dispatch.run.attention import Call

_NO_DROPOUT = OFF.args
_FORWARD_ONLY = (0, 0, 0)  # addresses to save for backward: none


class Weights(NamedTuple):
    """Weights of a GAT, all fp32: ``weight`` [H * D, F] of the map; ``att_src``, ``att_dst`` H * D
    numbers each; ``bias`` [H * D] or None."""

    weight: Tensor
    att_src: Tensor
    att_dst: Tensor
    bias: Tensor | None = None


def bind(call: Call, weights: Weights) -> Bound | None:
    """``call`` bound, if it is a GAT whose sources are its destinations, without edge features;
    None for calls that only the general way can do.

    A bound call reads fp32 rows. Under autocast the map makes rows of fewer bytes, whatever the
    dtype of the result.
    """
    if (torch.is_autocast_enabled(weights.weight.device.type) or call.attention.places
        or not is_plain(call)):
        return None
    for t in (weights.weight, weights.att_src, weights.att_dst, weights.bias):
        if (t is not None
            and not (t.dtype is torch.float32 and t.is_contiguous() and t.data_ptr() % 16 == 0)):
            return None
    return Bound(call, weights)


def is_plain(call: Call) -> bool:
    """Whether ``call`` is one for `Launches`, if its rows are fp32 and its sources the
    destinations."""
    return (call.attention.score == "additive" and not call.pmf
            and call.out_dtype is torch.float32 and not in_bands(call))


@functools.lru_cache(maxsize=256)
def _kernels(heads: int, width: int, wide: bool, edge: bool,
             dropout: bool) -> tuple[Kernels, Kernels, additive.Variant]:
    """Kernels of scores and of a forward pass alone, and the variant for training."""
    row = torch.float32
    infer, train = (additive.variant(heads, width, row, row, edge, dropout, grad, wide)
                    for grad in (False, True))
    return head_dot.kernels(heads, width, row), infer.forward_kernels, train


def in_bands(call: Call) -> bool:
    """Whether the general way gathers in bands, forward or backward: such a graph is not one for
    which the interpreter counts."""
    graph = call.graph
    if max(graph.num_src, graph.num_dst) * 4 * call.heads * call.width < bands.LEAST:
        return False
    whole = additive.variant(call.heads, call.width, torch.float32, torch.float32)
    src, dst, edges, device = graph.num_src, graph.num_dst, graph.num_edges, graph.device
    return (whole.banded(src, dst, edges, device) is not whole
            or whole.banded(dst, src, edges, device) is not whole)


class Launches:
    """The launches of a GAT's kernels over fp32 rows [N, heads, width], in a straight line; the
    sources are the destinations. ``call``: like those to come; ``step``: from a head's number in an
    attention vector to the next one's.

    Of tensors the functions take addresses: ``att_src``, ``att_dst`` (0: of the destinations there
    are no terms), ``bias`` (0: none), ``a_edge`` [edges, heads] fp32 (0 unless the call has such);
    ``drop``: `Dropout.args`.
    """

    __slots__ = ("heads", "width", "slope", "step", "layout", "places", "program", "attention",
                 "_dot", "_infer", "_train", "variant", "wide")

    def __init__(self, call: Call, step: int):
        self.heads, self.width = call.heads, call.width
        self.slope, self.step = np.float32(call.attention.slope), np.int32(step)
        self.program, self.attention = call.program, call.attention
        self.places = call.attention.places
        self._dot, self._infer, self.variant = _kernels(
            call.heads, call.width, call.graph.wide, call.attention.edge,
            call.attention.dropout > 0)
        self.wide = call.graph.wide
        self._train, self.layout = self.variant.forward_kernels, self.variant.layout

    def forward(self, rows: Tensor, vectors: Sequence[int], graph: GraphView, out: Tensor,
                train: bool, a_edge: int = 0, drop: tuple = _NO_DROPOUT) -> Tensor:
        """Fill ``out``, N x heads x width numbers; ``vectors``: ``att_src``, ``att_dst``, ``bias``.
        The result, for backward: `additive.Saved.parts` as [2, N, H, D], and behind them per node
        and head the scores by source and by destination, then `additive.Saved.small`: [6, N, H]."""
        h, d, n, layout = self.heads, self.width, rows.shape[0], self.layout
        (att_src, att_dst, bias), step = vectors, 4 * n * h
        graph_rows = graph.csc(self.places)
        kept = rows.new_empty(n * h * (2 * d + 6 if train else 2))
        plus, of_rows = kept.data_ptr(), rows.data_ptr()
        scores = plus + 2 * d * step if train else plus
        saved = (scores + 2 * step, plus, plus + d * step) if train else _FORWARD_ONLY
        a_dst = scores + step if att_dst else 0
        self._dot("dot")(grid(n, layout, layout.slots), THREADS, 0,
                         (np.int32(n), of_rows, att_src, att_dst, self.step, scores, a_dst))
        launch = graph_rows.launched or graph_rows.launch()
        memory, chunks = (workspace(launch.chunks, (h * d, h * d if train else 0, 3 * h),
                                    rows.device) if launch.chunks else NOTHING)
        kernels, outputs = self._train if train else self._infer, (out.data_ptr(), bias, *saved)
        kernels("forward")(grid(launch.slots + n, layout), THREADS, layout.scratch, (
            *launch.graph, *launch.split, scores, a_dst, a_edge, self.slope, *drop,
            of_rows, *outputs, *chunks))
        if launch.heavy:
            kernels("merge")(grid(launch.heavy, layout), THREADS, layout.scratch,
                             (*launch.merge, launch.graph[3], *outputs, *chunks))
        return kept

    def backward(self, graph: GraphView, att_src: int, att_dst: int, rows: Tensor, kept: Tensor,
                 grad: Tensor, blocks: int, a_edge: int = 0, d_a_edge: int = 0,
                 drop: tuple = _NO_DROPOUT) -> tuple[Tensor, Tensor]:
        """`additive_backward.backward`: the gradient of the rows, shaped as they are, and fp32
        memory with, per node and head, four numbers of the kernels' own, then the gradients of the
        scores by destination and by source; then room for ``blocks`` partial sums. ``kept``:
        `forward`'s; ``d_a_edge``: the address of the gradient of ``a_edge``, 0 where none is
        wanted."""
        h, d, n, layout = self.heads, self.width, rows.shape[0], self.variant.backward_layout
        by_src, by_dst = graph.csr(self.places), graph.csc(self.places)
        launch, step = by_src.launched or by_src.launch(), 4 * n * h
        kernels = self.variant.edge_grad_kernels if d_a_edge else self.variant.backward_kernels
        scratch = rows.new_empty(h * (6 * n + blocks * 2 * d))
        values = torch.empty_like(rows)
        packed, plus, of_grad, of_rows = (scratch.data_ptr(), kept.data_ptr(), grad.data_ptr(),
                                          rows.data_ptr())
        a_src, d_a_dst = plus + 2 * d * step, packed + 4 * step
        kernels("prepare")(grid(n, layout, layout.slots), THREADS, 0, (
            np.int32(n), of_grad, plus, plus + step * d, a_src + 2 * step,
            a_src + step if att_dst else 0, self.slope,
            *(by_dst.launched or by_dst.launch()).graph[:2], of_rows, packed, d_a_dst))
        memory, chunks = (workspace(launch.chunks, (h * d, h * d, h), rows.device)
                          if launch.chunks else NOTHING)
        tail = (of_rows, att_src, att_dst, self.step, d_a_dst if att_dst else 0, values.data_ptr(),
                d_a_dst + step)
        kernels("sources")(grid(launch.slots + n, layout), THREADS, layout.scratch, (
            *launch.graph[:3], by_dst.place.data_ptr(), launch.graph[3], *launch.split, packed,
            a_src, a_edge, self.slope, *drop, of_grad, *tail, d_a_edge, *chunks))
        if launch.heavy:
            kernels("merge")(grid(launch.heavy, layout), THREADS, layout.scratch,
                             (*launch.merge, *tail, *chunks))
        return values, scratch

    def att_grads(self, rows: Tensor, scratch: Tensor, blocks: int, d_src: int,
                  d_dst: int) -> None:
        """Write the gradients of both attention vectors, out of `backward`'s memory, to these
        addresses, strided as the vectors are; 0: there is no such vector."""
        n, h = rows.shape[0], self.heads
        d_a_dst = scratch.data_ptr() + 16 * n * h
        head_dot.launch_grad(self._dot, self.layout, self.heads, self.width, blocks, np.int32(n),
                             rows.data_ptr(), d_a_dst + 4 * n * h, d_a_dst if d_dst else 0,
                             d_a_dst + 8 * n * h,
                             (d_src, d_dst, self.step))


class Bound(Launches):
    """``bound(x, graph)``: x [N, F] fp32 as when it was bound -> [N, H * D]."""

    __slots__ = ("weights", "_addresses")

    def __init__(self, call: Call, weights: Weights):
        super().__init__(call, call.width)
        self.weights = weights
        self._addresses = tuple([0 if t is None else t.data_ptr() for t in weights[1:]])

    def valid(self) -> bool:
        """Whether the vectors and the bias lie where they lay, in their order; ``.data`` may have
        been replaced, also by other strides over the same memory. The map is made by torch."""
        return self._addresses == tuple([0 if t is None else t.is_contiguous() and t.data_ptr()
                                         for t in self.weights[1:]])

    def serves(self, call: Call) -> bool:
        """Whether ``call``, like the one that was bound but over another graph, is this one."""
        return (self.wide is call.graph.wide and not call.pmf and self.valid()
                and not in_bands(call))

    def __call__(self, x: Tensor, graph: GraphView) -> Tensor:
        w = self.weights
        if (torch.is_grad_enabled()
            and (x.requires_grad or w.weight.requires_grad or w.att_src.requires_grad
                                        or w.att_dst.requires_grad
                 or (w.bias is not None and w.bias.requires_grad))):
            return _BoundAttention(self, graph).apply(x, w.weight, w.att_src, w.att_dst, w.bias)
        rows = skinny_matmul.linear(x, w.weight, None)
        out = torch.empty_like(rows)
        self.forward(rows, self._addresses, graph, out, False)
        return out


class _BoundAttention(Operation):
    __slots__ = ("bound", "graph")

    def __init__(self, bound: Bound, graph: GraphView):
        self.bound, self.graph = bound, graph

    def forward(self, needs, x, weight, att_src, att_dst, bias):
        bound, rows = self.bound, skinny_matmul.linear(x, weight, None)
        out = torch.empty_like(rows)
        kept = bound.forward(rows, bound._addresses, self.graph, out, True)
        return out, (x, weight, att_src, att_dst, bias, rows, kept)

    def backward(self, needs, saved, grad):
        x, weight, att_src, att_dst, bias, rows, kept = saved
        bound, grad = self.bound, dense(grad)
        blocks = head_dot.grad_blocks(x.shape[0], bound.layout)
        src, dst = dense(att_src), dense(att_dst)  # held until the kernels are launched
        values, scratch = bound.backward(self.graph, src.data_ptr(), dst.data_ptr(), rows, kept,
                                         grad, blocks)
        d_src = d_dst = None
        if needs[2] or needs[3]:
            d_src, d_dst = torch.empty_like(src), torch.empty_like(dst)
            bound.att_grads(rows, scratch, blocks, d_src.data_ptr(), d_dst.data_ptr())
        return (skinny_matmul.matmul(values, weight) if needs[0] else None,
                values.t() @ x if needs[1] else None, d_src, d_dst,
                column_sum(grad) if bias is not None and needs[4] else None)

    def reference(self, x, weight, att_src, att_dst, bias):
        from gnnaccel.dispatch.run import torch_backend

        h, d = self.bound.heads, self.bound.width
        rows = torch.nn.functional.linear(x, weight).view(-1, h, d)
        tensors = {"x": rows, "att_src": att_src, "att_dst": att_dst}
        if bias is not None:
            tensors["bias"] = bias.view(h, d)
        return torch_backend.run(self.bound.program, self.graph.edges(False), tensors,
                                 None).flatten(1)
