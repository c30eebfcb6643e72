"""Launchers for pairwise attention, forward (``src/pairwise.cu``; the kinds of score stand in
``src/pairwise.cuh``)."""
from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda import bands
from gnnaccel.cuda.dropout import OFF, Dropout
from gnnaccel.cuda.launch import NOTHING, THREADS, Kernels, grid, workspace
from gnnaccel.cuda.layout import Layout, layout_for
from gnnaccel.cuda.structure import Rows
from gnnaccel.cuda.variant import RowVariant

SCORES = {"gatv2": 0, "dot": 1, "cosine": 2, "mx": 3, "sd": 4}


@dataclass(frozen=True)
class Variant(RowVariant):
    """Key of a kernel of pairwise attention. ``score``: a key of `SCORES`; ``beside``: keys
    and values, and their gradients, lie side by side, as in [num_src, 2, H, D] (dot product only).
    ``vectors``: there are several attention vectors (GATv2 only). ``tile``: the most heads, a power
    of two, that are computed together, 0 for as many as fit."""

    score: str = "dot"
    beside: bool = False
    vectors: bool = False
    tile: int = 0

    @functools.cached_property
    def layout(self) -> Layout:
        return (layout_for(self.heads, self.width, most_heads=self.tile) if self.tile
                else layout_for(self.heads, self.width))

    def banded(self, nodes: int, graph: Rows, arrays: int) -> Variant:
        """This variant head by head (`bands`) where that pays, else itself: the graph's edges
        gather rows of ``arrays`` arrays of ``nodes`` nodes. Of narrower heads a line has several,
        and then the other costs of an edge count for more than its rows."""
        size = self.row.itemsize
        head = self.width * size * arrays
        if bands.few(nodes, self.heads * head):  # before a look for the kernels, which takes longer
            return self
        forms = self.in_bands()
        pay = forms and bands.pay(nodes, self.heads * head, graph.rows, graph.other.shape[0],
                                  graph.other.device, size=size, least=head, share=2.0)
        return forms[0] if pay else self

    def in_bands(self) -> tuple[Variant, ...]:
        """Variants that `banded` may give instead of this."""
        long = self.heads > 1 and self.width * self.row.itemsize >= bands.LINE
        return (_by_head(self),) if long else ()

    @functools.cached_property
    def own_values(self) -> bool:
        """Whether values are rows of their own; otherwise they are the keys."""
        return self.score == "dot"

    def defines(self, unroll: int | None = None, **more) -> tuple:
        vectors = {"VECTORS": 1} if self.vectors else {}
        return super().defines(unroll, SCORE=SCORES[self.score], BESIDE=int(self.beside),
                               **vectors, **more)

    @functools.cached_property
    def forward_kernels(self) -> Kernels:
        return Kernels("pairwise", self.defines(TRAIN=int(self.train)))

    def backward_kernels(self, by_src: bool, kept: bool = False) -> Kernels:
        """Kernels of a pass; ``kept``: those that keep the scores' gradients between passes."""
        return self._kept_kernels[by_src] if kept else self._backward_kernels[by_src]

    @functools.cached_property
    def _backward_kernels(self) -> tuple[Kernels, Kernels]:
        """Kernels by destination, by source. Twice forward's rows are live, so fewer in flight."""
        return (Kernels("pairwise_backward", self.defines(self._half_unroll, BY_SRC=0)),
                Kernels("pairwise_backward", self.defines(self._half_unroll, BY_SRC=1)))

    @functools.cached_property
    def _kept_kernels(self) -> tuple[Kernels, Kernels]:
        """Kernels by destination, where only keys are live, and by source, where rows of few edges
        each (scores are kept where nodes, not edges, decide how much memory is held) gain more from
        warps beside each other than from edges in flight in each."""
        few = {"LEAST_BLOCKS": 10} if self.layout.packs * self.layout.vec <= 4 else {}
        return (Kernels("pairwise_backward", self.defines(BY_SRC=0, KEPT=1)),
                Kernels("pairwise_backward", self.defines(1, BY_SRC=1, KEPT=1, **few)))

    @property
    def _half_unroll(self) -> int:
        layout = self.layout
        return layout.unroll if layout.packs * layout.vec < 4 else max(1, layout.unroll // 2)


#: `Variant`s by their fields in order, one object each, so that their kernels are made once
variant = functools.lru_cache(maxsize=512)(Variant)


@functools.lru_cache(maxsize=128)
def _by_head(variant: Variant) -> Variant:
    return replace(variant, tile=1)


@dataclass(frozen=True)
class Operands:
    """Inputs of a pairwise layer, contiguous and of ``variant.row`` unless said otherwise.

    ``keys`` [num_src, H, D]; ``values`` likewise, None where values are the keys; ``queries``
    [num_dst, H, D]; ``edges`` [edges, H, D] by edge id or None; ``att`` [H, D] fp32 (GATv2);
    ``c_src`` [num_src, H], ``c_dst`` [num_dst, H] fp32 node terms (cosine, MX). Under
    ``variant.vectors``, ``att`` is [vectors, H, D], and ``of_src`` [num_src], ``of_dst`` [num_dst]
    int32 tell each row's, which must be the same at both ends of an edge. Under ``variant.beside``,
    keys and values are ``both[:, 0]`` and ``both[:, 1]`` of one tensor.
    """

    keys: Tensor
    queries: Tensor
    values: Tensor | None = None
    edges: Tensor | None = None
    att: Tensor | None = None
    c_src: Tensor | None = None
    c_dst: Tensor | None = None
    scale: float = 1.0
    slope: float = 0.0
    of_src: Tensor | None = None
    of_dst: Tensor | None = None


def forward(variant: Variant, graph: Rows, x: Operands, dropout: Dropout = OFF,
            bias: Tensor | None = None, keep: bool = False) -> tuple[Tensor, Tensor | None,
                                                                     Tensor | None]:
    """Softmax over incoming edges of the score, then the weighted sum, plus ``bias`` [H * D] fp32.

    Returns out [num_dst, H, D] and, under ``variant.train``, the sum without bias in fp32, which is
    a tensor of its own with a bias, with ``keep`` or where out is not fp32, and norm [2, num_dst,
    H]: the softmax's maximum and the reciprocal of its sum.
    """
    own_values = variant.own_values
    variant = variant.banded(x.keys.shape[0], graph, 2 if own_values else 1)
    h, d, device, layout, rows = (variant.heads, variant.width, x.keys.device, variant.layout,
                                  graph.rows)
    out = torch.empty((rows, h, d), dtype=variant.out, device=device)
    norm = torch.empty((2, rows, h), dtype=torch.float32, device=device) if variant.train else None
    separate = variant.train and (keep or bias is not None or variant.out is not torch.float32)
    raw = torch.empty((rows, h, d), dtype=torch.float32, device=device) if separate else None
    launch = graph.launched or graph.launch()
    memory, (acc, _, stats) = (workspace(launch.chunks, (h * d, 0, 3 * h), device)
                               if launch.chunks else NOTHING)
    values = x.values if own_values and x.values is not None else x.keys
    args = tuple([0 if t is None else t.data_ptr()
                  for t in (x.keys, values, x.queries, x.edges, x.att, x.c_src,
                            x.c_dst if x.of_dst is None else x.of_dst, out, raw, bias, norm)])
    variant.forward_kernels("forward")(
        grid(launch.slots + rows, layout), THREADS, 0,
        launch.graph + launch.split + args[:7] + (np.float32(x.scale), np.float32(x.slope))
        + dropout.args + args[7:] + (acc, stats))
    if launch.heavy:
        variant.forward_kernels("merge")(
            grid(launch.heavy, layout), THREADS, layout.scratch,
            launch.merge + (launch.graph[3], *args[7:], acc, stats))
    return out, (out if raw is None else raw) if variant.train else None, norm
