"""Launchers for additive attention, forward (``src/additive.cu``), and for PMF: its long rows
(``src/additive_pmf.cu``)."""
from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.int8.quantize import Int8Rows, addresses, stride
from gnnaccel.cuda.runtime.launch import (ROW_TYPES, THREADS, Kernels, Layout, RowVariant, grid,
                                          layout_for, workspace)
from gnnaccel.cuda.structures import bands
from gnnaccel.cuda.structures.structure import Rows
from gnnaccel.cuda.traverse.dropout import OFF, Dropout


@dataclass(frozen=True)
class Variant(RowVariant):
    """Key of a kernel of additive attention. ``row`` may be torch.int8: values as `Int8Rows`;
    ``grad`` is the format in which backward gathers the result's gradient: as ``out`` (None),
    torch.bfloat16 or torch.int8; ``tile``: the most heads, a power of two, that are computed
    together, 0 for as many as fit."""

    grad: torch.dtype | None = None
    tile: int = 0

    @functools.cached_property
    def layout(self) -> Layout:
        return self._layout(self.row)

    @functools.cached_property
    def backward_layout(self) -> Layout:
        """Layout of the gradients' format, as backward gathers gradients."""
        return self._layout(self.grad)

    def _layout(self, gathered: torch.dtype | None) -> Layout:
        int8 = gathered is torch.int8
        return (layout_for(self.heads, self.width, int8, self.tile) if self.tile
                else layout_for(self.heads, self.width, int8))

    def banded(self, nodes: int, rows: int, edges: int, device: torch.device,
               back: bool = False) -> Variant:
        """This variant in bands of heads (`bands`) where those pay, else itself: values, or with
        ``back`` gradients, of ``nodes`` nodes, gathered by ``edges`` edges of ``rows`` rows."""
        if self.heads == 1:
            return self
        size = ((self.grad or self.out) if back else self.row).itemsize
        head = self.width * size
        if nodes * self.heads * head < bands.LEAST:  # to look for the kernels takes longer
            return self
        forms = self.in_bands(back)
        pay = forms and bands.pay(nodes, self.heads * head, rows, edges, device, size=size,
                                  least=head)
        return forms[0] if pay else self

    def in_bands(self, back: bool) -> tuple[Variant, ...]:
        """Variants that `banded` may give; empty where rows cannot be cut. Int8 go whole."""
        gathered = self._gathered(back)
        return (() if gathered is torch.int8 or self.heads == 1
                else _in_bands(self, gathered.itemsize))

    def _gathered(self, back: bool) -> torch.dtype:
        return (self.grad or self.out) if back else self.row

    def defines(self, unroll: int | None = None, **more) -> tuple:
        return self.layout.defines(unroll) + self._flags(self.layout, **more)

    def _flags(self, layout: Layout, **more) -> tuple:
        """Definitions: direct rather than in two phases where few lanes share a head; drawing
        dropout costs too much to do it for the same edge in several lanes."""
        if torch.int8 in (self.row, self.grad):
            more["STRIDE"] = stride(self.heads * self.width)
        if self.row is torch.int8:
            more["INT8"] = 1
        return self.flags(DIRECT=int(layout.direct and not self.dropout), **more)

    def _backward(self, edge_grad: int) -> Kernels:
        grad = {} if self.grad is None else dict(GRAD_T=ROW_TYPES[self.grad],
                                                 GRAD_INT8=int(self.grad is torch.int8))
        layout = self.backward_layout
        return Kernels("additive_backward",
                       layout.defines() + self._flags(layout, TRAIN=1, EDGE_GRAD=edge_grad, **grad))

    @functools.cached_property
    def forward_kernels(self) -> Kernels:
        return Kernels("additive", self.defines(TRAIN=int(self.train)))

    @functools.cached_property
    def pmf_kernels(self) -> Kernels:
        return Kernels("additive_pmf", self.defines(TRAIN=int(self.train)))

    @functools.cached_property
    def backward_kernels(self) -> Kernels:
        return self._backward(0)

    @functools.cached_property
    def edge_grad_kernels(self) -> Kernels:
        return self._backward(1)


#: `Variant`s by their fields in order, one object each, so that their kernels are made once
variant = functools.lru_cache(maxsize=512)(Variant)


@functools.lru_cache(maxsize=128)
def _in_bands(variant: Variant, size: int) -> tuple[Variant, ...]:
    tile = bands.heads(variant.width, size)
    return (replace(variant, tile=tile),) if tile < variant.heads else ()


class Saved(NamedTuple):
    """Tensors for backward, fp32. ``small`` [4, rows, H]: the softmax's maximum, the reciprocal of
    its sum, and its shares on edges whose z is positive and on the others; ``parts`` [2, rows, H,
    D]: the parts of the output from the same two."""

    small: Tensor
    parts: Tensor

    def pointers(self) -> tuple[int, int, int]:
        """Addresses of ``small`` and of both ``parts``, as the kernels take them."""
        plus = self.parts.data_ptr()
        return self.small.data_ptr(), plus, plus + 2 * self.parts.numel()


