"""Launchers for pairwise attention, backward (``src/pairwise_backward.cu``)."""
from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda import driver
from gnnaccel.cuda.dropout import OFF, Dropout
from gnnaccel.cuda.launch import THREADS, Workspace, merge_args, pointer, split_args, whole_blocks
from gnnaccel.cuda.layout import WARPS, grid
from gnnaccel.cuda.pairwise import Operands, Variant
from gnnaccel.cuda.structure import Rows

# Blocks of the destination pass under GATv2: its sum for the attention vector lives in registers from row to row.
_ATT_BLOCKS = 4096


@dataclass
class Gradients:
    """Gradients of `pairwise.Operands`, None where there is no such operand. Rows in the rows' dtype, the others fp32."""

    keys: Tensor
    queries: Tensor
    values: Tensor | None
    edges: Tensor | None
    att: Tensor | None
    c_src: Tensor | None
    c_dst: Tensor | None


@functools.lru_cache(maxsize=512)
def _defines(variant: Variant, by_src: bool) -> tuple:
    unroll = max(1, min(4, variant.layout.unroll // (1 if variant.layout.packs * variant.layout.vec < 4 else 2)))
    return variant.defines(unroll, BY_SRC=int(by_src))


def _kernel(variant: Variant, entry: str, by_src: bool):
    return driver.current().kernel("pairwise_backward", entry, _defines(variant, by_src))


def backward(variant: Variant, by_dst: Rows, by_src: Rows, x: Operands, out: Tensor, lse: Tensor, grad: Tensor,
             edge_grad: bool = False, dropout: Dropout = OFF) -> Gradients:
    """Gradients of `pairwise.forward`; ``out`` and ``lse`` are its results, ``grad`` [num_dst, H, D] of ``variant.out``."""
    h, device, layout = variant.heads, grad.device, variant.layout
    packed = torch.empty(grad.shape[0], 2, h, device=device)
    _kernel(variant, "prepare", True)(grid(grad.shape[0], layout, layout.slots), THREADS, 0, (
        np.int32(grad.shape[0]), grad.data_ptr(), out.data_ptr(), lse.data_ptr(), packed.data_ptr()))
    d_edges = torch.zeros_like(x.edges) if edge_grad else None  # zeros: dropped self loops are never visited
    d_keys, d_values, d_c_src, _ = _pass(variant, True, by_src, by_dst.place, x, packed, grad, None, dropout)
    d_queries, _, d_c_dst, d_att = _pass(variant, False, by_dst, by_dst.place, x, packed, grad, d_edges, dropout)
    return Gradients(d_keys, d_queries, d_values, d_edges, d_att, d_c_src, d_c_dst)


def _pass(variant: Variant, by_src: bool, graph: Rows, eid: Tensor, x: Operands, packed: Tensor, grad: Tensor,
          d_edges: Tensor | None, dropout: Dropout):
    """One direction: (gradient of its score rows, of its value rows, of its node term, of the attention vector)."""
    h, d, device, layout = variant.heads, variant.width, grad.device, variant.layout
    values = x.values if variant.own_values else x.keys
    own, other = ((x.keys, values), (x.queries, grad)) if by_src else ((x.queries, grad), (x.keys, values))
    d_a = torch.empty_like(own[0])
    d_b = torch.empty_like(values) if by_src and variant.own_values else None
    term = x.c_src if by_src else x.c_dst
    d_node = torch.empty_like(term) if term is not None else None
    chunks, heavy = graph.split.sizes()
    slots = whole_blocks(chunks)
    row = chunks * h * d
    work = Workspace([row, row if d_b is not None else 0, chunks * h], device)
    blocks, tiles = grid(slots + graph.rows, layout)
    part_att = None
    if not by_src and variant.score == "gatv2":
        blocks = max(1, min(blocks, _ATT_BLOCKS))
        part_att = torch.empty(blocks, h, d, device=device)
    _kernel(variant, "backward", by_src)(
        (blocks, tiles), THREADS, WARPS * layout.tile_heads * d * 4 if part_att is not None else 0,
        (graph.indptr.data_ptr(), graph.other.data_ptr(), graph.place.data_ptr(), eid.data_ptr(), np.int32(graph.rows))
        + split_args(graph, slots)
        + (own[0].data_ptr(), own[1].data_ptr(), other[0].data_ptr(), other[1].data_ptr(), pointer(x.edges), pointer(x.att),
           pointer(x.c_src), pointer(x.c_dst), packed.data_ptr()) + x.constants() + dropout.args()
        + (d_a.data_ptr(), pointer(d_b), pointer(d_node), pointer(d_edges)) + tuple(work.pointers) + (pointer(part_att),))
    if heavy:
        _kernel(variant, "merge", by_src)(
            grid(heavy, layout), THREADS, layout.scratch(),
            merge_args(graph) + (d_a.data_ptr(), pointer(d_b), pointer(d_node)) + tuple(work.pointers))
    return d_a, d_b, d_node, part_att.sum(0) if part_att is not None else None
