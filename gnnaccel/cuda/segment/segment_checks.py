"""Checks of the arguments of segment products; each function raises ValueError, with the actual
and the needed form."""
from __future__ import annotations

import math

import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import TYPES
from gnnaccel.cuda.segment.segment_plan import Segments

ACTIVATIONS = {"none": 0, "relu": 1, "leaky_relu": 2}  # as in segment_epilogue.cuh


def expect(name: str, t: Tensor, dtype: torch.dtype, shape: tuple, device: torch.device) -> None:
    if t.dtype != dtype or tuple(t.shape) != shape or t.device != device or not t.is_contiguous():
        raise ValueError(f"{name} is {t.dtype} of shape {tuple(t.shape)} and strides {t.stride()} "
                         f"on {t.device}: it has to be {dtype} of shape {shape}, contiguous, on "
                         f"{device}")


def check_weights(segments: Segments, x: Tensor, w: Tensor, blocks: int) -> Tensor:
    """w as [S, blocks, ., .]."""
    if blocks < 1:
        raise ValueError(f"blocks={blocks}: there is at least one")
    if w.dim() == 3 and blocks == 1:
        w = w.unsqueeze(1)
    if w.dim() != 4 or w.shape[0] != segments.count or w.shape[1] != blocks or 0 in w.shape[2:]:
        raise ValueError(f"w has shape {tuple(w.shape)}: for {segments.count} segments and "
                         f"{blocks} blocks it has to be ({segments.count}, {blocks}, at least 1, "
                         "at least 1)")
    if w.dtype != x.dtype or w.device != x.device or x.dtype not in TYPES:
        raise ValueError(f"w is {w.dtype} on {w.device} and x {x.dtype} on {x.device}: they have "
                         f"to be the same, one of {list(TYPES)}")
    rows, columns = w.shape[2:]
    if (columns > 1 and w.stride(3) != 1) or (rows > 1 and w.stride(2) != columns):
        raise ValueError(f"w has strides {w.stride()} for shape {tuple(w.shape)}: the last two "
                         "dimensions have to be contiguous")
    return w


def check_rows(segments: Segments, x: Tensor, index: Tensor | None, width: int,
               name: str = "x") -> None:
    if (x.dim() != 2 or x.shape[1] != width or not x.is_contiguous()
        or x.device != segments.ptr.device):
        raise ValueError(f"{name} has shape {tuple(x.shape)} and strides {x.stride()} on "
                         f"{x.device}: it has to be (any, {width}), contiguous, on "
                         f"{segments.ptr.device}")
    if index is not None:
        expect(f"the index of {name}", index, torch.int32, (segments.rows,), x.device)
    elif x.shape[0] < segments.rows:
        raise ValueError(f"{name} has {x.shape[0]} rows: without an index there have to be the "
                         f"segments' {segments.rows}")


def check_out(segments: Segments, x: Tensor, out: Tensor | None, out_index: Tensor | None,
              accumulate: bool, dtype: torch.dtype | None,
              width: int) -> tuple[tuple[int, int], torch.dtype]:
    """Shape and dtype of the result."""
    if out_index is not None:
        expect("out_index", out_index, torch.int32, (segments.rows,), x.device)
    if out is None:
        if out_index is not None or accumulate:
            raise ValueError("out is None: out_index and accumulate need the memory that they "
                             "write to")
        if (dtype or x.dtype) not in TYPES:
            raise ValueError(f"out_dtype is {dtype}: it has to be one of {list(TYPES)}")
        return (segments.rows, width), dtype or x.dtype
    if (out.dtype not in TYPES or (dtype is not None and out.dtype != dtype)
        or (accumulate and out.dtype != torch.float32)):
        raise ValueError(f"out is {out.dtype}: it has to be "
                         f"{torch.float32 if accumulate else dtype or list(TYPES)}")
    shape = (len(out) if out_index is not None else segments.rows, width)
    expect("out", out, out.dtype, shape, x.device)
    return shape, out.dtype


def per_segment(name: str, t: Tensor | None, segments: Segments, shape: tuple[int, ...] | None,
                device: torch.device) -> int:
    """Number of elements of t from one segment's to the next's: 0 where all share them, or there
    are none."""
    if t is None or shape is None:
        return 0
    shared = t.dim() == len(shape)
    expect(name, t, t.dtype, shape if shared else (segments.count, *shape), device)
    return 0 if shared else math.prod(shape)


def heads_of(dots: Tensor | None, width: int) -> tuple[int, int] | None:
    """H and D of the attention vectors."""
    if dots is None:
        return None
    if dots.dim() not in (2, 3) or dots.shape[-2] * dots.shape[-1] != width:
        raise ValueError(f"dots has shape {tuple(dots.shape)}: its last two sizes have to make up "
                         f"the {width} output columns")
    return dots.shape[-2], dots.shape[-1]


def check_epilogue(segments: Segments, scale: Tensor | None, activation: str,
                   device: torch.device) -> None:
    if scale is not None:
        expect("scale", scale, torch.float32, (segments.rows,), device)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is one of {sorted(ACTIVATIONS)}, not {activation!r}")


def check_rest(segments: Segments, shape: tuple, dtype: torch.dtype, share: Tensor | None,
               rest: Tensor, accumulate: bool, device: torch.device) -> None:
    """Check the rows that join the result: those of a blend, or without a ``share`` those at which
    GELU's derivative is taken."""
    if accumulate:
        raise ValueError("accumulate and another way to write: the result is either added to what "
                         "is there, or blended with other rows, or multiplied by a derivative")
    if share is not None:
        expect("the share of a blend", share, torch.float32, (segments.count,), device)
    expect("gelu_grad" if share is None else "the rest of a blend", rest, dtype, shape, device)


def check_apart(share: Tensor | None, rest: Tensor, out: Tensor) -> None:
    if rest.data_ptr() == out.data_ptr() and out.numel():
        name = "gelu_grad" if share is None else "the rest of a blend"
        raise ValueError(f"{name} is the memory that the result goes to: pass other memory")


def check_pair(segments: Segments, x: Tensor, dy: Tensor, index: Tensor | None,
               dy_index: Tensor | None, blocks: int) -> tuple[int, int]:
    """K and N of the weight gradient; both sides have the segments' rows."""
    shapes = f"x has shape {tuple(x.shape)} and dy {tuple(dy.shape)}"
    if x.dim() != 2 or dy.dim() != 2 or blocks < 1 or 0 in (x.shape[1], dy.shape[1]):
        raise ValueError(f"{shapes}, blocks={blocks}: both need columns, and there is at least one "
                         "block")
    if x.shape[1] % blocks or dy.shape[1] % blocks:
        raise ValueError(f"{shapes}: both need columns that divide into {blocks} blocks")
    if dy.dtype != x.dtype or x.dtype not in TYPES:
        raise ValueError(f"x is {x.dtype} and dy {dy.dtype}: they have to be the same, one of "
                         f"{list(TYPES)}")
    check_rows(segments, x, index, x.shape[1])
    check_rows(segments, dy, dy_index, dy.shape[1], "dy")
    return x.shape[1] // blocks, dy.shape[1] // blocks
