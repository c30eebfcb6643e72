"""Backward of a blend by segment, as `segment_gemm.multiply` makes them (``src/blend_grad.cu``)."""
from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import TYPES, Kernels, pointer
from gnnaccel.cuda.segment.segment_checks import check_rows, expect
from gnnaccel.cuda.segment.segment_plan import Segments

__all__ = ["blend_grad", "prepare"]

_THREADS = 256
_MOST = 132 * 16  # blocks: twice what runs at once on an H100 or H200
_EACH = 8  # packs that make a thread worth starting


@functools.lru_cache(maxsize=256)
def kernels(columns: int, vec: int, dtype: torch.dtype) -> Kernels:
    """The kernel for rows of ``columns`` numbers, ``vec`` of which are read at once."""
    return Kernels("blend_grad", (("COLUMNS", str(columns)), ("VEC", str(vec)),
                                  ("ROW_T", TYPES[dtype])))


def prepare(columns: int, dtype: torch.dtype) -> None:
    """Compile the kernel that `blend_grad` launches for well aligned rows. Raises CompileError."""
    kernels(columns, math.gcd(4, columns), dtype)("blend_grad")


def blend_grad(segments: Segments, grad: Tensor, rest: Tensor, share: Tensor,
               order: Tensor | None = None, d_rest: Tensor | None = None) -> Tensor:
    """fp32 [S]: the sum over each segment's rows i of ``<rest[order[i]], grad[order[i]]>``, in a
    fixed order.

    d_rest: memory for the gradient of rest, ``(1 - share) grad``. grad, rest, d_rest: [rows,
    columns] of one dtype (fp32, fp16 or bf16), contiguous; share: fp32 [S]; order: int32 [rows],
    without repeats. ValueError for a tensor that does not fit.
    """
    columns = grad.shape[1]
    check_rows(segments, grad, order, columns, "grad")
    expect("rest", rest, grad.dtype, tuple(grad.shape), grad.device)
    expect("share", share, torch.float32, (segments.count,), grad.device)
    if d_rest is not None:
        expect("d_rest", d_rest, grad.dtype, tuple(grad.shape), grad.device)
    if not segments.rows or not columns:
        return torch.zeros(segments.count, dtype=torch.float32, device=grad.device)
    addresses = [t.data_ptr() for t in (grad, rest, d_rest) if t is not None]
    vec = next(v for v in (4, 2, 1) if columns % v == 0
               and not any(address % (v * grad.element_size()) for address in addresses))
    blocks = min(_MOST, -(-segments.rows * (columns // vec) // (_THREADS * _EACH)))
    out = torch.zeros((blocks, segments.count), dtype=torch.float32, device=grad.device)
    kernels(columns, vec, grad.dtype)("blend_grad")((blocks, 1), _THREADS, 4 * _THREADS // 32, (
        segments.ptr.data_ptr(), np.int32(segments.count), pointer(order), grad.data_ptr(),
        rest.data_ptr(), share.data_ptr(), pointer(d_rest), out.data_ptr()))
    return out[0] if blocks == 1 else out.sum(0)
