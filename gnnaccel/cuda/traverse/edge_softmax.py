"""Launchers for the softmax of numbers per edge over the edges of each row, and its gradient
(``src/edge_softmax.cu``)."""
from __future__ import annotations

import functools

import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import (THREADS, Kernels, Layout, grid, layout_for, no_places,
                                          row_kernels, workspace)
from gnnaccel.cuda.structures.structure import Rows

ENTRIES = ("forward", "forward_chunks", "backward", "backward_chunks")


@functools.lru_cache(maxsize=256)
def kernels(heads: int, dtype: torch.dtype, wide: bool) -> Kernels:
    """The kernels for ``heads`` numbers per edge of ``dtype``, over a graph with int64 offsets if
    ``wide``.

    ValueError for a dtype that none covers.
    """
    return row_kernels("edge_softmax", layout_for(heads, 1), dtype, wide)


def forward(graph: Rows, x: Tensor) -> Tensor:
    """[edges, H] of x's dtype: at each edge's place, the softmax of ``x`` over the edges of its
    row.

    x: [edges, H] fp32, fp16 or bf16, contiguous, by place; graph: built with places. Places without
    an edge are not written. Sums are fp32, in a fixed order. ValueError for a tensor that does not
    fit.
    """
    _check(graph, "x", x, x)
    return _run(graph, ("forward", "forward_chunks"), 2, x)


def backward(graph: Rows, y: Tensor, grad: Tensor) -> Tensor:
    """[edges, H]: the gradient of `forward`'s x from its result ``y`` and the gradient of that,
    both [edges, H] by place."""
    _check(graph, "y", y, y)
    _check(graph, "grad", grad, y)
    return _run(graph, ("backward", "backward_chunks"), 1, y, grad)


def _run(graph: Rows, entries: tuple[str, str], parts: int, *inputs: Tensor) -> Tensor:
    x = inputs[0]
    heads = x.shape[1]
    layout, compiled, launch = (layout_for(heads, 1), kernels(heads, x.dtype, graph.wide),
                                graph.launch())
    out = torch.empty_like(x)
    memory, pointers = workspace(launch.chunks, (heads, heads * (parts - 1), 0), x.device)
    args = launch.graph + launch.split + tuple(t.data_ptr()
                                               for t in (*inputs, out)) + pointers[:parts]
    compiled(entries[0])(_grid(launch.slots + graph.rows, layout), THREADS, 0, args)
    if launch.chunks:
        compiled(entries[1])(_grid(launch.slots, layout), THREADS, 0, args)
    return out


def _grid(warps: int, layout: Layout) -> tuple[int, int]:
    return grid(max(warps, 1), layout)


def _check(graph: Rows, name: str, t: Tensor, like: Tensor) -> None:
    edges = graph.other.shape[0]
    if (t.dim() != 2 or t.shape[0] < edges or not t.shape[1] or t.shape != like.shape
        or t.dtype != like.dtype or not t.is_contiguous() or t.device != graph.indptr.device):
        wanted = (f"[{max(edges, like.shape[0])}, {like.shape[-1] or 'H'}], {like.dtype}, "
                  f"contiguous, on {graph.indptr.device}")
        raise ValueError(f"{name} is {list(t.shape)}, {t.dtype}, on {t.device}, strides "
                         f"{list(t.stride())}; needed is {wanted}")
    if graph.place.shape[0] != edges:
        raise no_places(graph)
