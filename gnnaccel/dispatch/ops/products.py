"""Products of rows with the matrix of their segment, or of the index that comes with them:
segment_mm and gather_mm."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import TYPES
from gnnaccel.cuda.segment import segment_backward, segment_gemm
from gnnaccel.cuda.structures import tile_ptr
from gnnaccel.dispatch.ops.call import Kernel
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.relational import cuda_maps, torch_maps
from gnnaccel.dispatch.relational.pairs import Pairs

# elements of a matrix up to which a copy of it for every row is cheaper than sorting the rows
_SMALL = 64


def shape_reason(a: Any, b: Any) -> Reason | None:
    """Why these are no operands: rows [N, K] and matrices [R, K, M] of one floating dtype."""
    if (not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.dim() != 2 or b.dim() != 3
        or a.shape[1] != b.shape[1]):
        shapes = [list(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in (a, b)]
        return reason("GA206",
                      f"the operands are {shapes[0]} and {shapes[1]}, not [N, K] and [R, K, M]")
    if a.dtype != b.dtype or not a.is_floating_point() or a.device != b.device:
        return reason("GA203",
                      f"the operands are {a.dtype} on {a.device} and {b.dtype} on {b.device}")
    return None


def segment_mm(a: Tensor, b: Tensor, lengths: Tensor, kernels: bool) -> Tensor:
    """[N, M]: rows ``a`` [N, K], the first ``lengths[0]`` times ``b[0]``, those after them times
    ``b[1]``, and so on.

    Users give the lengths: kernels read and write nothing beyond the rows."""
    rows = a.shape[0]
    ptr = torch.zeros(b.shape[0] + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths.clamp(0, rows), 0, dtype=torch.int32, out=ptr[1:])
    return _by_segment(a, b, ptr.clamp_(0, rows), kernels)


def gather_mm(a: Tensor, b: Tensor, index_a: Tensor | None, index_b: Tensor | None,
              kernels: bool) -> Tensor:
    """[n, M]: row i is ``a[index_a[i]] @ b[index_b[i]]``; an index of None is i."""
    if index_b is None or b.shape[1] * b.shape[2] <= _SMALL:
        rows = a if index_a is None else a.index_select(0, index_a)
        matrices = b if index_b is None else b.index_select(0, index_b)
        return torch.bmm(rows.unsqueeze(1), matrices).squeeze(1)
    segment, order = torch.sort(index_b, stable=True)
    inverse = torch.empty_like(order).scatter_(0, order,
                                               torch.arange(order.shape[0], device=order.device))
    rows = a.index_select(0, order if index_a is None else index_a.index_select(0, order))
    bounds = torch.arange(b.shape[0] + 1, dtype=segment.dtype, device=segment.device)
    return _by_segment(rows, b, torch.searchsorted(segment, bounds, out_int32=True),
                       kernels).index_select(0, inverse)


def _by_segment(a: Tensor, b: Tensor, ptr: Tensor, kernels: bool) -> Tensor:
    ptr = ptr.to(a.device)
    empty = ptr[:0]
    pairs = Pairs(empty.new_empty(a.shape[0]), empty, ptr, empty)
    maps = cuda_maps if kernels else torch_maps
    return maps.multiply(pairs, a.unsqueeze(1), b.unsqueeze(1)).squeeze(1)


def kernel(name: str, a: Tensor, b: Tensor, run: Callable[[], Tensor]) -> Kernel | Reason:
    """The way by the segment GEMM, or why there is none."""
    if a.dtype not in TYPES:
        return reason("GA203", f"{a.dtype} operands; the kernels take {', '.join(map(str, TYPES))}")
    if not a.numel() or not b.numel():
        return reason("GA303", "the operands are empty")
    (rows, k), (count, _, n) = a.shape, b.shape
    precision = cuda_maps.precision()
    key = "segment_gemm", k, n, a.dtype, rows.bit_length(), count.bit_length(), precision

    def compile_() -> None:
        tile_ptr.prepare()
        segment_gemm.prepare(k, n, 1, a.dtype, rows, count, False, precision, a.device)
        segment_backward.prepare(k, n, 1, a.dtype, rows, count, False, precision, a.device)

    return Kernel(f"{name}: grouped matrix product", key, compile_, run)
