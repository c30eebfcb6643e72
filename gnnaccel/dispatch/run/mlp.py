"""Networks of two linear maps over many rows, such as those of the edges: by one kernel that keeps
the rows of the hidden layer in registers, where that serves."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.cuda.messages import mlp
from gnnaccel.cuda.runtime.launch import dense
from gnnaccel.cuda.segment import segment_backward, segment_gemm_grad
from gnnaccel.cuda.segment.segment_plan import Segments
from gnnaccel.dispatch.plan import compiling
from gnnaccel.dispatch.run import skinny_matmul
from gnnaccel.dispatch.run.autograd import Operation, gradients, wants_grad
from gnnaccel.dispatch.run.skinny_matmul import Pointwise, mapped, precision, tall

_Maybe = Tensor | None


def two(x: Tensor, w1: Tensor, b1: _Maybe, function: Pointwise, w2: Tensor, b2: _Maybe) -> Tensor:
    """``linear(function(linear(x, w1, b1)), w2, b2)`` with gradients: x [N, J], w1 [K, J], b1 [K],
    w2 [C, K], b2 [C]. By kernels where they are compiled, else map by map."""
    operation = None
    if x.shape[0] >= skinny_matmul.TALL:
        operation = operation_of(x, w1, b1, function, w2, b2)
    if operation is None or compiling.problem(operation.key, operation.compile) is not None:
        return mapped(mapped(x, w1, b1), w2, b2, function)
    return operation.mapped(x, w1, b1, w2, b2)


def operation_of(x: Tensor, w1: Tensor, b1: _Maybe, function: Pointwise, w2: Tensor, b2: _Maybe,
                 again: bool = False) -> Two | None:
    """The operation of `two` by kernels; None where each map is made by itself, as with ``again``
    both are until rows come again."""
    sizes = x.shape[-1], w1.shape[0], w2.shape[0]
    shapes = [(x.shape[0], sizes[0]), sizes[1::-1], sizes[1:2], sizes[:0:-1], sizes[2:]]
    for t, shape in zip((x, w1, b1, w2, b2), shapes):
        if t is not None and (tuple(t.shape) != shape or t.dtype is not torch.float32
                              or t.device != x.device or not t.is_contiguous()
                              or t.data_ptr() % 16):
            return None
    if (torch.is_autocast_enabled(x.device.type)
        or wants_grad(x, w1, b1, w2, b2) and not (w1.requires_grad and w2.requires_grad)
        or not mlp.serves(*sizes, precision(), x.device)
        or not segment_backward.as_one(*sizes[1:], x.dtype)):
        return None
    rows = tall(x, w1, sizes[1])
    if rows is None or again and not skinny_matmul.came_before(rows, ("two", w1.data_ptr())):
        return None
    return Two(rows, function, w1, b1, sizes, b2 is not None)


class Two(Operation):
    """`two` over ``rows``, all as one segment. ``w1``, ``b1``: for second derivatives, which the
    host's code has no numbers of, but of what is before the function. ``key``: decides which
    kernels those are that `compile` gets."""

    __slots__ = ("b1", "function", "key", "rows", "w1")

    def __init__(self, rows: Segments, function: Pointwise, w1: Tensor, b1: _Maybe,
                 sizes: tuple[int, int, int], by_bias: bool):
        self.rows, self.function, self.w1, self.b1 = rows, function, w1, b1
        self.key = ("two", *sizes, precision(), b1 is not None, by_bias, function.activation,
                    w1.device)

    def compile(self) -> None:
        """Compile the kernels of both maps and of all gradients. Raises CompileError."""
        _, first, k, n, how, shifted, by_bias, act, device = self.key
        rows, fp32 = self.rows.rows, torch.float32
        mlp.prepare(first, k, n, how, act, device)
        segment_backward.prepare(k, n, 1, fp32, rows, 1, True, how, device, by_bias, of_x=act)
        segment_backward.prepare(first, k, 1, fp32, rows, 1, True, how, device, shifted)
        segment_gemm_grad.prepare(first, k, 1, fp32, how, device, True)

    def mapped(self, x: Tensor, w1: Tensor, b1: _Maybe, w2: Tensor, b2: _Maybe) -> Tensor:
        """Both maps, as a node of autograd's where a gradient is wanted."""
        if wants_grad(x, w1, b1, w2, b2):
            return self.apply(x, w1, b1, w2, b2)
        return mlp.forward(self.rows, x, w1, b1, w2, b2, self.function.activation, False,
                           precision())[0]

    def forward(self, needs, x, w1, b1, w2, b2):
        out, hidden = mlp.forward(self.rows, x, w1, b1, w2, b2, self.function.activation, True,
                                  precision())
        # as `skinny_matmul.Linear` keeps the weight
        first = (w1, w1.detach()) if needs[0] else (None, None)
        return out, (x, first[0], None, w2, None, hidden, first[1], w2.detach())

    def backward(self, needs, saved, grad):
        (x, _, _, _, _, hidden, w1, w2), how = saved, precision()
        x = dense(x)  # ``x.data`` may be set to other memory
        d_hidden, d_w2, d_b2 = segment_backward.gradients(
            self.rows, hidden, dense(grad), w2.unsqueeze(0), transposed=True, sums=needs[4],
            of_x=self.function.activation, precision=how)
        if needs[0]:
            d_x, d_w1, d_b1 = segment_backward.gradients(
                self.rows, x, d_hidden, w1.unsqueeze(0), transposed=True, sums=needs[2],
                precision=how)
            d_w1 = d_w1[0, 0].contiguous()
        else:
            d_w1, d_b1 = segment_gemm_grad.weight_grad_and_sums(self.rows, x, d_hidden,
                                                                precision=how)
            d_x, d_w1 = None, d_w1[0, 0].t().contiguous()
        return (d_x, d_w1, d_b1.view(-1) if needs[2] else None, d_w2[0, 0].contiguous(),
                d_b2.view(-1) if needs[4] else None)

    def recorded(self, needs, saved, grad):
        x, w1, _, w2, _, hidden, first, second = saved
        w1 = self.w1 if w1 is None else skinny_matmul.as_read(w1, first)
        w2 = skinny_matmul.as_read(w2, second)
        shift = grad.new_zeros(grad.shape[1]).requires_grad_() if needs[4] else None

        def again(x: Tensor, w1: Tensor, b1: _Maybe, w2: Tensor, b2: _Maybe) -> Tensor:
            rows = F.linear(x, w1, b1)
            # the numbers of forward, though the parameters may have others since
            rows = rows + (hidden - rows).detach()
            return F.linear(self.function.by_torch(rows), w2, b2)

        return gradients(again, (x, w1, self.b1, w2, shift), needs, (grad,))

    def reference(self, x, w1, b1, w2, b2):
        return F.linear(self.function.by_torch(F.linear(x, w1, b1)), w2, b2)
