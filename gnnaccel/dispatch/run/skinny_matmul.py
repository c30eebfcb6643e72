"""Products of tall, narrow matrices, such as all nodes' features, with a small one: by our own
kernel where that is faster.

At 170,000 x 64 x 64 in fp32 cuBLAS takes 55 us on an H200, where reading and writing take 21; the
kernel for products by segment, which keeps the small matrix in shared memory, comes nearer to that
(docs/notes/relational.md). The gradients of rows, matrix and bias come from one reading of rows.
"""
from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.cuda import capture, driver, segment_backward, segment_gemm, segment_gemm_grad
from gnnaccel.cuda.launch import dense
from gnnaccel.cuda.segment_direct import direct_plan
from gnnaccel.cuda.segment_plan import Segments, shared_limit
from gnnaccel.dispatch.plan import compiling
from gnnaccel.dispatch.run.autograd import Operation, wants_grad

TALL = 1 << 15  # rows from which the GPU's time counts rather than the launch's


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``: x [N, K], weight [C, K], bias [C]. Errors are of the size of
    `torch.nn.functional.linear`'s."""
    segments = None if x.shape[0] < TALL else _tall(x, weight, weight.shape[0])
    if segments is None:
        return F.linear(x, weight, bias)
    return segment_gemm.multiply(  # type: ignore[return-value]  # no dots, so no pair
        segments, x, weight.unsqueeze(0), transposed=True, bias=bias, precision=precision())


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight``: x [N, K], weight [K, C]."""
    segments = None if x.shape[0] < TALL else _tall(x, weight, weight.shape[1])
    return (x @ weight
            if segments is None
            else segment_gemm.multiply(  # type: ignore[return-value]
                segments, x, weight.unsqueeze(0), precision=precision()))


def mapped(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` of x [N, K], weight [C, K], bias [C], with gradients; by our own
    kernels where they are compiled, those of the gradients as well."""
    if (x.dim() != 2 or weight.dim() != 2 or x.shape[0] < TALL
        or torch.is_autocast_enabled(x.device.type)
        or x.data_ptr() % 16 or weight.data_ptr() % 16):
        return F.linear(x, weight, bias)
    segments = _tall(x, weight, weight.shape[0])
    if segments is None or not _has_kernels(x, weight, bias):
        return F.linear(x, weight, bias)
    if wants_grad(x, weight, bias):
        return _Linear(segments).apply(x, weight, bias)
    return segment_gemm.multiply(  # type: ignore[return-value]  # no dots, so no pair
        segments, x, weight.unsqueeze(0), transposed=True, bias=bias, precision=precision())


def _has_kernels(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernels of `mapped` and of its gradients are there, or may be waited for."""
    if bias is not None and (bias.dtype is not x.dtype or bias.shape != weight.shape[:1]):
        return False
    rows, k, n, how = *x.shape, weight.shape[0], precision()

    def compile_() -> None:
        segment_gemm.prepare(k, n, 1, x.dtype, rows, 1, True, how, x.device)
        segment_backward.prepare(k, n, 1, x.dtype, rows, 1, True, how, x.device, bias is not None)
        segment_gemm_grad.prepare(k, n, 1, x.dtype, how, x.device, True)

    return compiling.problem(("mapped", k, n, how, bias is None), compile_) is None


class _Linear(Operation):
    """`mapped` over ``segments``, all rows as one."""

    __slots__ = ("segments",)

    def __init__(self, segments: Segments):
        self.segments = segments

    def forward(self, needs, x, weight, bias):
        out = segment_gemm.multiply(self.segments, x, weight.unsqueeze(0), transposed=True,
                                    bias=bias, precision=precision())
        return out, (x if needs[1] else None, weight)

    def backward(self, needs, saved, grad):
        (x, weight), by_bias, d_bias, grad = saved, needs[2], None, dense(grad)
        if needs[0] and needs[1]:
            d_x, d_weight, d_bias = segment_backward.gradients(
                self.segments, x, grad, weight.unsqueeze(0), transposed=True, sums=by_bias,
                precision=precision())
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
        x, weight = saved
        if x is None:
            x = grad.new_zeros(grad.shape[0], weight.shape[1]).requires_grad_()
        bias = weight.new_zeros(weight.shape[0]).requires_grad_() if needs[2] else None
        return super().recorded(needs, (x, weight, bias), grad)

    def reference(self, x, weight, bias):
        return F.linear(x, weight, bias)


#: getter of newer versions of torch, whose older getter raises where
#: ``torch.backends.cuda.matmul.fp32_precision`` was set
_setting = getattr(torch._C, "_get_fp32_precision_getter", None)


def precision() -> str:
    """Precision of fp32 products, "fp32" or "tf32", by torch's own settings."""
    if _setting is not None:
        return "tf32" if _setting("cuda", "matmul") == "tf32" else "fp32"
    return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _tall(x: Tensor, weight: Tensor, columns: int) -> Segments | None:
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
