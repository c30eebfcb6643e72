"""Sums and additive attention over rows in fp32, bf16 and int8: kernels with what makes their rows,
nothing of a host.

Each maker prepares what is the same for every call and returns, per format, two functions of no
arguments: (forward, forward and backward). What a call makes anew belongs to it: rows are quantized
in forward, the result's gradient in backward. Forward returns the result, training the result and
the gradient of the rows.
"""
from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from gnnaccel.cuda import additive, additive_backward, aggregate, quantize
from gnnaccel.cuda.structure import Rows
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.profile.bench.cells import Pair
from gnnaccel.profile.bench.shapes import Graph

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


@dataclasses.dataclass(frozen=True)
class Case:
    """A graph's index arrays, its rows [N, H, D] and a gradient of as many."""

    by_dst: Rows
    by_src: Rows
    x: Tensor
    grad: Tensor

    @property
    def size(self) -> tuple[int, int]:
        return self.x.shape[1], self.x.shape[2]


def case(graph: Graph, heads: int, width: int, seed: int = 0) -> Case:
    """Random rows on a graph."""
    view = GraphView(graph.edge_index, graph.num_nodes, graph.num_nodes)
    by_dst, by_src = view.csc(), view.csr()
    random = torch.Generator(graph.device).manual_seed(seed)
    x, grad = (torch.randn(graph.num_nodes, heads, width, device=graph.device, generator=random)
               for _ in range(2))
    return Case(by_dst, by_src, x, grad)


def stored(x: Tensor, dtype: torch.dtype, stochastic: bool) -> Tensor | quantize.Int8Rows:
    """Rows in a format, made anew; fp32 as they are."""
    key = quantize.key(x.device) if stochastic else None
    if dtype is torch.int8:
        return quantize.int8_rows(x, key)
    return quantize.bf16_rows(x, key) if dtype is torch.bfloat16 else x


def gcn(found: Case, dtype: torch.dtype) -> Pair:
    """A sum with a number per edge; both orders of the numbers are made beforehand, as belongs to a
    graph."""
    by_position = torch.rand(found.by_dst.other.shape[0], device=found.x.device) + 0.5
    transposed = by_position[found.by_src.place.long()]
    return _sum(found, dtype, False, (by_position, transposed))


def sage(found: Case, dtype: torch.dtype) -> Pair:
    """A mean. Backward's weight, one over the count, belongs to the gathered row: int8 has it in
    the scale."""
    return _sum(found, dtype, True, (None, None))


def _sum(found: Case, dtype: torch.dtype, mean: bool, weights: tuple) -> Pair:
    kind = "none" if mean else "edge"
    ahead = aggregate.variant(*found.size, dtype, torch.float32, kind, "position", False, mean,
                              found.by_dst.wide)
    back = aggregate.variant(*found.size, dtype, torch.float32, kind, "position", False, False,
                             found.by_src.wide)
    per_row = found.by_dst.indptr.diff().clamp(min=1).float().reciprocal() if mean else None

    def forward() -> Tensor:
        return aggregate.forward(ahead, found.by_dst, stored(found.x, dtype, False), weights[0])

    def training() -> tuple[Tensor, Tensor]:
        out, grad = forward(), found.grad
        if per_row is not None and dtype is not torch.int8:
            grad = grad * per_row.view(-1, 1, 1)
        rows = stored(grad, dtype, True)
        if per_row is not None and isinstance(rows, quantize.Int8Rows):
            rows = rows.times(per_row)
        return out, aggregate.forward(back, found.by_src, rows, weights[1])

    return forward, training


def gat(found: Case, dtype: torch.dtype) -> Pair:
    """Additive attention over terms that are there already."""
    heads, width = found.size
    a_src, a_dst = (torch.randn(found.x.shape[0], heads, device=found.x.device) for _ in range(2))
    none = torch.zeros(heads, width, device=found.x.device)
    wide, grad = found.by_dst.wide, None if dtype is torch.float32 else dtype
    ahead, train = (additive.variant(heads, width, dtype, torch.float32, False, False, training,
                                     wide, grad)
                    for training in (False, True))

    def forward() -> Tensor:
        return additive.forward(ahead, found.by_dst, a_src, a_dst, stored(found.x, dtype, False),
                                0.2)[0]

    def training() -> tuple[Tensor, Tensor]:
        values = stored(found.x, dtype, False)
        out, saved = additive.forward(train, found.by_dst, a_src, a_dst, values, 0.2)
        assert saved is not None  # the variant trains
        given = stored(found.grad, dtype, True)
        g = additive_backward.backward(train, found.by_dst, found.by_src, saved, given,
                                       a_src, a_dst, values, none, None, 0.2)
        return out, g.values

    return forward, training


LAYERS = {"GCN 64": (gcn, 1, 64), "GCN 128": (gcn, 1, 128), "GCN 256": (gcn, 1, 256),
          "SAGE 128": (sage, 1, 128), "GAT 8x8": (gat, 8, 8), "GAT 1x128": (gat, 1, 128)}
