"""Rows in formats of fewer bytes than fp32, for kernels that gather them (``src/quantize.cu``)."""
from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import THREADS, TYPES, WARPS, Kernels, pointer
from gnnaccel.cuda.traverse import dropout

ALIGN = 16  # bytes that a lane of a gather loads at once
_KEPT = 8  # packs of a row that a lane holds
_IN_FLIGHT = 4  # packs that a lane loads before it uses the first

Key = dropout.Key
#: the next place of torch's default generator on a device, from which stochastic rounding draws
key = dropout.key


def stride(width: int) -> int:
    """Bytes from one int8 row of ``width`` channels to the next: the next multiple of 16."""
    return -(-width // ALIGN) * ALIGN


@dataclass(frozen=True)
class Int8Rows:
    """Rows of ``width`` channels as int8 with one scale per row: ``x[r, c] = scale[r] * data[r,
    c]``, as in Tango but for the scale, of which Tango has one per tensor.

    ``data`` int8 [rows, stride(width)], contiguous, zeros past ``width``; ``scale`` fp32 [rows],
    contiguous. Rows of zeros have scale 0. Rows that had a number that is not finite have scale
    NaN.
    """

    data: Tensor
    scale: Tensor
    width: int

    @property
    def rows(self) -> int:
        return self.data.shape[0]

    def times(self, factor: Tensor) -> Int8Rows:
        """These rows, each times its number of ``factor``, fp32 [rows]: a weight that belongs to
        the source of an edge costs one product per row and none per edge."""
        return Int8Rows(self.data, self.scale * factor, self.width)

    def dequantize(self) -> Tensor:
        """fp32 [rows, width]."""
        return self.data[:, :self.width].float() * self.scale.unsqueeze(1)

    def nbytes(self) -> int:
        return self.data.numel() + 4 * self.scale.numel()


def addresses(rows: Tensor | Int8Rows) -> tuple[int, ...]:
    """The addresses that a kernel takes for rows in either form."""
    return ((rows.data.data_ptr(), rows.scale.data_ptr()) if isinstance(rows, Int8Rows)
            else (rows.data_ptr(),))


@functools.lru_cache(maxsize=512)
def kernels(width: int, dtype: torch.dtype, vec: int, stochastic: bool) -> tuple[Kernels, int]:
    """The kernels for rows of ``width`` channels read ``vec`` at a time, and the rows of a
    block."""
    total = stride(width) // vec
    lanes = min(32, 1 << (total - 1).bit_length())
    packs = -(-total // lanes)
    keep = min(packs, _KEPT)
    rows = max(1, _IN_FLIGHT // keep)
    flags = dict(IN_T=TYPES[dtype], W=width, STRIDE=stride(width), VEC=vec, LANES=lanes,
                 PACKS=packs, KEEP=keep, ROWS=rows, STOCHASTIC=int(stochastic))
    return (Kernels("quantize", tuple((name, str(value)) for name, value in flags.items())),
            WARPS * (32 // lanes) * rows)


def int8_rows(x: Tensor, key: Key | None = None, flag: Tensor | None = None) -> Int8Rows:
    """Quantize rows, each by its own largest magnitude over 127.

    Args:
        x: [rows, ...] of fp32, fp16 or bf16, contiguous; all but the first dimension make a row, of
            one channel or more.
        key: from `key`, for stochastic rounding: the mean over draws is ``x``. None rounds to
            nearest, ties to even.
        flag: int32 [1] on the device of ``x``. It becomes 1 if a number is not finite, and stays as
            it is otherwise.

    Raises:
        ValueError: another dtype, strides, or no channel; a flag of another dtype, size or device.
    """
    if x.dim() < 2 or x.dtype not in TYPES or not x.is_contiguous() or 0 in x.shape[1:]:
        raise ValueError(f"x is {list(x.shape)}, {x.dtype}, strides {list(x.stride())}; needed are "
                         f"rows [rows, 1 or more channels] of {', '.join(str(t) for t in TYPES)}, "
                         "contiguous")
    if flag is not None and (flag.dtype is not torch.int32 or flag.numel() != 1
                             or flag.device != x.device):
        raise ValueError(f"flag is {list(flag.shape)}, {flag.dtype}, on {flag.device}; needed is "
                         f"[1], torch.int32, on {x.device}")
    count, width = x.shape[0], x.shape[1:].numel()
    data = torch.empty((count, stride(width)), dtype=torch.int8, device=x.device)
    scale = torch.empty(count, dtype=torch.float32, device=x.device)
    if count:
        vec = next(v for v in (4, 2, 1) if width % v == 0
                   and x.data_ptr() % (v * x.element_size()) == 0)
        compiled, per_block = kernels(width, x.dtype, vec, key is not None)
        compiled("rows")((-(-count // per_block), 1), THREADS, 0, (
            np.int32(count), x.data_ptr(), data.data_ptr(), scale.data_ptr(), pointer(flag),
            *dropout.key_args(key or (0, 0))))
    return Int8Rows(data, scale, width)


def bf16_rows(x: Tensor, key: Key | None = None) -> Tensor:
    """``x`` in bf16: to nearest, or with ``key`` rounded stochastically.

    Args:
        x: fp32 of any shape, contiguous, at a multiple of 16 bytes.

    Raises:
        ValueError: another dtype, strides or alignment.
    """
    if x.dtype is not torch.float32 or not x.is_contiguous() or x.data_ptr() % ALIGN:
        raise ValueError(f"x is {x.dtype}, strides {list(x.stride())}, address "
                         f"{x.data_ptr() % ALIGN} mod {ALIGN}; needed is torch.float32, "
                         f"contiguous, at a multiple of {ALIGN} bytes")
    if key is None:
        return x.to(torch.bfloat16)
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    if x.numel():
        compiled, _ = kernels(4, torch.float32, 4, True)
        compiled("narrow")((-(-x.numel() // (8 * THREADS)), 1), THREADS, 0, (
            np.int64(x.numel()), x.data_ptr(), out.data_ptr(), *dropout.key_args(key)))
    return out
