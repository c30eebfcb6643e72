"""Networks of two linear maps over rows in memory, with an activation between: the rows of the
hidden layer stay in registers (``src/segment_direct.cu``)."""
from __future__ import annotations

import functools

import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import Kernels, pointer
from gnnaccel.cuda.segment import segment_direct
from gnnaccel.cuda.segment.segment_gemm import Product
from gnnaccel.cuda.segment.segment_plan import Segments, precision_of, shared_limit
from gnnaccel.cuda.traverse.activation import Activation

__all__ = ["forward", "prepare", "serves"]

_WIDTH = 4  # elements of one load or store


def serves(first: int, k: int, n: int, precision: str, device: torch.device) -> bool:
    """Whether `forward` can map fp32 rows from ``first`` columns to k, and to n."""
    return _plan(first, k, n, precision, device) is not None


def forward(rows: Segments, x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor,
            b2: Tensor | None, act: Activation, keep: bool,
            precision: str) -> tuple[Tensor, Tensor | None]:
    """``act(x @ w1.T + b1) @ w2.T + b2``, [N, C], and, to ``keep``, what ``act`` is of, [N, K].

    rows: all N rows as one segment. x: fp32 [N, J]; w1: [K, J]; w2: [C, K]; b1: [K]; b2: [C]; all
    contiguous, and aligned to 16 bytes. precision: as for `segment_gemm.multiply`. Sums have a
    fixed order. Raises ValueError for what does not fit.
    """
    (k, first), n, device = w1.shape, w2.shape[0], x.device
    wanted = dict(x=(rows.rows, first), w1=(k, first), w2=(n, k), b1=(k,), b2=(n,))
    for name, t in dict(x=x, w1=w1, w2=w2, b1=b1, b2=b2).items():
        if t is not None and (tuple(t.shape) != wanted[name] or t.dtype is not torch.float32
                              or t.device != device or not t.is_contiguous() or t.data_ptr() % 16):
            raise ValueError(f"{name} is {list(t.shape)}, {t.dtype}, on {t.device}; needed is "
                             f"{list(wanted[name])}, fp32, on {device}, contiguous, aligned")
    plan = _plan(first, k, n, precision, device)
    if plan is None or rows.count != 1:
        raise ValueError(f"maps of {first} columns to {k} and to {n} over {rows.count} segments: "
                         "needed are multiples of 16 up to 64, one segment")
    out = torch.empty((rows.rows, n), dtype=torch.float32, device=device)
    hidden = torch.empty((rows.rows, k), dtype=torch.float32, device=device) if keep else None
    if rows.rows:
        kernels = _kernels(plan, first, k, n, precision, act)
        across = segment_direct.grid(plan, rows.tile_bound(plan.rows), 1)
        Product((rows.rows, n), out.dtype, kernels, (across, 1), plan.tile.threads, plan.shared,
                rows.tiled(plan.rows)).launch(
                    x, w2, out, b2, more=(w1.data_ptr(), pointer(b1), pointer(hidden)))
    return out, hidden


def prepare(first: int, k: int, n: int, precision: str, act: Activation,
            device: torch.device) -> None:
    """Compile the kernel of `forward`, where it serves. Raises CompileError."""
    plan = _plan(first, k, n, precision, device)
    assert plan is not None
    _kernels(plan, first, k, n, precision, act)("multiply")


def _plan(first: int, k: int, n: int, precision: str,
          device: torch.device) -> segment_direct.DirectPlan | None:
    return segment_direct.plan_of_two(first, k, n, precision_of(precision, torch.float32, k),
                                      shared_limit(device))


@functools.lru_cache(maxsize=64)
def _kernels(plan: segment_direct.DirectPlan, first: int, k: int, n: int, precision: str,
             act: Activation) -> Kernels:
    return segment_direct.kernels(plan, k, n, 1, torch.float32, torch.float32,
                                  precision_of(precision, torch.float32, k), True, 4 * _WIDTH,
                                  4 * _WIDTH, _WIDTH, "PLAIN", None, act, first)