def forward(variant: Variant, graph: Rows, a_src: Tensor, a_dst: Tensor | None,
            values: Tensor | Int8Rows, slope: float, a_edge: Tensor | None = None,
            dropout: Dropout = OFF, pmf: bool = False,
            bias: Tensor | None = None) -> tuple[Tensor, Saved | None]:
    """GAT's aggregation: softmax over incoming edges of leaky_relu(a_src + a_dst + a_edge), then
    the weighted sum.

    Args:
        graph: the CSC.
        a_src: [num_src, H] fp32. a_dst: [num_dst, H] fp32 or None for zeros.
        values: [num_src, H, D] of ``variant.row``, contiguous; with torch.int8 `Int8Rows` of H * D
            channels, whose scales join the weights of the edges. Weights are computed in fp32.
        a_edge: [edges, H] fp32, by edge id, when ``variant.edge``.
        pmf: long rows by PMF instead of split rows; not with int8.
        bias: [H * D] fp32, added to the result.

    Returns:
        the result [rows, H, D] of ``variant.out`` and, under ``variant.train``, the tensors for
        backward.

    Raises:
        ValueError: values in another format than the variant's, or int8 with ``pmf``.
    """
    check_format("values", values, variant, variant.row)
    if pmf and variant.row is torch.int8:
        raise ValueError("pmf=True: PMF kernels take no int8 values; leave it out")
    h, d, device, rows = variant.heads, variant.width, a_src.device, graph.rows
    if not pmf:
        variant = variant.banded(a_src.shape[0], rows, graph.other.shape[0], device)
    layout = variant.layout
    out = torch.empty((rows, h, d), dtype=variant.out, device=device)
    saved, pointers = None, (0, 0, 0)
    if variant.train:
        saved = Saved(torch.empty((4, rows, h), dtype=torch.float32, device=device),
                      torch.empty((2, rows, h, d), dtype=torch.float32, device=device))
        pointers = saved.pointers()
    to, bias_at, *terms = [0 if t is None else t.data_ptr()
                           for t in (out, bias, a_src, a_dst, a_edge)]
    outputs, inputs = (to, bias_at, *pointers), (*terms, np.float32(slope))
    launch = graph.launched or graph.launch()
    # the kernel below leaves long rows alone by their length
    if pmf and launch.heavy and isinstance(values, Tensor):
        long_rows(variant, graph, inputs, values, dropout, outputs)
        launch = launch._replace(slots=0, split=(*launch.split[:3], np.int32(0)), chunks=0, heavy=0)
    memory, parts = workspace(launch.chunks, (h * d, h * d if variant.train else 0, 3 * h), device)
    variant.forward_kernels("forward")(
        grid(launch.slots + rows, layout), THREADS, layout.scratch,
        launch.graph + launch.split + inputs + dropout.args + addresses(values) + outputs + parts)
    if launch.heavy:
        variant.forward_kernels("merge")(grid(launch.heavy, layout), THREADS, layout.scratch,
                                         launch.merge + (launch.graph[3],) + outputs + parts)
    return out, saved


def check_format(name: str, rows: Tensor | Int8Rows, variant: Variant, wanted: torch.dtype) -> None:
    """ValueError unless ``rows`` are in the format that ``wanted`` stands for, of as many channels
    as the variant has."""
    channels = variant.heads * variant.width
    if isinstance(rows, Int8Rows):
        if wanted is not torch.int8 or rows.width != channels:
            raise ValueError(f"{name} is Int8Rows of {rows.width} channels; the variant takes "
                             f"{channels} in {wanted}")
    elif rows.dtype is not wanted:
        raise ValueError(f"{name} is {rows.dtype}; the variant takes {wanted}, where torch.int8 "
                         "stands for Int8Rows")


# --- PMF: the long rows ---------------------------------------------------------------------------

def long_rows(variant: Variant, graph: Rows, inputs: tuple, values: Tensor, dropout: Dropout,
              outputs: tuple) -> None:
    """Fills the long rows of a result in four launches: statistics of chunks, their merge,
    aggregation of chunks, their sum.

    ``inputs``: the kernel parameters a_src, a_dst, a_edge and slope; ``outputs``: out, bias, small,
    plus and minus, of which the last three are null outside of training.
    """
    layout, device, launch = variant.layout, values.device, graph.launch()
    h, d, count = variant.heads, variant.width, launch.graph[3]
    memory, (minus, plus, stats) = workspace(launch.chunks, (h * d, h * d if variant.train else 0,
                                                             3 * h), device)
    out, bias, small, plus_out, minus_out = outputs
    if not small:
        scratch = torch.empty((4, graph.rows, h), dtype=torch.float32, device=device)
        small = scratch.data_ptr()
    head = launch.graph[:3] + launch.split + inputs

    def run(entry: str, items: int, args: tuple) -> None:
        variant.pmf_kernels(entry)(grid(items, layout), THREADS, layout.scratch, args)

    run("softmax_chunks", launch.slots, head + (stats,))
    run("softmax_merge", launch.heavy, launch.merge + (count, stats, small))
    run("aggregate_chunks", launch.slots, head + dropout.args + (values.data_ptr(), small, minus,
                                                                 plus))
    run("sum_chunks", launch.heavy, launch.merge + (out, bias, small, count, plus_out, minus_out,
                                                    minus, plus))
