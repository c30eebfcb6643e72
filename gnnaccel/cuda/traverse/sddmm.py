"""Launcher for sums or products of two operands at each edge (``src/sddmm.cu``)."""
from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import TYPES, Kernels, pointer

OPS = ("add", "mul")
INDICES = {torch.int32: "int", torch.int64: "i64"}
_THREADS = 256


def vector(width: int, dtype: torch.dtype) -> int:
    """Numbers that one memory access moves: up to 16 bytes, a divisor of ``width``."""
    return next(v for v in (8, 4, 2, 1) if width % v == 0 and v * dtype.itemsize <= 16)


@functools.lru_cache(maxsize=512)
def kernels(op: str, width: int, dtype: torch.dtype, index: torch.dtype) -> Kernels:
    """The kernel for rows of ``width`` numbers. ValueError for a form that none covers."""
    if op not in OPS or width < 1 or dtype not in TYPES or index not in INDICES:
        raise ValueError(f"op={op!r}, width={width}, dtype={dtype}, indices {index}: the kernels "
                         f"know {', '.join(OPS)}, widths from 1, {', '.join(map(str, TYPES))} and "
                         f"{', '.join(map(str, INDICES))}")
    return Kernels("sddmm", (("WIDTH", str(width)), ("VEC", str(vector(width, dtype))),
                             ("ROW_T", TYPES[dtype]), ("INDEX_T", INDICES[index]),
                             ("MULTIPLY", str(int(op == "mul")))))


def elementwise(op: str, edges: int, lhs: Tensor, rhs: Tensor, lhs_index: Tensor | None,
                rhs_index: Tensor | None) -> Tensor:
    """[edges, width]: ``lhs[lhs_index[e]] op rhs[rhs_index[e]]`` for every edge e; an index of None
    is e.

    lhs, rhs: [rows, width] fp32, fp16 or bf16, contiguous, 16-byte aligned; lhs_index, rhs_index:
    [edges] int32 or int64, contiguous, and not checked against the rows. op: "add" or "mul".
    ValueError for a tensor that does not fit.
    """
    width, index = lhs.shape[-1], next((i.dtype for i in (lhs_index, rhs_index) if i is not None),
                                       torch.int32)
    for name, t, ids in (("lhs", lhs, lhs_index), ("rhs", rhs, rhs_index)):
        _check(name, t, lhs, width, ids, edges, index)
    out = torch.empty((edges, width), dtype=lhs.dtype, device=lhs.device)
    if edges:
        threads = edges * (width // vector(width, lhs.dtype))
        kernels(op, width, lhs.dtype, index)("elementwise")(
            (-(-threads // _THREADS), 1), _THREADS, 0, (
            pointer(lhs_index), pointer(rhs_index), np.int64(edges), lhs.data_ptr(),
            rhs.data_ptr(), out.data_ptr()))
    return out


def _check(name: str, t: Tensor, like: Tensor, width: int, at: Tensor | None, edges: int,
           index: torch.dtype) -> None:
    if (t.dim() != 2 or t.shape[1] != width or t.dtype != like.dtype or not t.is_contiguous()
        or t.data_ptr() % 16 or t.device != like.device or (at is None and t.shape[0] != edges)):
        raise ValueError(f"{name} is {list(t.shape)}, {t.dtype}, on {t.device}, strides "
                         f"{list(t.stride())}; needed is [{edges if at is None else 'rows'}, "
                         f"{width}], {like.dtype}, contiguous, aligned, on {like.device}")
    if at is not None and (at.shape != (edges,) or at.dtype != index or not at.is_contiguous()
                           or at.device != t.device):
        raise ValueError(f"{name}_index is {list(at.shape)}, {at.dtype}, on {at.device}; needed is "
                         f"[{edges}], {index}, contiguous, on {t.device}")
