"""Products of tall, narrow matrices, such as all nodes' features, with a small one: by our own
kernel where that is faster.

At 170,000 x 64 x 64 in fp32 cuBLAS takes 55 us on an H200, where reading and writing take 21; the
kernel for products by segment, which keeps the small matrix in shared memory, comes nearer to that
(docs/notes/relational.md).
"""
from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.cuda import capture, driver, segment_gemm
from gnnaccel.cuda.segment_direct import direct_plan
from gnnaccel.cuda.segment_plan import Segments, shared_limit

_TALL = 1 << 15  # rows from which the GPU's time counts rather than the launch's


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``: x [N, K], weight [C, K], bias [C]. Errors are of the size of
    `torch.nn.functional.linear`'s."""
    segments = None if x.shape[0] < _TALL else _tall(x, weight, weight.shape[0])
    if segments is None:
        return F.linear(x, weight, bias)
    return segment_gemm.multiply(  # type: ignore[return-value]  # no dots, so no pair
        segments, x, weight.unsqueeze(0), transposed=True, bias=bias, precision=precision())


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight``: x [N, K], weight [K, C]."""
    segments = None if x.shape[0] < _TALL else _tall(x, weight, weight.shape[1])
    return (x @ weight
            if segments is None
            else segment_gemm.multiply(  # type: ignore[return-value]
                segments, x, weight.unsqueeze(0), precision=precision()))


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
