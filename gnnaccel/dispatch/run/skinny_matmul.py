"""Products of tall, narrow matrices, such as all nodes' features, with a small one: by our own
kernel where that is faster.

At 170,000 x 64 x 64 in fp32 cuBLAS takes 55 us on an H200, where reading and writing take 21; the
kernel for products by segment, which keeps the small matrix in shared memory, comes nearer to that
(docs/notes/relational.md). The gradients of rows, matrix and bias come from one reading of rows.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.cuda import capture, driver, segment_backward, segment_gemm, segment_gemm_grad
from gnnaccel.cuda.activation import Activation
from gnnaccel.cuda.launch import dense
from gnnaccel.cuda.segment_direct import direct_plan
from gnnaccel.cuda.segment_plan import Segments, shared_limit
from gnnaccel.dispatch.plan import compiling
from gnnaccel.dispatch.run.autograd import Operation, Tensors, gradients, wants_grad

TALL = 1 << 15  # rows from which the GPU's time counts rather than the launch's


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``: x [N, K], weight [C, K], bias [C]. Errors are of the size of
    `torch.nn.functional.linear`'s."""
    segments = None if x.shape[0] < TALL else tall(x, weight, weight.shape[0])
    if segments is None:
        return F.linear(x, weight, bias)
    return segment_gemm.multiply(  # type: ignore[return-value]  # no dots, so no pair
        segments, x, weight.unsqueeze(0), transposed=True, bias=bias, precision=precision())


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight``: x [N, K], weight [K, C]."""
    segments = None if x.shape[0] < TALL else tall(x, weight, weight.shape[1])
    return (x @ weight
            if segments is None
            else segment_gemm.multiply(  # type: ignore[return-value]
                segments, x, weight.unsqueeze(0), precision=precision()))


class Pointwise(NamedTuple):
    """A function of each number of a tensor: for kernels, and by torch."""

    activation: Activation
    by_torch: Callable[[Tensor], Tensor]


def mapped(x: Tensor, weight: Tensor, bias: Tensor | None = None,
           of_x: Pointwise | None = None) -> Tensor:
    """`torch.nn.functional.linear` of x [N, K], weight [C, K], bias [C], with gradients; by our own
    kernels where they are compiled, those of the gradients as well. of_x: of that function of x,
    which the kernels compute as they read x."""
    if (x.dim() == 2 and weight.dim() == 2 and x.shape[0] >= TALL
        and not torch.is_autocast_enabled(x.device.type)
        and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0):
        segments = tall(x, weight, weight.shape[0])
        if segments is not None and _has_kernels(x, weight, bias, of_x):
            operation = _Linear(segments, x.shape[1], of_x)
            if wants_grad(x, weight, bias):
                return operation.apply(x, weight, bias)
            return operation.product(x, weight, bias)
    return F.linear(x if of_x is None else of_x.by_torch(x), weight, bias)


def _has_kernels(x: Tensor, weight: Tensor, bias: Tensor | None, of_x: Pointwise | None) -> bool:
    """Whether the kernels of `mapped` and of its gradients are there, or may be waited for."""
    if bias is not None and (bias.dtype is not x.dtype or bias.shape != weight.shape[:1]):
        return False
    rows, k, n, how = *x.shape, weight.shape[0], precision()
    act = None if of_x is None else of_x.activation
    if act is not None and not segment_backward.as_one(k, n, x.dtype):
        return False

    def compile_() -> None:
        segment_gemm.prepare(k, n, 1, x.dtype, rows, 1, True, how, x.device, of_x=act)
        segment_backward.prepare(k, n, 1, x.dtype, rows, 1, True, how, x.device, bias is not None,
                                 of_x=act)
        if act is None:
            segment_gemm_grad.prepare(k, n, 1, x.dtype, how, x.device, True)

    return compiling.problem(("mapped", k, n, how, bias is None, act), compile_) is None


class _Linear(Operation):
    """`mapped` over ``segments``, all rows as one."""

    __slots__ = ("columns", "of_x", "segments")

    def __init__(self, segments: Segments, columns: int, of_x: Pointwise | None):
        self.segments, self.columns, self.of_x = segments, columns, of_x

    @property
    def form(self) -> dict[str, Any]:
        """Options of the kernels."""
        return dict(transposed=True, precision=precision(),
                    of_x=None if self.of_x is None else self.of_x.activation)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return segment_gemm.multiply(  # type: ignore[return-value]  # no dots, so no pair
            self.segments, x, weight.unsqueeze(0), bias=bias, **self.form)

    def forward(self, needs, x, weight, bias):
        kept = needs[1] or self.of_x is not None
        return self.product(x, weight, bias), (x if kept else None, weight if needs[0] else None)

    def backward(self, needs, saved, grad):
        (x, weight), by_bias, d_bias, grad = saved, needs[2], None, dense(grad)
        if self.of_x is not None and not (needs[0] and needs[1]):
            return self._gradients(needs, saved, grad, False)
        if needs[0] and needs[1]:
            d_x, d_weight, d_bias = segment_backward.gradients(
                self.segments, x, grad, weight.unsqueeze(0), sums=by_bias, **self.form)
            d_weight = d_weight.view(weight.shape)
        elif needs[1]:
            d_weight, d_bias = segment_gemm_grad.weight_grad_and_sums(self.segments, x, grad,
                                                                      precision=precision())
            d_x, d_weight = None, d_weight[0, 0].t()
        else:
            d_weight, d_x = None, matmul(grad, weight) if needs[0] else None
        if by_bias:
            d_bias = grad.sum(0) if d_bias is None else d_bias.view(-1)
        return d_x, d_weight, d_bias if by_bias else None

    def recorded(self, needs, saved, grad):
        return self._gradients(needs, saved, grad, True)

    def _gradients(self, needs: tuple[bool, ...], saved: Tensors, grad: Tensor,
                   create_graph: bool) -> Tensors:
        """The gradients by torch. None of them depends on what was not saved."""
        x, weight = saved
        channels = grad.shape[1]
        if x is None:
            x = grad.new_zeros(grad.shape[0], self.columns).requires_grad_()
        if weight is None:
            weight = grad.new_zeros(channels, self.columns).requires_grad_()
        bias = grad.new_zeros(channels).requires_grad_() if needs[2] else None
        return gradients(self.reference, (x, weight, bias), needs, (grad,), create_graph)

    def reference(self, x, weight, bias):
        return F.linear(x if self.of_x is None else self.of_x.by_torch(x), weight, bias)


#: getter of newer versions of torch, whose older getter raises where
#: ``torch.backends.cuda.matmul.fp32_precision`` was set
_setting = getattr(torch._C, "_get_fp32_precision_getter", None)


def precision() -> str:
    """Precision of fp32 products, "fp32" or "tf32", by torch's own settings."""
    if _setting is not None:
        return "tf32" if _setting("cuda", "matmul") == "tf32" else "fp32"
    return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def tall(x: Tensor, weight: Tensor, columns: int) -> Segments | None:
    """All rows as one segment, if our kernel is to make this product, else None. While a CUDA graph
    is captured nothing is made to keep."""
    if (x.dtype is not torch.float32 or weight.dtype is not torch.float32
        or not driver.runs_on(x.device)):
        return None
    if (not (x.is_contiguous() and weight.is_contiguous())
        or not _fits(x.shape[1], columns, x.device)):
        return None
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return _whole(x.shape[0], x.device, capture.stream(x.device))


@functools.lru_cache(maxsize=256)
def _fits(k: int, n: int, device: torch.device) -> bool:
    return direct_plan(k, n, torch.float32, "FP32", False, shared_limit(device)) is not None


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _whole(rows: int, device: torch.device, stream: int) -> Segments:
    """One segment of ``rows`` rows; one for each stream, since it is made on that."""
    return Segments(torch.arange(0, rows + 1, rows, dtype=torch.int32, device=device), rows)
