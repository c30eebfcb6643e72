"""A GAT call bound to its kernels, over rows that a script made, with attention vectors that may be
slices of parameters, as where a script lays both ends' rows side by side.

Such a call is one node of autograd, whose inputs are the rows and the parameters as the layer has
them, and kernels read and write the slices where they lie. To slice a parameter by torch takes
three nodes for each slice and one that adds them up, which on small graphs costs more than the
attention.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import dense
from gnnaccel.cuda.traverse import head_dot
from gnnaccel.cuda.traverse.dropout import OFF, Dropout, draw
from gnnaccel.dispatch.run import attention
from gnnaccel.dispatch.run.attention_bound import Launches, is_plain
from gnnaccel.dispatch.run.autograd import Operation

if TYPE_CHECKING:
    from gnnaccel.dispatch.graph.view import GraphView
    from gnnaccel.dispatch.run.attention import Call

#: a parameter, and a vector [heads, width] in its memory
Vector = tuple[Tensor, Tensor]


class Vectors(NamedTuple):
    """Where the attention vectors lie, the sources' and, if there is one, the destinations'.
    ``bases``: the contiguous parameter with all, or with each; ``starts``: numbers before each in
    its parameter; ``step``: from a head's number to the next one's; ``whole``: the parameters have
    no other numbers."""

    bases: tuple[Tensor, ...]
    starts: tuple[int, ...]
    step: int
    whole: bool


def bind(call: Call, x: Tensor, a_edge: Tensor | None, vectors: Sequence[Vector],
         shape: Sequence[int]) -> BoundRows | None:
    """``call`` bound, with gradients or without as it is now; None for what only the general way
    can do. ``x``: rows [N, ..]; ``a_edge``: terms of the edges; ``vectors``: the sources' and, if
    there is one, the destinations'; ``shape``: of the result."""
    for t in (x, *[base for base, _ in vectors], *([] if a_edge is None else [a_edge])):
        if t.dtype is not torch.float32:
            return None
    square = call.graph.num_src == call.graph.num_dst == x.shape[0] > 0
    found = _placed(vectors) if square and x.numel() and is_plain(call) else None
    # of rows that want no gradient the host reads no vector in backward: scripts may write to it
    # before, to which slices that are copied are blind
    if found is None or not (found.whole or x.requires_grad or not torch.is_grad_enabled()):
        return None
    bound = BoundRows(call, found, None if tuple(shape) == x.shape else shape)
    return bound if all([not at % bound.layout.vec for at in (found.step, *found.starts)]) else None


def _placed(vectors: Sequence[Vector]) -> Vectors | None:
    """Where vectors lie; None where kernels cannot read them there."""
    bases = tuple([base for base, _ in vectors])
    heads, width = vectors[0][1].shape
    steps: set[int] = set()
    starts: list[int] = []
    times: list[Tensor] = []
    for base, vector in vectors:
        if not base.is_contiguous() or (width > 1 and vector.stride(1) != 1):
            return None
        steps.add(vector.stride(0) if heads > 1 else width)
        starts.append(int(vector.storage_offset() - base.storage_offset()))
        count = torch.zeros(base.numel(), dtype=torch.int32, device="cpu")
        count.as_strided(vector.shape, vector.stride(), starts[-1]).add_(1)
        times.append(count)
    if len(steps) > 1:
        return None
    # where the ends share numbers, each has a gradient of its own
    if bases[0] is bases[-1] and int(torch.stack(times).sum(0).max()) == 1:
        bases, times = bases[:1], [torch.stack(times).sum(0)]
    return Vectors(bases, tuple(starts), steps.pop(), all([bool(one.all()) for one in times]))


