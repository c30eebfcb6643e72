"""Small functions that every launcher needs. Each runs at every call, so does as little as it
can."""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnnaccel.cuda import driver
from gnnaccel.cuda.layout import ROW_TYPES, TYPES, WARPS, Layout, layout_for

THREADS = 32 * WARPS
_NONE = (0, 0, 0)
NOTHING = None, _NONE  # a `workspace` of no chunks, for callers who look at the chunks first


class Kernels:
    """The kernels of one family with one set of definitions, looked up once per driver."""

    __slots__ = ("family", "defines", "_found")

    def __init__(self, family: str, defines: tuple):
        self.family, self.defines = family, defines
        # (driver, entry -> kernel), replaced as one: threads see both or neither
        self._found: tuple = (None, {})

    def __call__(self, entry: str):
        # `driver.current`, without its call; slices, since another thread may take the last one out
        last = driver.in_place[-1:] or driver.process
        current = last[0] if last else driver.current()
        owner, kernels = self._found
        if owner is not current:
            kernels = {}
            self._found = current, kernels
        kernel = kernels.get(entry)
        if kernel is None:
            kernel = kernels[entry] = current.kernel(self.family, entry, self.defines)
        return kernel


def grid(items: int, layout: Layout, per_warp: int = 1) -> tuple[int, int]:
    """Blocks for ``items`` warps' worth of work, and the tiles of heads."""
    per_block = WARPS * per_warp
    return -(-items // per_block), layout.tiles


def pointer(t: Tensor | None) -> int:
    """A tensor's address, the null pointer for None."""
    return 0 if t is None else t.data_ptr()


def dense(t: Tensor) -> Tensor:
    """The tensor contiguous, and aligned for the widest load."""
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


def fp32(t: Tensor | None) -> Tensor | None:
    """The tensor contiguous, in fp32; None stays None."""
    return None if t is None else t.float().contiguous()


def sent(words: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[words] on the device. The copy is from pinned memory, so that nobody waits; torch's
    allocator lends that memory to nobody else before the copy is done."""
    table = torch.empty(len(words), dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    table.numpy()[:] = words
    return table.to(device, non_blocking=True)


def rows_like(t: Tensor) -> Tensor:
    """Memory for numbers of ``t``'s shape and type, with the strides of a new tensor.

    Strides of ``t`` may be any where a size is 1, and a product that adds to a tensor with such
    strides fails on a GPU (cuBLAS, INVALID_VALUE).
    """
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def workspace(chunks: int, sizes: tuple[int, int, int],
              device: torch.device) -> tuple[Tensor | None, tuple[int, int, int]]:
    """fp32 memory for up to three arrays [chunks, size], and their addresses; null where there is
    nothing to hold."""
    if not chunks:
        return None, _NONE
    first, second, third = sizes
    first, second, third = chunks * first, chunks * second, chunks * third
    memory = torch.empty(first + second + third, dtype=torch.float32, device=device)
    base = memory.data_ptr()
    return memory, (base, base + 4 * first if second else 0,
                    base + 4 * (first + second) if third else 0)


def row_kernels(family: str, layout: Layout, dtype: torch.dtype, wide: bool,
                **flags: int) -> Kernels:
    """The kernels for rows of ``dtype`` over a graph, with int64 offsets if ``wide``. ValueError
    for a dtype that none covers."""
    if dtype not in TYPES:
        raise ValueError(f"dtype={dtype}: the {family} kernels know {', '.join(map(str, TYPES))}")
    return Kernels(family, (*layout.defines(), ("ROW_T", TYPES[dtype]),
                            ("OFF_T", "i64" if wide else "int"), ("DROPOUT", "0"),
                            *((name, str(int(value))) for name, value in flags.items())))


def check_dense(graph: Any, like: Tensor, **tensors: tuple[Tensor, int | None]) -> None:
    """ValueError unless all are dense rows like ``like``, as many as said, and the graph
    (`structure.Rows`) has places."""
    device = graph.indptr.device
    for name, (t, rows) in tensors.items():
        if (t.dim() != 2 or rows is not None and t.shape[0] != rows or t.shape[1:] != like.shape[1:]
            or t.dtype != like.dtype or t.device != device or not t.is_contiguous()
            or t.data_ptr() % 16):
            raise ValueError(f"{name} is {list(t.shape)}, {t.dtype}, on {t.device}, strides "
                             f"{list(t.stride())}; needed is [{'any' if rows is None else rows}, "
                             f"{like.shape[-1]}], {like.dtype}, contiguous, aligned, on {device}")
    if graph.place.shape[0] != graph.other.shape[0]:
        raise ValueError(f"the graph has {graph.place.shape[0]} places for {graph.other.shape[0]} "
                         "edges: build it with places=True")


@dataclass(frozen=True)
class RowVariant:
    """Heads x width of a row; ``row``/``out``: dtypes of the gathered rows and of the result;
    ``edge``: there are edge features; ``train``: tensors are saved for backward; ``wide``: int64
    offsets."""

    heads: int
    width: int
    row: torch.dtype
    out: torch.dtype
    edge: bool = False
    dropout: bool = False
    train: bool = False
    wide: bool = False

    @functools.cached_property
    def layout(self) -> Layout:
        return layout_for(self.heads, self.width)

    def defines(self, unroll: int | None = None, **more) -> tuple:
        """``-D`` definitions: the layout's, the common ones, and ``more``."""
        return self.layout.defines(unroll) + self.flags(**more)

    def flags(self, **more) -> tuple:
        """The definitions that do not depend on the layout."""
        flags = dict(ROW_T=ROW_TYPES[self.row], OUT_T=TYPES[self.out],
                     OFF_T="i64" if self.wide else "int", EDGE=int(self.edge),
                     DROPOUT=int(self.dropout), **more)
        return tuple((k, str(v)) for k, v in flags.items())
