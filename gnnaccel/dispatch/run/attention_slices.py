"""A GAT call bound to its kernels, over rows that a script made, with attention vectors that may be
slices of one parameter, as where a script lays both ends' rows side by side.

Such a call is one node of autograd, whose inputs are the rows and the parameters as the layer has
them: to slice a parameter by torch takes three nodes for each slice and one that adds them up,
which on small graphs costs more than the attention.
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


class Slices(NamedTuple):
    """Two attention vectors in one parameter, as [2, heads, width] with these strides and this
    start. ``src_first``: the sources' comes first; ``whole``: the parameter has no other
    numbers."""

    strides: tuple[int, ...]
    start: int
    src_first: bool
    whole: bool


def bind(call: Call, x: Tensor, src: tuple[Tensor, Tensor], dst: tuple[Tensor, Tensor],
         shape: Sequence[int]) -> BoundRows | None:
    """``call`` bound, with gradients or without as it is now; None for what only the general way
    can do. ``x``: rows [num_src, ..]; ``src``, ``dst``: a parameter, and the vector [heads, width]
    in its memory; ``shape``: of the result."""
    base = src[0]
    for t in (x, base, dst[0]):
        if t.dtype is not torch.float32:
            return None
    if not x.numel() or not is_plain(call):
        return None
    if all([t.is_contiguous() and t.numel() == vector.numel() for t, vector in (src, dst)]):
        return BoundRows(call, (base, dst[0]), None, shape)
    # where the rows want no gradient the host reads no vector in backward, so that scripts may
    # write to it before
    if dst[0] is not base or (torch.is_grad_enabled() and not x.requires_grad):
        return None
    slices = _slices(base, src[1], dst[1])
    return None if slices is None else BoundRows(call, (base,), slices, shape)


def _slices(base: Tensor, src: Tensor, dst: Tensor) -> Slices | None:
    """Where two vectors lie in a contiguous ``base``; None where they overlap, or are strided in
    different ways."""
    if not base.is_contiguous() or src.stride() != dst.stride():
        return None
    starts = [t.storage_offset() - base.storage_offset() for t in (src, dst)]
    strides = abs(starts[1] - starts[0]), *src.stride()
    times = torch.zeros(base.numel(), dtype=torch.int32, device="cpu")
    for start in starts:
        times.as_strided(src.shape, src.stride(), start).add_(1)
    if times.max() > 1:
        return None
    return Slices(strides, min(starts), starts[0] < starts[1], bool(times.all()))


class BoundRows(Launches):
    """``bound(x, graph, unread)``: x as when it was bound -> the result in ``shape``. ``bases``:
    the parameter with both vectors, or with each. ``unread``: as of `attention.Call`."""

    __slots__ = ("bases", "slices", "shape", "_strides", "_device")

    def __init__(self, call: Call, bases: tuple[Tensor, ...], slices: Slices | None,
                 shape: Sequence[int]):
        super().__init__(call)
        self.bases, self.slices, self.shape = bases, slices, shape
        self._strides, self._device = [t.stride() for t in bases], call.graph.device

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
        src, dst, both = self.vectors(self.bases)
        return self.forward(dense(x), src, dst, 0, graph, False, self.shape)[0]

    def vectors(self, bases: Sequence[Tensor],
                both: Tensor | None = None) -> tuple[int, int, Tensor | None]:
        """The addresses of both vectors, as kernels take them; and ``both`` in memory of their own,
        which is made unless it is given, where they are `Slices`."""
        slices = self.slices
        if slices is None:
            return bases[0].data_ptr(), bases[1].data_ptr(), None
        if both is None:
            both = _strided(bases[0], (2, self.heads, self.width), slices).contiguous()
        first = both.data_ptr()
        second = first + 4 * self.heads * self.width
        return (first, second, both) if slices.src_first else (second, first, both)

    def vector_grads(self, rows: Tensor, scratch: Tensor, blocks: int) -> Sequence[Tensor]:
        """The gradients of the parameters, out of `backward`'s memory."""
        slices, shape, bases = self.slices, (self.heads, self.width), self.bases
        if slices is None:
            found = self.att_grads(rows, scratch, blocks, shape).unbind(0)
            return [grad.view(t.shape) for grad, t in zip(found, bases)]
        total = self.att_grads(rows, scratch, blocks, shape, slices.src_first)
        make = torch.empty if slices.whole else torch.zeros
        grad = make(bases[0].shape, dtype=torch.float32, device=rows.device)
        _strided(grad, total.shape, slices).copy_(total)
        return (grad,)


def _strided(base: Tensor, size: Sequence[int], slices: Slices) -> Tensor:
    """Both vectors, in the memory of a contiguous ``base``."""
    return base.as_strided(size, slices.strides, base.storage_offset() + slices.start)


class BoundAttention(Operation):
    """``apply(x, *bases)`` of a `BoundRows`."""

    __slots__ = ("bound", "graph", "unread")
    keeps_inputs = True

    def __init__(self, bound: BoundRows, graph: GraphView, unread: Tensor | None):
        self.bound, self.graph, self.unread = bound, graph, unread

    def forward(self, needs, x, *bases):
        bound, rows = self.bound, dense(x)
        src, dst, both = bound.vectors(bases)
        out, sums, parts = bound.forward(rows, src, dst, 0, self.graph, True, bound.shape)
        return out, (x, *bases, rows, both, sums, parts)

    def backward(self, needs, saved, grad):
        x, *bases, rows, both, sums, parts = saved
        bound, grad = self.bound, dense(grad)
        if self.unread is not None:  # forward reads rows by edges
            rows = rows.masked_fill(self.unread.view(-1, *(1,) * (rows.dim() - 1)), 0.0)
        blocks = head_dot.grad_blocks(rows.shape[0], bound.layout)
        src, dst, _ = bound.vectors(bases, both)
        values, scratch = bound.backward(self.graph, src, dst, rows, sums, parts, grad, blocks)
        vectors = (bound.vector_grads(rows, scratch, blocks) if any(needs[1:])
                   else (None,) * len(bases))
        return values if needs[0] else None, *vectors

    def reference(self, x, *bases):
        bound = self.bound
        shape = bound.heads, bound.width
        if bound.slices is None:
            src, dst = [t.reshape(shape) for t in bases]
        else:
            both = _strided(bases[0].contiguous(), (2, *shape), bound.slices).unbind(0)
            src, dst = both if bound.slices.src_first else both[::-1]
        rows = x.reshape(-1, *shape)
        if self.unread is not None:
            rows = rows.masked_fill(self.unread.view(-1, 1, 1), 0.0)
        tensors = {"x": rows, "att_src": src, "att_dst": dst}
        return torch_backend.run(bound.program, self.graph.edges(False), tensors,
                                 None).view(bound.shape)
