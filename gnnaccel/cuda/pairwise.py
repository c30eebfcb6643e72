"""Launchers for pairwise attention, forward (``src/pairwise.cu``; the kinds of score stand in ``src/pairwise.cuh``)."""
from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda import driver
from gnnaccel.cuda.dropout import OFF, Dropout
from gnnaccel.cuda.launch import THREADS, Workspace, merge_args, pointer, split_args, whole_blocks
from gnnaccel.cuda.layout import TYPES, Layout, grid, layout_for
from gnnaccel.cuda.structure import Rows

SCORES = {"gatv2": 0, "dot": 1, "cosine": 2, "mx": 3, "sd": 4}


@dataclass(frozen=True)
class Variant:
    """Everything that selects a compiled kernel. ``score``: a key of `SCORES`."""

    score: str
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

    @property
    def own_values(self) -> bool:
        """Whether values are rows of their own; otherwise they are the keys."""
        return self.score == "dot"

    def defines(self, unroll: int | None = None, **more) -> tuple:
        flags = dict(SCORE=SCORES[self.score], ROW_T=TYPES[self.row], OUT_T=TYPES[self.out],
                     OFF_T="i64" if self.wide else "int", EDGE=int(self.edge), DROPOUT=int(self.dropout), **more)
        return self.layout.defines(unroll) + tuple((k, str(v)) for k, v in flags.items())


@dataclass(frozen=True)
class Operands:
    """Inputs of a pairwise layer, contiguous and of ``variant.row`` unless said otherwise.

    ``keys`` [num_src, H, D]; ``values`` likewise, None where values are the keys; ``queries`` [num_dst, H, D]; ``edges``
    [edges, H, D] by edge id or None; ``att`` [H, D] fp32 (GATv2); ``c_src`` [num_src, H], ``c_dst`` [num_dst, H] fp32 node
    terms (cosine, MX).
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

    def constants(self) -> tuple:
        return np.float32(self.scale), np.float32(self.slope)


@functools.lru_cache(maxsize=256)
def _defines(variant: Variant) -> tuple:
    return variant.defines(TRAIN=int(variant.train))


def forward(variant: Variant, graph: Rows, x: Operands, dropout: Dropout = OFF) -> tuple[Tensor, Tensor | None]:
    """Softmax over incoming edges of the score, then the weighted sum: (out [num_dst, H, D], lse [num_dst, H] under train)."""
    h, d, device, layout = variant.heads, variant.width, x.keys.device, variant.layout
    out = torch.empty(graph.rows, h, d, dtype=variant.out, device=device)
    lse = torch.empty(graph.rows, h, device=device) if variant.train else None
    chunks, heavy = graph.split.sizes()
    slots = whole_blocks(chunks)
    work = Workspace([chunks * h * d, chunks * 3 * h], device)
    values = x.values if variant.own_values else x.keys
    find = driver.current().kernel
    find("pairwise", "forward", _defines(variant))(
        grid(slots + graph.rows, layout), THREADS, 0,
        (graph.indptr.data_ptr(), graph.other.data_ptr(), graph.place.data_ptr(), np.int32(graph.rows))
        + split_args(graph, slots)
        + (x.keys.data_ptr(), values.data_ptr(), x.queries.data_ptr(), pointer(x.edges), pointer(x.att), pointer(x.c_src),
           pointer(x.c_dst)) + x.constants() + dropout.args() + (out.data_ptr(), pointer(lse)) + tuple(work.pointers))
    if heavy:
        find("pairwise", "merge", _defines(variant))(
            grid(heavy, layout), THREADS, layout.scratch(),
            merge_args(graph) + (out.data_ptr(), pointer(lse)) + tuple(work.pointers))
    return out, lse
