"""Launcher for products of int8 rows with an int8 matrix (``src/int8_gemm.cu``)."""
from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.int8.quantize import Int8Rows, stride
from gnnaccel.cuda.runtime.launch import THREADS, TYPES, WARPS, Kernels, pointer

MAX_INT8 = 128  # columns of an int8 result: a warp has whole rows of it
_ROWS = 16  # rows of a warp
_TILES = 16  # tiles of 8 columns, at most, for one warp


@functools.lru_cache(maxsize=512)
def kernels(inner: int, columns: int, out: torch.dtype, full: bool = False) -> tuple[Kernels, int]:
    """The kernels for [rows, inner] by [columns, inner], and the columns of a block. ``out`` may be
    torch.int8, then with the result in fp32 as well if ``full``."""
    int8 = out is torch.int8
    # an int8 result's padding is written too
    tiles = stride(columns) // 8 if int8 else min(_TILES, -(-columns // 8))
    flags = dict(STRIDE=stride(inner), N=columns, NT=tiles, OUT_T="float" if int8 else TYPES[out],
                 OUT_INT8=int(int8), OUT_STRIDE=stride(columns), FULL=int(full))
    return (Kernels("int8_gemm", tuple((name, str(value)) for name, value in flags.items())),
            8 * tiles)


def product(x: Int8Rows, weight: Int8Rows, bias: Tensor | None = None,
            out: torch.dtype = torch.float32, flag: Tensor | None = None,
            full: bool = False) -> Tensor | Int8Rows | tuple[Int8Rows, Tensor]:
    """``x @ weight.T + bias``, Tango's quantized GEMM with a scale per row of either operand:
    `torch.nn.Linear` of the values that the operands stand for. Sums are exact in int32, up to
    133,000 inner channels.

    Args:
        x: rows of K channels. weight: [N, K], a linear map's weight with a scale per output
            channel.
        bias: fp32 [N], contiguous.
        out: dtype of the result; torch.int8 quantizes it to nearest on the way out, N up to 128.
        flag: as `quantize.int8_rows`'s, for an int8 result.
        full: give an int8 result together with the unrounded one.

    Returns:
        [rows, N], or `Int8Rows` of N channels, or those and [rows, N] in fp32.

    Raises:
        ValueError: operands of different K, a bias of another form, a dtype without kernels, or
            too wide an int8 result.
    """
    rows, columns, device = x.rows, weight.rows, x.data.device
    if x.width != weight.width or columns < 1 or weight.data.device != device:
        raise ValueError(f"x has {x.width} channels on {device}, weight is [{columns}, "
                         f"{weight.width}] on {weight.data.device}: the inner sizes and devices "
                         "must be the same")
    if out not in TYPES and out is not torch.int8 or out is torch.int8 and columns > MAX_INT8:
        raise ValueError(f"out={out} of {columns} columns: known are {', '.join(map(str, TYPES))}, "
                         f"and torch.int8 up to {MAX_INT8}")
    if bias is not None and (bias.shape != (columns,) or bias.dtype is not torch.float32
                             or not bias.is_contiguous()):
        raise ValueError(f"bias is {list(bias.shape)}, {bias.dtype}; needed is [{columns}], "
                         "torch.float32, contiguous")
    compiled, per_block = kernels(x.width, columns, out, full and out is torch.int8)
    if out is torch.int8:
        scale = torch.empty(rows, dtype=torch.float32, device=device)
        result = torch.empty((rows, stride(columns)), dtype=torch.int8, device=device)
        exact = torch.empty((rows, columns), dtype=torch.float32, device=device) if full else None
        output: Tensor | Int8Rows | tuple[Int8Rows, Tensor] = Int8Rows(result, scale, columns)
        if exact is not None:
            output = Int8Rows(result, scale, columns), exact
        outputs: tuple[int, ...] = (result.data_ptr(), scale.data_ptr(), pointer(flag),
                                    pointer(exact))
    else:
        output = torch.empty((rows, columns), dtype=out, device=device)
        outputs = (output.data_ptr(),)
    if rows:
        compiled("product")((-(-rows // (_ROWS * WARPS)), -(-columns // per_block)), THREADS, 0, (
            np.int32(rows), x.data.data_ptr(), x.scale.data_ptr(), weight.data.data_ptr(),
            weight.scale.data_ptr(), pointer(bias), *outputs))
    return output