class BoundRows(Launches):
    """A call like the one that was bound, whose result has the ``shape``, or x's if that is None.
    ``vectors``: as they lay then."""

    __slots__ = ("vectors", "bases", "shape", "_src", "_dst", "_strides", "_device")

    def __init__(self, call: Call, vectors: Vectors, shape: Sequence[int] | None):
        super().__init__(call, vectors.step)
        self.vectors, self.bases, self.shape = vectors, vectors.bases, shape
        self._src, self._dst = 4 * vectors.starts[0], 4 * vectors.starts[-1]
        self._strides, self._device = [t.stride() for t in vectors.bases], call.graph.device

    def valid(self) -> bool:
        """Whether the parameters' numbers lie in the order that they lay in; ``.data`` may have
        been replaced."""
        for t, strides in zip(self.bases, self._strides):
            if t.stride() != strides or t.device != self._device or t.data_ptr() % 16:
                return False
        return True

    def wants_grad(self, x: Tensor, a_edge: Tensor | None) -> bool:
        """Whether a call's result is to be a node of autograd's graph."""
        if torch.is_grad_enabled():
            if x.requires_grad or (a_edge is not None and a_edge.requires_grad):
                return True
            for t in self.bases:
                if t.requires_grad:
                    return True
        return False

    def run(self, x: Tensor, a_edge: Tensor | None, graph: GraphView, bases: Sequence[Tensor],
            dropout: Dropout, train: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """The result; the rows, the terms and all else that `backward` needs."""
        rows, edges = dense(x), None if a_edge is None else dense(a_edge)
        out = torch.empty_like(rows) if self.shape is None else rows.new_empty(self.shape)
        kept = self.forward(rows, (*self.addresses(bases), 0), graph, out, train,
                            0 if edges is None else edges.data_ptr(), dropout.args)
        return out, rows, edges, kept

    def dropout(self) -> Dropout:
        """That of a new call."""
        p = self.attention.dropout
        return draw(p, self._device) if p else OFF

    def addresses(self, bases: Sequence[Tensor]) -> tuple[int, int]:
        """Of both vectors in such parameters, or of their gradients in the parameters'."""
        dst = bases[-1].data_ptr() + self._dst if len(self.vectors.starts) > 1 else 0
        return bases[0].data_ptr() + self._src, dst


class BoundAttention(Operation):
    """``apply(x, a_edge, *bases)`` of a `BoundRows`. ``unread``: as of `attention.Call`."""

    __slots__ = ("bound", "graph", "unread", "dropout")
    keeps_inputs = True

    def __init__(self, bound: BoundRows, graph: GraphView, unread: Tensor | None):
        self.bound, self.graph, self.unread = bound, graph, unread
        self.dropout = bound.dropout()

    def forward(self, needs, x, a_edge, *bases):
        out, rows, edges, kept = self.bound.run(x, a_edge, self.graph, bases, self.dropout, True)
        return out, (x, a_edge, *bases, None if rows is x else rows,
                     None if edges is a_edge else edges, kept)

    def backward(self, needs, saved, grad):
        x, a_edge, *bases, rows, edges, kept = saved
        bound, grad = self.bound, dense(grad)
        rows, edges = x if rows is None else rows, a_edge if edges is None else edges
        if self.unread is not None:  # forward reads rows by edges
            rows = rows.masked_fill(self.unread.view(-1, *(1,) * (rows.dim() - 1)), 0.0)
        blocks = head_dot.grad_blocks(rows.shape[0], bound.layout)
        d_edges = self.graph.csr(True).edges_like(edges) if needs[1] else None
        values, scratch = bound.backward(
            self.graph, *bound.addresses(bases), rows, kept, grad, blocks,
            0 if edges is None else edges.data_ptr(), 0 if d_edges is None else d_edges.data_ptr(),
            self.dropout.args)
        found = [None] * len(bases)
        if any(needs[2:]):
            make = torch.empty_like if bound.vectors.whole else torch.zeros_like
            found = [make(t) for t in bases]
            bound.att_grads(rows, scratch, blocks, *bound.addresses(found))
        return values if needs[0] else None, d_edges, *found

    def reference(self, x, a_edge, *bases):
        bound, shape = self.bound, (self.bound.heads, self.bound.width)
        tensors = {"x": x.reshape(-1, *shape)}
        for name, start, base in zip(("att_src", "att_dst"), bound.vectors.starts,
                                     (bases[0], bases[-1])):
            tensors[name] = base.as_strided(shape, (bound.vectors.step, 1),
                                            base.storage_offset() + start)
        if a_edge is not None:
            tensors["a_edge"] = a_edge
        call = attention.Call(bound.program, bound.attention, self.graph, *shape, x.dtype,
                              dropout=self.dropout, unread=self.unread)
        out = attention.with_the_same_dropout(call, tensors)
        return out.view(x.shape if bound.shape is None else bound.shape)
