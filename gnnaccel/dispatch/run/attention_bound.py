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

from gnnaccel.cuda import additive, bands, head_dot
from gnnaccel.cuda.column_sum import column_sum
from gnnaccel.cuda.dropout import OFF
from gnnaccel.cuda.launch import NOTHING, THREADS, Kernels, dense, grid, workspace
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
    if torch.is_autocast_enabled(weights.weight.device.type) or not is_plain(call):
        return None
    for t in (weights.weight, weights.att_src, weights.att_dst, weights.bias):
        if (t is not None
            and not (t.dtype is torch.float32 and t.is_contiguous() and t.data_ptr() % 16 == 0)):
            return None
    return Bound(call, weights)


def is_plain(call: Call) -> bool:
    """Whether ``call`` is one for `Launches`, if its rows are fp32 and its sources the
    destinations."""
    attention = call.attention
    return (attention.score == "additive" and not attention.edge and not attention.dropout
            and not call.pmf and call.out_dtype is torch.float32 and not in_bands(call))


@functools.lru_cache(maxsize=256)
def _kernels(heads: int, width: int, wide: bool) -> tuple[Kernels, Kernels, additive.Variant]:
    """Kernels of scores and of a forward pass alone, and the variant for training."""
    row = torch.float32
    infer, train = (additive.variant(heads, width, row, row, False, False, grad, wide)
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
    sources are the destinations. ``call``: like those to come."""

    __slots__ = ("heads", "width", "slope", "layout", "program", "attention", "_dot", "_infer",
                 "_train", "variant", "wide")

    def __init__(self, call: Call):
        self.heads, self.width = call.heads, call.width
        self.slope = np.float32(call.attention.slope)
        self.program, self.attention = call.program, call.attention
        self._dot, self._infer, self.variant = _kernels(call.heads, call.width, call.graph.wide)
        self.wide = call.graph.wide
        self._train, self.layout = self.variant.forward_kernels, self.variant.layout

    def forward(self, rows: Tensor, att_src: int, att_dst: int, bias: int, graph: GraphView,
                train: bool, shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor | None]:
        """The result, N x heads x width numbers in this ``shape``, and for backward per node and
        head the scores by source and by destination, then `additive.Saved.small`: [6, N, H], and
        `additive.Saved.parts`. ``att_src``, ``att_dst``, ``bias``: addresses."""
        h, d, n, layout, device = self.heads, self.width, rows.shape[0], self.layout, rows.device
        graph_rows = graph.csc(False)
        out = torch.empty(shape, dtype=torch.float32, device=device)
        sums = torch.empty((6 if train else 2, n, h), dtype=torch.float32, device=device)
        parts = torch.empty((2, n, h, d), dtype=torch.float32, device=device) if train else None
        address, of_rows, step = sums.data_ptr(), rows.data_ptr(), 4 * n * h
        saved = ((address + 2 * step,
                  parts.data_ptr(), parts.data_ptr() + 4 * n * h * d)  # type: ignore[union-attr]
                 if train else _FORWARD_ONLY)
        self._dot("dot")(grid(n, layout, layout.slots), THREADS, 0,
                         (np.int32(n), of_rows, att_src, att_dst, address, address + step))
        launch = graph_rows.launched or graph_rows.launch()
        memory, chunks = (workspace(launch.chunks, (h * d, h * d if train else 0, 3 * h), device)
                          if launch.chunks else NOTHING)
        kernels, outputs = self._train if train else self._infer, (out.data_ptr(), bias, *saved)
        kernels("forward")(grid(launch.slots + n, layout), THREADS, layout.scratch, (
            *launch.graph, *launch.split, address, address + step, 0, self.slope, *_NO_DROPOUT,
            of_rows, *outputs, *chunks))
        if launch.heavy:
            kernels("merge")(grid(launch.heavy, layout), THREADS, layout.scratch,
                             (*launch.merge, launch.graph[3], *outputs, *chunks))
        return out, sums, parts

    def backward(self, graph: GraphView, att_src: int, att_dst: int, rows: Tensor, sums: Tensor,
                 parts: Tensor, grad: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """`additive_backward.backward`: the gradient of the rows, shaped as they are, and fp32
        memory with, per node and head, four numbers of the kernels' own, then the gradients of the
        scores by destination and by source; then room for ``blocks`` partial sums. ``att_src``,
        ``att_dst``: addresses."""
        h, d, n, layout, device = self.heads, self.width, rows.shape[
            0], self.variant.backward_layout, rows.device
        by_src, by_dst = graph.csr(False), graph.csc(False)
        launch, kernels, step = (by_src.launched or by_src.launch(), self.variant.backward_kernels,
                                 4 * n * h)
        scratch = torch.empty(6 * n * h + blocks * 2 * h * d, dtype=torch.float32, device=device)
        values = torch.empty_like(rows)
        packed, plus, a_src, of_grad = (scratch.data_ptr(), parts.data_ptr(), sums.data_ptr(),
                                        grad.data_ptr())
        d_a_dst = packed + 4 * step
        kernels("prepare")(grid(n, layout, layout.slots), THREADS, 0, (
            np.int32(n), of_grad, plus, plus + step * d, a_src + 2 * step, a_src + step, self.slope,
            *(by_dst.launched or by_dst.launch()).graph[:2], rows.data_ptr(), packed, d_a_dst))
        memory, chunks = (workspace(launch.chunks, (h * d, h * d, h), device)
                          if launch.chunks else NOTHING)
        tail = rows.data_ptr(), att_src, att_dst, d_a_dst, values.data_ptr(), d_a_dst + step
        kernels("sources")(grid(launch.slots + n, layout), THREADS, layout.scratch, (
            *launch.graph[:3], by_dst.place.data_ptr(), launch.graph[3], *launch.split, packed,
            a_src, 0, self.slope, *_NO_DROPOUT,
            of_grad, *tail, 0, *chunks))
        if launch.heavy:
            kernels("merge")(grid(launch.heavy, layout), THREADS, layout.scratch,
                             (*launch.merge, *tail, *chunks))
        return values, scratch

    def att_grads(self, rows: Tensor, scratch: Tensor, blocks: int, shape: Sequence[int],
                  src_first: bool = True) -> Tensor:
        """[2, *shape]: the gradients of both attention vectors, out of `backward`'s memory; the
        sources' first, or second."""
        n, h = rows.shape[0], self.heads
        d_a_dst = scratch.data_ptr() + 16 * n * h
        d_a_src, partial = d_a_dst + 4 * n * h, d_a_dst + 8 * n * h
        total = torch.empty((2, *shape), dtype=torch.float32, device=rows.device)
        head_dot.launch_grad(self._dot, self.layout, self.heads, self.width, blocks, np.int32(n),
                             rows.data_ptr(), *((d_a_src, d_a_dst) if src_first else
                                                (d_a_dst, d_a_src)), partial, total.data_ptr())
        return total


class Bound(Launches):
    """``bound(x, graph)``: x [N, F] fp32 as when it was bound -> [N, H * D]."""

    __slots__ = ("weights", "_addresses")

    def __init__(self, call: Call, weights: Weights):
        super().__init__(call)
        self.weights = weights
        self._addresses = tuple([0 if t is None else t.data_ptr() for t in weights])

    def valid(self) -> bool:
        """Whether the weights lie where they lay; ``.data`` may have been replaced."""
        return self._addresses == tuple([0 if t is None else t.data_ptr() for t in self.weights])

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
        return self.forward(rows, *self._addresses[1:], graph, False, rows.shape)[0]


class _BoundAttention(Operation):
    __slots__ = ("bound", "graph")

    def __init__(self, bound: Bound, graph: GraphView):
        self.bound, self.graph = bound, graph

    def forward(self, needs, x, weight, att_src, att_dst, bias):
        bound, rows = self.bound, skinny_matmul.linear(x, weight, None)
        out, sums, parts = bound.forward(rows, *bound._addresses[1:], self.graph, True, rows.shape)
        return out, (x, weight, att_src, att_dst, bias, rows, sums, parts)

    def backward(self, needs, saved, grad):
        x, weight, att_src, att_dst, bias, rows, sums, parts = saved
        bound, grad = self.bound, dense(grad)
        blocks = head_dot.grad_blocks(x.shape[0], bound.layout)
        src, dst = dense(att_src), dense(att_dst)  # held until the kernels are launched
        values, scratch = bound.backward(self.graph, src.data_ptr(), dst.data_ptr(), rows, sums,
                                         parts, grad, blocks)
        d_src = d_dst = None
        if needs[2] or needs[3]:
            d_src, d_dst = bound.att_grads(rows, scratch, blocks, att_src.shape).unbind(0)
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
