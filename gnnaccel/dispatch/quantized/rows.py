"""Rows in a storage format: made by torch operations on any device, or by the CUDA kernels; read
back in fp32.

Both ways round alike, to the last bit where they round to nearest. Stochastic rounding draws from
torch's generator, each way in its own order: equal in distribution, not draw by draw.
"""
from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from gnnaccel.cuda.int8 import quantize
from gnnaccel.cuda.int8.quantize import Int8Rows, stride

FORMATS = ("int8", "bf16", "fp32")
_SMALLEST = 1.5e-36  # rows whose largest magnitude lies below become zeros, as in quantize.cu
_DTYPES = {"int8": torch.int8, "bf16": torch.bfloat16, "fp32": torch.float32}

Stored = Int8Rows | Tensor


class Storage(NamedTuple):
    """Formats out of `FORMATS`: ``format`` of the rows that a layer gathers in forward,
    ``backward`` of the gradients that it gathers."""

    format: str
    backward: str

    @property
    def row(self) -> torch.dtype:
        return _DTYPES[self.format]

    @property
    def grad(self) -> torch.dtype:
        return _DTYPES[self.backward]


def stochastic() -> bool:
    """Whether gradients are rounded stochastically: unless deterministic algorithms are
    demanded."""
    return not torch.are_deterministic_algorithms_enabled()


@overload
def store(x: Tensor, form: Literal["int8"], draw: bool, kernels: bool,
          flag: Tensor | None = None) -> Int8Rows: ...
@overload
def store(x: Tensor, form: str, draw: bool, kernels: bool,
          flag: Tensor | None = None) -> Stored: ...
def store(x: Tensor, form: str, draw: bool, kernels: bool, flag: Tensor | None = None) -> Stored:
    """``x`` [rows, ...] in ``form``, rounded stochastically if ``draw``, else to nearest.

    int8 has a scale for each row of all but the first dimension. ``kernels``: by the CUDA kernels.
    ``flag``: int32 [1]; becomes 1 where an int8 row has a number that is not finite. Rows of "fp32"
    are ``x``, contiguous.
    """
    x = x.contiguous()
    if form == "fp32":
        return x
    if not kernels:
        return by_torch(x, draw, flag) if form == "int8" else bf16_by_torch(x, draw)
    key = quantize.key(x.device) if draw else None
    if form == "int8":
        return quantize.int8_rows(x, key, flag)
    x = x.float()
    return quantize.bf16_rows(x if x.data_ptr() % quantize.ALIGN == 0 else x.clone(), key)


def prepare(storage: Storage, width: int, dtype: torch.dtype, grad: torch.dtype) -> None:
    """Compile the kernels that store rows of ``width`` channels of ``dtype``, and gradients of
    ``grad``. Raises CompileError."""
    vec = next(v for v in (4, 2, 1) if width % v == 0)
    for form, of, draw in ((storage.format, dtype, False), (storage.backward, grad, True)):
        if form == "int8":
            quantize.kernels(width, of, vec, draw)[0]("rows")
        elif form == "bf16" and draw:
            quantize.kernels(4, torch.float32, 4, True)[0]("narrow")


def by_torch(x: Tensor, draw: bool = False, flag: Tensor | None = None) -> Int8Rows:
    """`gnnaccel.cuda.int8.quantize.int8_rows` by torch operations."""
    rows = x.flatten(1).float()
    top = rows.abs().amax(1) if rows.shape[0] else rows.new_zeros(0)
    finite = top.isfinite()  # NaN wins the comparison
    plain = finite & (top >= _SMALLEST)
    scale = torch.where(plain, top / 127, torch.where(finite, 0.0, torch.nan))
    steps = torch.where(plain.unsqueeze(1), rows * torch.where(plain, 127 / top, 0.0).unsqueeze(1),
                        0.0)
    steps = (steps + torch.rand_like(steps)).floor() if draw else steps.round()
    data = torch.zeros(rows.shape[0], stride(rows.shape[1]), dtype=torch.int8, device=x.device)
    data[:, :rows.shape[1]] = steps.clamp(-127, 127).to(torch.int8)
    if flag is not None:
        torch.maximum(flag, (~finite).any().int(), out=flag)
    return Int8Rows(data, scale, rows.shape[1])


def bf16_by_torch(x: Tensor, draw: bool = False) -> Tensor:
    """`gnnaccel.cuda.int8.quantize.bf16_rows` by torch operations."""
    if not draw:
        return x.to(torch.bfloat16)
    bits = x.float().view(torch.int32)
    up = ((bits
           + (torch.rand_like(x, dtype=torch.float32) * 65536).int()) & -65536).view(torch.float32)
    return torch.where(x.isfinite(), up, x.float()).to(torch.bfloat16)


def read(stored: Stored, shape: tuple[int, ...]) -> Tensor:
    """Values of the rows, in fp32."""
    return (stored.dequantize() if type(stored) is Int8Rows
            else stored.float()).view(shape)  # type: ignore[union-attr]


@overload
def scaled(stored: Int8Rows, factor: Tensor) -> Int8Rows: ...
@overload
def scaled(stored: Tensor, factor: Tensor) -> Tensor: ...
def scaled(stored: Any, factor: Tensor) -> Stored:
    """Rows times their numbers in ``factor`` [rows]: of int8 only the scales change."""
    if type(stored) is Int8Rows:
        return stored.times(factor)
    return (stored * factor.view(-1, *(1,) * (stored.dim() - 1))).to(stored.dtype)


@overload
def packed(stored: Int8Rows) -> tuple[Tensor, Tensor]: ...
@overload
def packed(stored: Tensor) -> tuple[Tensor, None]: ...
def packed(stored: Any) -> tuple[Tensor, Tensor | None]:
    """Rows as tensors, for `torch.autograd.function.FunctionCtx.save_for_backward`."""
    return (stored.data, stored.scale) if type(stored) is Int8Rows else (stored, None)


def unpacked(data: Tensor, scale: Tensor | None, width: int) -> Stored:
    """The inverse of `packed`; ``width``: channels of a row."""
    return data if scale is None else Int8Rows(data, scale, width)
