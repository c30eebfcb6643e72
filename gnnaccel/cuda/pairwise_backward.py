"""Launchers for pairwise attention, backward (``src/pairwise_backward.cu``)."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.dropout import OFF, Dropout
from gnnaccel.cuda.launch import NOTHING, THREADS, grid, pointer, rows_like, workspace
from gnnaccel.cuda.layout import WARPS
from gnnaccel.cuda.pairwise import Operands, Variant
from gnnaccel.cuda.structure import Rows

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
    # zeros: dropped self loops are never visited
    d_edges = None if x.edges is None or not edge_grad else torch.zeros_like(x.edges)
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
