"""Launchers for pairwise attention (``src/pairwise.cu``, ``src/pairwise_backward.cu``; the kinds of
score stand in ``src/pairwise.cuh``)."""
from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import (NOTHING, THREADS, WARPS, Kernels, Layout, RowVariant,
                                          grid, layout_for, pointer, rows_like, workspace)
from gnnaccel.cuda.structures import bands
from gnnaccel.cuda.structures.structure import Rows
from gnnaccel.cuda.traverse.dropout import OFF, Dropout

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
        if nodes * self.heads * head < bands.LEAST:  # to look for the kernels takes longer
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


# --- backward -------------------------------------------------------------------------------------

# Blocks of the destination pass under GATv2: its sum for the attention vector lives in registers
# from row to row.
_ATT_BLOCKS = 4096


@dataclass
class Gradients:
    """Gradients of `pairwise.Operands`, None where there is no such operand. Rows in the rows'
    dtype, the others fp32.

    ``att``: under ``variant.vectors`` that of each destination's vector, [num_dst, H, D].
    """

    keys: Tensor
    queries: Tensor
    values: Tensor | None
    edges: Tensor | None
    att: Tensor | None
    c_src: Tensor | None
    c_dst: Tensor | None


def prepare(variant: Variant, by_dst: Rows, x: Operands, out: Tensor, norm: Tensor,
            grad: Tensor) -> Tensor:
    """Operand of `backward`, [num_dst, H, 4] fp32, made of the results of `pairwise.forward`,
    ``out`` (without bias) and ``norm``, and of ``grad`` [num_dst, H, D] of ``variant.out``."""
    rows, layout = grad.shape[0], variant.layout
    packed = torch.empty(rows, variant.heads, 4, dtype=torch.float32, device=grad.device)
    variant.backward_kernels(True)("prepare")(grid(rows, layout, layout.slots), THREADS, 0, (
        np.int32(rows), grad.data_ptr(), out.data_ptr(), norm.data_ptr(), pointer(x.c_dst),
        *(by_dst.launched or by_dst.launch()).graph[:2], packed.data_ptr()))
    return packed


def backward(variant: Variant, by_dst: Rows, by_src: Rows, x: Operands, packed: Tensor,
             grad: Tensor, edge_grad: bool = False, dropout: Dropout = OFF,
             keep: bool = False) -> Gradients:
    """Gradients of `pairwise.forward`; ``packed`` from `prepare`, ``grad`` as there.

    ``keep``: the gradients of the scores, [edges, H] fp32, are kept between the two passes, which
    saves gathering values and gradients a second time. Dot product without edge rows only;
    ``by_src`` has its `Rows.inverse` then.
    """
    d_edges = None if x.edges is None or not edge_grad else by_dst.edges_like(x.edges)
    score_grad = (torch.empty(by_src.other.shape[0], variant.heads, dtype=torch.float32,
                              device=grad.device) if keep else None)
    d_keys, d_values, d_c_src, _ = _pass(variant, True, by_src, by_dst.place, x, packed, grad,
                                         None, dropout, score_grad)
    if score_grad is not None:
        assert by_src.inverse is not None
        return Gradients(d_keys, _queries(variant, by_dst, by_src.inverse, x, score_grad), d_values,
                         None, None, None, None)
    d_queries, _, d_c_dst, d_att = _pass(variant, False, by_dst, by_dst.place, x, packed, grad,
                                         d_edges, dropout, None)
    return Gradients(d_keys, d_queries, d_values, d_edges, d_att, d_c_src, d_c_dst)


def _queries(variant: Variant, graph: Rows, inverse: Tensor, x: Operands, kept: Tensor) -> Tensor:
    """The gradient of queries from those of the scores."""
    variant = variant.banded(x.keys.shape[0], graph, 1)
    layout, kernels = variant.layout, variant.backward_kernels(False, True)
    d_queries, launch = rows_like(x.queries), graph.launch()
    memory, parts = workspace(launch.chunks, (variant.heads * variant.width, 0, 0), kept.device)
    indptr, other, _, rows = launch.graph
    kernels("queries")(grid(launch.slots + graph.rows, layout), THREADS, 0,
                       (indptr, other, inverse.data_ptr(), rows) + launch.split
                       + (x.keys.data_ptr(), kept.data_ptr(), d_queries.data_ptr(), parts[0]))
    if launch.heavy:
        kernels("merge")(grid(launch.heavy, layout), THREADS, layout.scratch,
                         launch.merge + (d_queries.data_ptr(), 0, 0) + parts)
    return d_queries


def _pass(variant: Variant, by_src: bool, graph: Rows, eid: Tensor, x: Operands, packed: Tensor,
          grad: Tensor, d_edges: Tensor | None, dropout: Dropout, kept: Tensor | None):
    """One direction: (gradient of its score rows, of its value rows, of its node term, of the
    attention vector)."""
    h, d, device = variant.heads, variant.width, grad.device
    values = x.values if x.values is not None and variant.own_values else x.keys
    d_b: Tensor | None
    own, other = (((x.keys, values), (x.queries, grad)) if by_src
                  else ((x.queries, grad), (x.keys, values)))
    if by_src and variant.beside:
        d_a, d_b = torch.empty((x.keys.shape[0], 2, h, d), dtype=x.keys.dtype,
                               device=device).unbind(1)
    else:
        d_a = rows_like(own[0])
        d_b = rows_like(values) if by_src and variant.own_values else None
    term, vector = x.c_src if by_src else x.c_dst, variant.vectors and not by_src
    d_node = (torch.empty((graph.rows, h, d), dtype=torch.float32, device=device) if vector
              else None if term is None else torch.empty_like(term))
    variant = variant.banded(other[0].shape[0], graph, 2 if by_src or variant.own_values else 1)
    layout, launch, kernels = (variant.layout, graph.launched or graph.launch(),
                               variant.backward_kernels(by_src, kept is not None))
    row = h * d
    memory, parts = (workspace(launch.chunks, (row, row if d_b is not None or vector else 0, h),
                               device) if launch.chunks else NOTHING)
    blocks, tiles = grid(launch.slots + graph.rows, layout)
    part_att = None
    if not by_src and variant.score == "gatv2" and not vector:
        blocks = max(1, min(blocks, _ATT_BLOCKS))
        part_att = torch.empty((blocks, h, d), dtype=torch.float32, device=device)
    indptr, neighbours, place, rows = launch.graph
    terms = x.c_src if not variant.vectors else x.of_src if by_src else x.of_dst
    inputs = tuple([0 if t is None else t.data_ptr()
                    for t in (eid, *own, *other, x.edges, x.att, terms, packed)])
    outputs = tuple([0 if t is None else t.data_ptr() for t in (d_a, d_b, d_node, d_edges, kept)])
    kernels("backward")(
        (blocks, tiles), THREADS, WARPS * layout.tile_heads * d * 4 if part_att is not None else 0,
        (indptr, neighbours, place, inputs[0], rows) + launch.split + inputs[1:]
        + (np.float32(x.scale), np.float32(x.slope)) + dropout.args + outputs + parts
        + (0 if part_att is None else part_att.data_ptr(),))
    if launch.heavy:
        kernels("merge")(grid(launch.heavy, layout), THREADS, layout.scratch,
                         launch.merge + outputs[:3] + parts)
    if vector:
        return d_a, d_b, None, d_node
    return d_a, d_b, d_node, part_att.sum(0) if part_att is not None else None
