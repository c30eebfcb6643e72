"""Launchers for sums of outer products of edges' features with rows of the other end, and their
gradients (``src/outer_sum.cu``)."""
from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import Kernels, check_dense, layout_for, pointer, workspace
from gnnaccel.cuda.structures.structure import Rows

ENTRIES = ("forward", "merge", "backward")
MOST = 256  # channels of a row, as backward keeps 32 of a sum's rows in shared memory
_STAGED, _KEYS, _EDGES, _PER_THREAD = 16, 32, 8, 4
_SMALL = 2048  # numbers of a sum, up to which blocks are small


class _Block(NamedTuple):
    """``side``: the threads of a block are side x side; ``high``, ``broad``: the numbers of a tile
    that one of them keeps, of a sum's rows and of their channels."""

    side: int
    high: int
    broad: int

    @property
    def threads(self) -> int:
        return self.side * self.side

    def tiles(self, terms: int, width: int) -> int:
        return -(-terms // (self.side * self.high)) * -(-width // (self.side * self.broad))


@functools.lru_cache(maxsize=256)
def _block(terms: int, width: int) -> _Block:
    side = 8 if terms * width <= _SMALL else 16
    return _Block(side, _kept(terms, side), _kept(width, side))


def _kept(size: int, side: int) -> int:
    """How many of ``size`` numbers, ``side`` apart, a thread keeps: as many as leave the fewest of
    its places empty."""
    return max(range(1, _PER_THREAD + 1),
               key=lambda kept: (-(-(-size // (side * kept)) * kept), kept))


@functools.lru_cache(maxsize=256)
def kernels(terms: int, width: int, wide: bool) -> Kernels:
    """The kernels for ``terms`` by ``width`` numbers, over a graph with int64 offsets if ``wide``.
    ValueError for more than `MOST` channels."""
    if not 1 <= width <= MOST:
        raise ValueError(f"width={width}: the kernels of outer products take 1 to {MOST} channels")
    side, high, broad = map(str, _block(terms, width))
    return Kernels("outer_sum", layout_for(1, width).defines() + (
        ("OFF_T", "i64" if wide else "int"), ("DROPOUT", "0"), ("SIDE", side), ("RK", high),
        ("RD", broad)))


def forward(graph: Rows, x: Tensor, edge: Tensor, ones: bool, mean: bool) -> Tensor:
    """[rows, K, D]: ``out[r]``, the sum of the outer products of ``edge[place[e]]`` and
    ``x[other[e]]`` over the edges e of row r, divided by their number if ``mean``; 0 without edges.
    With ``ones`` [rows, K + 1, D]: the last of these is the sum of the rows of ``x`` alone.

    Args:
        graph: built with places, one for each edge.
        x: [nodes of the other side, D], D up to `MOST`; edge: [edges, K] by place. fp32,
            contiguous, 16-byte aligned. Ids are not checked against them.

    Sums are fp32, in a fixed order. ValueError for a tensor that does not fit.
    """
    _check(graph, x, edge)
    width, terms = x.shape[1], edge.shape[1] + ones
    out = torch.empty((graph.rows, terms, width), dtype=torch.float32, device=x.device)
    compiled, launch = kernels(terms, width, graph.wide), graph.launch()
    memory, (part, _, _) = workspace(launch.chunks, (terms * width, 0, 0), x.device)
    block = _block(terms, width)
    compiled("forward")((launch.slots + graph.rows, block.tiles(terms, width)), block.threads,
                        4 * _STAGED * block.side * (block.high + block.broad),
                        launch.graph + launch.split + (
        edge.data_ptr(), np.int32(edge.shape[1]), np.int32(terms), x.data_ptr(), np.int32(mean),
        out.data_ptr(), part))
    if launch.heavy:
        compiled("merge")((launch.heavy, -(-terms * width // block.threads)), block.threads, 0,
                          launch.merge + (
            graph.indptr.data_ptr(), part, np.int32(terms), np.int32(mean), out.data_ptr()))
    return out


def backward(graph: Rows, x: Tensor, edge: Tensor, ones: bool, mean: bool, grad: Tensor,
             needs: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of ``x`` by edge, at each edge's place its part of its row [edges, D], and of
    ``edge`` [edges, K]; None for one that is not among ``needs``.

    graph, x, edge, ones, mean: of `forward`. grad: as its result, contiguous. ValueError for a
    tensor that does not fit.
    """
    _check(graph, x, edge)
    width, (edges, features) = x.shape[1], edge.shape
    terms = features + ones
    check_dense(graph, x, grad=(grad.view(-1, width), graph.rows * terms))
    x_grad = torch.empty((edges, width), dtype=x.dtype, device=x.device) if needs[0] else None
    edge_grad = torch.empty_like(edge) if needs[1] else None
    launch, threads = graph.launch(), _block(terms, width).threads
    shared = 4 * (_EDGES * (_KEYS + width) + _KEYS * (width | 1))
    kernels(terms, width, graph.wide)("backward")(
        (launch.slots + graph.rows, 1), threads, shared, launch.graph + launch.split + (
            edge.data_ptr(), np.int32(features), np.int32(terms), x.data_ptr(), np.int32(mean),
            grad.data_ptr(), pointer(edge_grad), pointer(x_grad)))
    return x_grad, edge_grad


def _check(graph: Rows, x: Tensor, edge: Tensor) -> None:
    if x.dtype is not torch.float32:
        raise ValueError(f"x is {x.dtype}; the kernels of outer products take torch.float32")
    check_dense(graph, x, x=(x, None))
    check_dense(graph, edge, edge=(edge, graph.other.shape[0]))
    if edge.dtype is not x.dtype:
        raise ValueError(f"edge is {edge.dtype}, x is {x.dtype}")
