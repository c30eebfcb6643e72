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

from gnnaccel.cuda import head_dot
from gnnaccel.cuda.launch import dense
from gnnaccel.dispatch.run import torch_backend
from gnnaccel.dispatch.run.attention_bound import Launches, is_plain
from gnnaccel.dispatch.run.autograd import Operation

if TYPE_CHECKING:
    from gnnaccel.dispatch.graph.view import GraphView
    from gnnaccel.dispatch.run.attention import Call


class Vectors(NamedTuple):
    """Where attention vectors lie, the sources' and the destinations'. ``bases``: the contiguous
    parameter with both, or with each; ``starts``: numbers before each in its parameter; ``step``:
    from a head's number to the next one's; ``whole``: the parameters have no other numbers."""

    bases: tuple[Tensor, ...]
    starts: tuple[int, int]
    step: int
    whole: bool


def bind(call: Call, x: Tensor, src: tuple[Tensor, Tensor], dst: tuple[Tensor, Tensor],
         shape: Sequence[int]) -> BoundRows | None:
    """``call`` bound, with gradients or without as it is now; None for what only the general way
    can do. ``x``: rows [num_src, ..]; ``src``, ``dst``: a parameter, and the vector [heads, width]
    in its memory; ``shape``: of the result."""
    for t in (x, src[0], dst[0]):
        if t.dtype is not torch.float32 or not t.is_contiguous():
            return None
    found = _placed(src, dst) if x.numel() and is_plain(call) else None
    # of rows that want no gradient the host reads no vector in backward: scripts may write to it
    # before, to which slices that are copied are blind
    if found is None or not (found.whole or x.requires_grad or not torch.is_grad_enabled()):
        return None
    bound = BoundRows(call, found, None if tuple(shape) == x.shape else shape)
    return bound if all([not at % bound.layout.vec for at in (found.step, *found.starts)]) else None


def _placed(src: tuple[Tensor, Tensor], dst: tuple[Tensor, Tensor]) -> Vectors | None:
    """Where two vectors lie; None where kernels cannot read them there."""
    (base, at_src), (other, at_dst) = src, dst
    heads, width = at_src.shape
    if any([width > 1 and t.stride(1) != 1 for t in (at_src, at_dst)]):
        return None
    steps = {t.stride(0) for t in (at_src, at_dst)} if heads > 1 else {width}
    if len(steps) > 1:
        return None
    starts = tuple([t.storage_offset() - base.storage_offset() for base, t in (src, dst)])
    times = [torch.zeros(t.numel(), dtype=torch.int32, device="cpu") for t in (base, other)]
    for vector, start, count in zip((at_src, at_dst), starts, times):
        count.as_strided(vector.shape, vector.stride(), start).add_(1)
    # where the ends share numbers, each has a gradient of its own
    together = base is other and int((times[0] + times[1]).max()) == 1
    whole = bool((times[0] + times[1]).all() if together else times[0].all() and times[1].all())
    return Vectors((base,) if together else (base, other), starts, steps.pop(), whole)


class BoundRows(Launches):
    """``bound(x, graph)``: x as when it was bound -> the result, in ``shape`` unless that is x's.
    ``vectors``: as they lay then."""

    __slots__ = ("vectors", "bases", "shape", "_starts", "_strides", "_device")

    def __init__(self, call: Call, vectors: Vectors, shape: Sequence[int] | None):
        super().__init__(call, vectors.step)
        self.vectors, self.bases, self.shape = vectors, vectors.bases, shape
        self._starts = [4 * start for start in vectors.starts]
        self._strides, self._device = [t.stride() for t in vectors.bases], call.graph.device

    def valid(self) -> bool:
        """Whether the parameters' numbers lie in the order that they lay in; ``.data`` may have
        been replaced."""
        for t, strides in zip(self.bases, self._strides):
            if t.stride() != strides or t.device != self._device or t.data_ptr() % 16:
                return False
        return True

    def wants_grad(self, x: Tensor) -> bool:
        """Whether a call's result is to be a node of autograd's graph."""
        if torch.is_grad_enabled():
            for t in (x, *self.bases):
                if t.requires_grad:
                    return True
        return False

    def __call__(self, x: Tensor, graph: GraphView) -> Tensor:
        """The result without gradients."""
        rows = dense(x)
        out = self.empty(rows)
        self.forward(rows, *self.addresses(self.bases), 0, graph, out, False)
        return out

    def empty(self, rows: Tensor) -> Tensor:
        """Memory for the result."""
        return torch.empty_like(rows) if self.shape is None else rows.new_empty(self.shape)

    def addresses(self, bases: Sequence[Tensor]) -> tuple[int, int]:
        """Of both vectors in such parameters, or of their gradients in the parameters'."""
        src, dst = self._starts
        return bases[0].data_ptr() + src, bases[-1].data_ptr() + dst


class BoundAttention(Operation):
    """``apply(x, *bases)`` of a `BoundRows`. ``unread``: as of `attention.Call`."""

    __slots__ = ("bound", "graph", "unread")
    keeps_inputs = True

    def __init__(self, bound: BoundRows, graph: GraphView, unread: Tensor | None):
        self.bound, self.graph, self.unread = bound, graph, unread

    def forward(self, needs, x, *bases):
        bound, rows = self.bound, dense(x)
        out = bound.empty(rows)
        kept = bound.forward(rows, *bound.addresses(bases), 0, self.graph, out, True)
        return out, (x, *bases, None if rows is x else rows, kept)

    def backward(self, needs, saved, grad):
        x, *bases, rows, kept = saved
        bound, grad, rows = self.bound, dense(grad), x if rows is None else rows
        if self.unread is not None:  # forward reads rows by edges
            rows = rows.masked_fill(self.unread.view(-1, *(1,) * (rows.dim() - 1)), 0.0)
        blocks = head_dot.grad_blocks(rows.shape[0], bound.layout)
        values, scratch = bound.backward(self.graph, *bound.addresses(bases), rows, kept, grad,
                                         blocks)
        if not any(needs[1:]):
            return values if needs[0] else None, *[None] * len(bases)
        make = torch.empty_like if bound.vectors.whole else torch.zeros_like
        found = [make(t) for t in bases]
        bound.att_grads(rows, scratch, blocks, *bound.addresses(found))
        return values if needs[0] else None, *found

    def reference(self, x, *bases):
        bound, shape = self.bound, (self.bound.heads, self.bound.width)
        src, dst = [
            base.as_strided(shape, (bound.vectors.step, 1), base.storage_offset() + start)
            for base, start in zip((bases[0], bases[-1]), bound.vectors.starts)]
        rows = x.reshape(-1, *shape)
        if self.unread is not None:
            rows = rows.masked_fill(self.unread.view(-1, 1, 1), 0.0)
        tensors = {"x": rows, "att_src": src, "att_dst": dst}
        out = torch_backend.run(bound.program, self.graph.edges(False), tensors, None)
        return out.view(x.shape if bound.shape is None else bound.shape)
