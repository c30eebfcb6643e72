"""Launchers for additive attention, backward (``src/additive_backward.cu``, which has the
mathematics)."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.attention.additive import Saved, Variant, check_format
from gnnaccel.cuda.int8.quantize import Int8Rows, addresses
from gnnaccel.cuda.runtime.launch import THREADS, grid, pointer, rows_like, workspace
from gnnaccel.cuda.structures.structure import Rows
from gnnaccel.cuda.traverse.dropout import OFF, Dropout


class Gradients(NamedTuple):
    """``values`` [num_src, H, D] in the rows' dtype, fp32 for int8; ``a_src`` [num_src, H],
    ``a_dst`` fp32 [num_dst, H], or [num_src, H] with zeros behind where destinations are the first
    sources, and ``a_edge`` fp32."""

    values: Tensor
    a_src: Tensor
    a_dst: Tensor
    a_edge: Tensor | None


def backward(variant: Variant, by_dst: Rows, graph: Rows, saved: Saved, grad: Tensor | Int8Rows,
             a_src: Tensor, a_dst: Tensor | None, values: Tensor | Int8Rows, att_src: Tensor,
             att_dst: Tensor | None, slope: float, a_edge: Tensor | None = None,
             edge_grad: bool = False, dropout: Dropout = OFF) -> Gradients:
    """Gradients of `additive.forward`, and through the scores of the rows.

    Args:
        by_dst, graph: the graph that forward had, and the transposed one.
        grad: [num_dst, H, D] of ``variant.grad``, or of ``variant.out`` if that is None,
            contiguous; with torch.int8 `Int8Rows` of H * D channels. Every gradient is linear in
            it: rounded stochastically, it leaves them unbiased.
        values: as forward's; with int8 the very rows that forward had.
        att_src, att_dst: [H, D] fp32. ``values`` receives ``a_src``'s gradient times ``att_src``
            and, unless ``att_dst`` is None (destinations are other nodes), ``a_dst``'s times
            ``att_dst``: destinations are the first of the sources then.

    Raises:
        ValueError: gradients or values in another format than the variant's.
    """
    check_format("grad", grad, variant, variant.grad or variant.out)
    check_format("values", values, variant, variant.row)
    num_dst, device, launch = saved.small.shape[1], a_src.device, graph.launch()
    variant = variant.banded(num_dst, graph.rows, graph.other.shape[0], device, back=True)
    h, d, layout = variant.heads, variant.width, variant.backward_layout
    kernels = variant.edge_grad_kernels if edge_grad else variant.backward_kernels
    small, plus, minus = saved.pointers()
    packed = torch.empty((num_dst, h, 4), dtype=torch.float32, device=device)
    d_a_dst = torch.empty((num_dst if att_dst is None else graph.rows, h), dtype=torch.float32,
                          device=device)
    if att_dst is not None and graph.rows > num_dst:
        d_a_dst[num_dst:].zero_()
    kernels("prepare")(grid(num_dst, layout, layout.slots), THREADS, 0, (
        np.int32(num_dst), *addresses(grad), plus, minus, small, pointer(a_dst), np.float32(slope),
        *by_dst.launch().graph[:2], *addresses(values), packed.data_ptr(), d_a_dst.data_ptr()))
    memory, parts = workspace(launch.chunks, (h * d, h * d, h), device)
    d_values = (torch.empty((graph.rows, h, d), dtype=torch.float32, device=device)
                if isinstance(values, Int8Rows)
                else rows_like(values))
    d_a_src = torch.empty((graph.rows, h), dtype=torch.float32, device=device)
    d_a_edge = None if a_edge is None or not edge_grad else graph.edges_like(a_edge)
    tail = (*addresses(values), att_src.data_ptr(), pointer(att_dst), layout.step,
            d_a_dst.data_ptr() if att_dst is not None else 0, d_values.data_ptr(),
            d_a_src.data_ptr())
    kernels("sources")(
        grid(launch.slots + graph.rows, layout), THREADS, layout.scratch,
        launch.graph[:3] + (by_dst.place.data_ptr(), launch.graph[3]) + launch.split
        + (packed.data_ptr(), a_src.data_ptr(), pointer(a_edge), np.float32(slope)) + dropout.args
        + addresses(grad)[:1]
        + tail + (pointer(d_a_edge),) + parts)
    if launch.heavy:
        kernels("merge")(grid(launch.heavy, layout), THREADS, layout.scratch,
                         launch.merge + tail + parts)
    return Gradients(d_values, d_a_src, d_a_dst, d_a_edge)
