"""Launchers for sums of weighted rows straight from a list of edges, without index arrays
(``src/edge_list.cu``)."""
from __future__ import annotations

import functools
import threading

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import Kernels

INDICES = {torch.int32: "int", torch.int64: "i64"}
_THREADS = 256
_BLOCKS = 132 * 4  # blocks to reach: four for each multiprocessor of an H200
_RUNS = (4, 32)  # edges that lanes take one after the other, at the least and at the most


def _vector(width: int) -> int:
    return next(v for v in (4, 2, 1) if width % v == 0)


@functools.cache
def _lanes(width: int) -> tuple[int, int]:
    """Lanes that share an edge, a power of two, and how many such tiles a row of ``width`` numbers
    has."""
    packs = width // _vector(width)
    lanes = min(32, 1 << (packs - 1).bit_length())
    return lanes, -(-packs // lanes)


@functools.lru_cache(maxsize=256)
def kernels(width: int, index: torch.dtype) -> Kernels:
    """``add_edges`` and ``average`` for rows of ``width`` numbers. ValueError for a width that none
    covers."""
    if width < 1 or index not in INDICES:
        raise ValueError(f"width={width}, ids {index}: the kernels know widths from 1, and "
                         f"{', '.join(map(str, INDICES))}")
    return Kernels("edge_list", (("WIDTH", str(width)), ("VEC", str(_vector(width))),
                                 ("LANES", str(_lanes(width)[0])), ("INDEX_T", INDICES[index])))


class _Alarm:
    """A word that a kernel sets where it meets an id outside the graph; on a GPU in pinned
    memory."""

    def __init__(self, pinned: bool):
        self._memory = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self.address, self.words = self._memory.data_ptr(), self._memory.numpy()


_alarms: dict[bool, _Alarm] = {}
_lock = threading.Lock()


def _alarm(device: torch.device) -> _Alarm:
    pinned = device.type == "cuda"
    alarm = _alarms.get(pinned)
    if alarm is None:
        with _lock, torch.inference_mode(False):
            alarm = _alarms.get(pinned) or _alarms.setdefault(pinned, _Alarm(pinned))
    return alarm


def alarmed(device: torch.device) -> bool:
    """Whether an earlier `add_edges` is known to have met ids outside its graph; says so once."""
    words = _alarm(device).words
    if not words[0]:
        return False
    words[0] = 0
    return True


def add_edges(ends: Tensor, source: int, x: Tensor, rows: int, weight: Tensor | None = None,
              scale: Tensor | None = None, count: Tensor | None = None) -> Tensor:
    """fp32 [rows, width]: ``out[r] = sum of weight[e] * scale[s] * x[s]`` over the edges e from s
    to r.

    Added with atomics, so the order varies from run to run unless the edges of each row stand side
    by side and are few. Edges whose ids lie outside the rows of ``x`` or of the result are left
    out, of which `alarmed` tells later.

    Args:
        ends: [2, E] int32 or int64, each row contiguous; ``ends[source]`` are the nodes whose rows
            are gathered.
        x: fp32 [nodes, width], contiguous, aligned to 16 bytes. weight: fp32 [E]. scale: fp32
            [nodes].
        count: fp32 [rows]: the number of edges that enter a row is added to it.

    Raises:
        ValueError: a tensor's shape, dtype, device, strides or alignment is another.
    """
    device = x.device
    _check(ends, source, x, rows, weight, scale, count, device)
    edges, (nodes, width) = ends.shape[1], x.shape
    out = torch.zeros((rows, width), dtype=torch.float32, device=device)
    if edges and rows:
        lanes, tiles = _lanes(width)
        groups = _THREADS // lanes
        run = min(_RUNS[1], max(_RUNS[0], edges // (groups * _BLOCKS)))
        first = ends.data_ptr()
        of_weight, of_scale, of_count = [0 if t is None else t.data_ptr()
                                         for t in (weight, scale, count)]
        second = first + ends.stride(0) * ends.element_size()
        kernels(width, ends.dtype)("add_edges")((-(-edges // (groups * run)), tiles), _THREADS, 0, (
            second if source else first, first if source else second, np.int64(edges),
            np.int64(nodes), np.int64(rows), np.int32(run), of_weight, of_scale,
            x.data_ptr(), out.data_ptr(), of_count, _alarm(device).address))
    return out


def average(out: Tensor, count: Tensor, index: torch.dtype) -> Tensor:
    """Divides the rows of `add_edges`'s ``out`` by their ``count``, or by 1 if that is 0, in place.
    Returns the factors, one over those divisors, fp32 [rows]. ``index``: the dtype of the ids, for
    which the kernels are compiled already."""
    rows, width = out.shape
    inverse = torch.empty_like(count)
    if rows:
        threads = rows * (width // _vector(width))
        kernels(width, index)("average")((-(-threads // _THREADS), 1), _THREADS, 0, (
            out.data_ptr(), count.data_ptr(), np.int64(rows), inverse.data_ptr()))
    return inverse


def _check(ends: Tensor, source: int, x: Tensor, rows: int, weight: Tensor | None,
           scale: Tensor | None, count: Tensor | None, device: torch.device) -> None:
    if (x.dim() != 2 or not x.shape[1] or x.dtype is not torch.float32 or not x.is_contiguous()
        or x.data_ptr() % 16):
        raise ValueError(f"x is {list(x.shape)}, {x.dtype}, strides {list(x.stride())}, address "
                         f"{x.data_ptr() % 16} mod 16; needed is [nodes, at least 1], "
                         "torch.float32, contiguous, at a multiple of 16 bytes")
    is_list = ends.dim() == 2 and ends.shape[0] == 2 and (ends.shape[1] < 2 or ends.stride(1) == 1)
    if not is_list or ends.dtype not in INDICES or ends.device != device or source not in (0, 1):
        raise ValueError(f"ends is {list(ends.shape)}, {ends.dtype}, on {ends.device}, strides "
                         f"{list(ends.stride())}, source={source}; needed is [2, edges], int32 or "
                         f"int64, on {device}, rows contiguous, source 0 or 1")
    if weight is scale is count is None:
        return
    for name, t, size in (("weight", weight, ends.shape[1]), ("scale", scale, x.shape[0]),
                          ("count", count, rows)):
        if t is not None and (t.shape != (size,) or t.dtype is not torch.float32
                              or t.device != device or not t.is_contiguous()):
            raise ValueError(f"{name} is {list(t.shape)}, {t.dtype}, on {t.device}, strides "
                             f"{list(t.stride())}; needed is [{size}], torch.float32, contiguous, "
                             f"on {device}")
