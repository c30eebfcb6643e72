"""Launchers for additive attention, forward (``src/additive.cu``)."""
from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda import additive_pmf, driver
from gnnaccel.cuda.dropout import OFF, Dropout
from gnnaccel.cuda.launch import THREADS, Workspace, merge_args, pointer, split_args, whole_blocks
from gnnaccel.cuda.layout import TYPES, Layout, grid, layout_for
from gnnaccel.cuda.structure import Rows


@dataclass(frozen=True)
class Variant:
    """Everything that selects a compiled kernel. ``row``/``out``: dtypes of the gathered rows and of the result."""

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

    def defines(self, **more) -> tuple:
        flags = dict(ROW_T=TYPES[self.row], OUT_T=TYPES[self.out], OFF_T="i64" if self.wide else "int", EDGE=int(self.edge),
                     DROPOUT=int(self.dropout), **more)
        return self.layout.defines() + tuple((k, str(v)) for k, v in flags.items())


@functools.lru_cache(maxsize=256)
def _defines(variant: Variant) -> tuple:
    return variant.defines(TRAIN=int(variant.train), DIRECT=int(variant.layout.direct))


@dataclass
class Result:
    """``out`` [rows, H, D]; under ``train`` also ``lse`` [rows, H] (base 2), the parts ``plus`` and ``minus`` of the output
    from edges whose z is positive and from the others, [rows, H, D], and ``mass`` [2, rows, H], their shares of the softmax."""

    out: Tensor
    lse: Tensor | None = None
    plus: Tensor | None = None
    minus: Tensor | None = None
    mass: Tensor | None = None

    def pointers(self) -> tuple:
        return (self.out.data_ptr(),) + tuple(pointer(t) for t in (self.lse, self.plus, self.minus, self.mass))


def _empty_result(variant: Variant, rows: int, device: torch.device) -> Result:
    h, d = variant.heads, variant.width
    out = torch.empty(rows, h, d, dtype=variant.out, device=device)
    if not variant.train:
        return Result(out)
    small, parts = torch.empty(3, rows, h, device=device), torch.empty(2, rows, h, d, device=device)
    return Result(out, small[0], parts[0], parts[1], small[1:])


def _workspace(variant: Variant, chunks: int, device: torch.device) -> Workspace:
    """Sums [chunks, H*D], those over positive z apart (train only), statistics [chunks, 3, H]."""
    row = chunks * variant.heads * variant.width
    return Workspace([row, row if variant.train else 0, chunks * 3 * variant.heads], device)


def forward(variant: Variant, graph: Rows, a_src: Tensor, a_dst: Tensor | None, values: Tensor, slope: float,
            a_edge: Tensor | None = None, dropout: Dropout = OFF, pmf: bool = False) -> Result:
    """GAT's aggregation: softmax over incoming edges of leaky_relu(a_src + a_dst + a_edge), then the weighted sum.

    Args:
        graph: the CSC.
        a_src: [num_src, H] fp32. a_dst: [num_dst, H] fp32 or None for zeros.
        values: [num_src, H, D] of ``variant.row``, contiguous.
        a_edge: [edges, H] fp32, by edge id, when ``variant.edge``.
        pmf: long rows by PMF instead of split rows.
    """
    result = _empty_result(variant, graph.rows, values.device)
    chunks, heavy = graph.split.sizes()
    inputs = a_src.data_ptr(), pointer(a_dst), pointer(a_edge), np.float32(slope)
    if pmf and heavy:
        additive_pmf.long_rows(variant, graph, inputs, values, dropout, result)
        chunks = heavy = 0  # the long rows are done; the kernel leaves them alone by their length
    layout, slots = variant.layout, whole_blocks(chunks)
    work = _workspace(variant, chunks, values.device)
    outputs = result.pointers()
    find, defines = driver.current().kernel, _defines(variant)
    find("additive", "forward", defines)(
        grid(slots + graph.rows, layout), THREADS, layout.scratch(),
        (graph.indptr.data_ptr(), graph.other.data_ptr(), graph.place.data_ptr(), np.int32(graph.rows))
        + split_args(graph, slots) + inputs + dropout.args()
        + (values.data_ptr(),) + outputs + tuple(work.pointers))
    if heavy:
        find("additive", "merge", defines)(grid(heavy, layout), THREADS, layout.scratch(),
                                           merge_args(graph) + (np.int32(graph.rows),) + outputs + tuple(work.pointers))
    return result
