"""Launchers for additive attention, backward (``src/additive_backward.cu``; the mathematics stand there)."""
from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda import driver
from gnnaccel.cuda.additive import Result, Variant
from gnnaccel.cuda.dropout import OFF, Dropout
from gnnaccel.cuda.launch import THREADS, Workspace, merge_args, pointer, split_args, whole_blocks
from gnnaccel.cuda.layout import grid
from gnnaccel.cuda.structure import Rows


@functools.lru_cache(maxsize=256)
def _defines(variant: Variant, edge_grad: bool) -> tuple:
    return variant.defines(TRAIN=1, EDGE_GRAD=int(edge_grad), DIRECT=int(variant.layout.direct))


def _kernel(variant: Variant, entry: str, edge_grad: bool):
    return driver.current().kernel("additive_backward", entry, _defines(variant, edge_grad))


@dataclass
class Gradients:
    """``values`` [num_src, H, D] in the rows' dtype; ``a_src`` [num_src, H], ``a_dst`` [num_dst, H], ``a_edge`` fp32."""

    values: Tensor
    a_src: Tensor
    a_dst: Tensor
    a_edge: Tensor | None


def backward(variant: Variant, graph: Rows, eid: Tensor, saved: Result, grad: Tensor, a_src: Tensor, a_dst: Tensor | None,
             values: Tensor, att_src: Tensor, att_dst: Tensor | None, slope: float, a_edge: Tensor | None = None,
             edge_grad: bool = False, dropout: Dropout = OFF) -> Gradients:
    """Gradients of `additive.forward`, and through the scores of the rows.

    Args:
        graph: the transposed graph; ``eid`` is the CSC's ``place``.
        saved: what forward left under ``train``; its ``out`` is not read.
        grad: [num_dst, H, D] of ``variant.out``, contiguous.
        att_src, att_dst: [H, D] fp32. ``values`` receives ``a_src``'s gradient times ``att_src`` and, unless ``att_dst`` is
            None (destinations are other nodes), ``a_dst``'s times ``att_dst``.
    """
    h, d, device, layout = variant.heads, variant.width, values.device, variant.layout
    num_dst = grad.shape[0]
    packed = torch.empty(num_dst, 4, h, device=device)
    d_a_dst = torch.empty(num_dst, h, device=device)
    _kernel(variant, "prepare", edge_grad)(grid(num_dst, layout, layout.slots), THREADS, 0, (
        np.int32(num_dst), grad.data_ptr(), saved.plus.data_ptr(), saved.minus.data_ptr(), saved.mass.data_ptr(),
        saved.lse.data_ptr(), pointer(a_dst), np.float32(slope), packed.data_ptr(), d_a_dst.data_ptr()))
    chunks, heavy = graph.split.sizes()
    slots = whole_blocks(chunks)
    work = Workspace([chunks * h * d, chunks * h * d, chunks * h], device)
    d_values, d_a_src = torch.empty_like(values), torch.empty(graph.rows, h, device=device)
    d_a_edge = torch.zeros_like(a_edge) if edge_grad else None  # zeros: dropped self loops are never visited
    tail = (values.data_ptr(), att_src.data_ptr(), pointer(att_dst), d_a_dst.data_ptr() if att_dst is not None else 0,
            d_values.data_ptr(), d_a_src.data_ptr())
    _kernel(variant, "sources", edge_grad)(
        grid(slots + graph.rows, layout), THREADS, layout.scratch(),
        (graph.indptr.data_ptr(), graph.other.data_ptr(), graph.place.data_ptr(), eid.data_ptr(), np.int32(graph.rows))
        + split_args(graph, slots) + (packed.data_ptr(), a_src.data_ptr(), pointer(a_edge), np.float32(slope))
        + dropout.args() + (grad.data_ptr(),) + tail + (pointer(d_a_edge),) + tuple(work.pointers))
    if heavy:
        _kernel(variant, "merge", edge_grad)(grid(heavy, layout), THREADS, layout.scratch(),
                                             merge_args(graph) + (np.float32(slope),) + tail + tuple(work.pointers))
    return Gradients(d_values, d_a_src, d_a_dst, d_a_edge)
