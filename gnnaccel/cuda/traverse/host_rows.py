"""Rows of pinned host memory, fetched and put by number by the device itself
(``src/host_rows.cu``)."""
from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import Kernels

_THREADS = 256
_BLOCKS = 128  # 512 KiB under way at once: more than a link's rate times its delay
_MOST = 1 << 30  # words of a launch, which counts them in 32 bits
WORDS = (16, 8, 4, 2, 1)


@functools.cache
def kernels(size: int) -> Kernels:
    """The kernels that copy words of ``size`` bytes."""
    return Kernels("host_rows", (("BYTES", str(size)),))


def fetch(far: Tensor, ids: Tensor, close: Tensor) -> None:
    """``close[r] = far[ids[r]]``.

    ``far``: rows in pinned memory of the host (or of the device), contiguous; ``ids``: int32, on
    the device, each a row of ``far``; ``close``: on the device, contiguous, rows like ``far``'s.
    Work of the current stream of ``close``'s device. ValueError for tensors that do not fit.
    """
    _copy("fetch_rows", far, ids, close, (far, close))


def put(close: Tensor, ids: Tensor, far: Tensor) -> None:
    """``far[ids[r]] = close[r]``, as `fetch`. No number may stand in ``ids`` twice."""
    _copy("put_rows", far, ids, close, (close, far))


def _copy(entry: str, far: Tensor, ids: Tensor, close: Tensor, order: tuple[Tensor, Tensor]
          ) -> None:
    if (close.shape != (len(ids), *far.shape[1:]) or close.dtype != far.dtype
            or ids.dtype != torch.int32 or not far.is_contiguous() or not close.is_contiguous()
            or ids.device != close.device or not ids.is_contiguous()):
        raise ValueError(f"rows {list(far.shape)} of {far.dtype} by {len(ids)} numbers of "
                         f"{ids.dtype} are none of {list(close.shape)}, {close.dtype}")
    width = far.shape[1:].numel() * far.element_size()
    if not width or not len(ids):
        return
    size = next(size for size in WORDS if width % size == 0 and far.data_ptr() % size == 0
                and close.data_ptr() % size == 0)
    words = width // size
    kernel, most = kernels(size)(entry), max(1, _MOST // words)
    for first in range(0, len(ids), most):
        count = min(most, len(ids) - first) * words
        blocks = min(_BLOCKS, -(-count // _THREADS))
        addresses = [t.data_ptr() + (first * width if t is close else 0) for t in order]
        kernel((blocks, 1), _THREADS, 0, (np.uint32(count), np.uint32(words),
                                          ids.data_ptr() + 4 * first, *addresses))
