"""Sums over the rows of a matrix, such as the gradient of a bias (``src/column_sum.cu``)."""
from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import TYPES, Kernels

_THREADS = 256
_MOST = 528  # blocks that fill the largest GPUs a few times over
_EACH = 8  # rows that make a thread worth starting
_NARROW = 4  # packs of the second launch, whose rows are few: more of them are read at once


@functools.lru_cache(maxsize=256)
def kernels(vec: int, dtype: torch.dtype) -> Kernels:
    """The kernel for packs of ``vec`` columns."""
    return Kernels("column_sum", (("VEC", str(vec)), ("ROW_T", TYPES[dtype])))


@functools.lru_cache(maxsize=1024)
def _shape(columns: int, dtype: torch.dtype, address: int,
           most: int = 32) -> tuple[int, int, int, np.int32, Kernels]:
    """(rows of a block, blocks across, shared bytes, bits of its packs, kernel) for rows of this
    kind; ``address``: theirs modulo 16; ``most``: packs of columns that a block takes, a power of
    two up to 256."""
    vec = next(v for v in (4, 2, 1) if columns % v == 0 and address % (v * dtype.itemsize) == 0)
    shift = min(most.bit_length() - 1, (columns // vec - 1).bit_length())
    return (_THREADS >> shift, -(-columns // (vec << shift)), 4 * _THREADS * vec, np.int32(shift),
            kernels(vec, dtype))


def prepare(columns: int, dtype: torch.dtype) -> None:
    """Compile the kernels that `column_sum` launches for well aligned rows of this kind. Raises
    CompileError."""
    for kind in {dtype, torch.float32}:
        _shape(columns, kind, 0)[-1]("column_sum")


def column_sum(x: Tensor) -> Tensor:
    """The sum over the rows of x [N, F], contiguous, fp32, fp16 or bf16, N and F at least 1: fp32
    [F], added up in fp32.

    KeyError for another dtype.
    """
    rows, columns = x.shape
    high, across, shared, shift, compiled = _shape(columns, x.dtype, x.data_ptr() % 16)
    blocks = min(_MOST, -(-rows // (high * _EACH)))
    part = torch.empty((blocks, columns), dtype=torch.float32, device=x.device)
    compiled("column_sum")((blocks, across), _THREADS, shared,
                           (np.int64(rows), np.int32(columns), shift, x.data_ptr(),
                            part.data_ptr()))
    return part.view(columns) if blocks == 1 else _total(part)


def _total(part: Tensor) -> Tensor:
    blocks, columns = part.shape
    out = torch.empty(columns, dtype=torch.float32, device=part.device)
    _, across, shared, shift, compiled = _shape(columns, torch.float32, 0, _NARROW)
    compiled("column_sum")((1, across), _THREADS, shared,
                           (np.int64(blocks), np.int32(columns), shift, part.data_ptr(),
                            out.data_ptr()))
    return out
