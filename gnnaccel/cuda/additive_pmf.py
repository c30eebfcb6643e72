"""Launchers for PMF: the long rows of additive attention (``src/additive_pmf.cu``)."""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda import driver
from gnnaccel.cuda.dropout import Dropout
from gnnaccel.cuda.launch import THREADS, Workspace, merge_args, pointer, split_args, whole_blocks
from gnnaccel.cuda.layout import grid
from gnnaccel.cuda.structure import Rows

if TYPE_CHECKING:
    from gnnaccel.cuda.additive import Result, Variant


@functools.lru_cache(maxsize=256)
def _defines(variant: Variant) -> tuple:
    return variant.defines(TRAIN=int(variant.train))


def long_rows(variant: Variant, graph: Rows, inputs: tuple, values: Tensor, dropout: Dropout, result: Result) -> None:
    """Fills the long rows of ``result`` in four launches: statistics of chunks, their merge, aggregation of chunks, their sum.

    ``inputs``: the kernel parameters a_src, a_dst, a_edge and slope.
    """
    layout, device = variant.layout, values.device
    chunks, heavy = graph.split.sizes()
    slots, row = whole_blocks(chunks), chunks * variant.heads * variant.width
    work = Workspace([row, row if variant.train else 0, chunks * 3 * variant.heads], device)
    minus, plus, stats = work.pointers
    lse, mass = result.lse, result.mass
    if lse is None:
        small = torch.empty(3, graph.rows, variant.heads, device=device)
        lse, mass = small[0], small[1:]
    head = (graph.indptr.data_ptr(), graph.other.data_ptr(), graph.place.data_ptr()) + split_args(graph, slots) + inputs

    def launch(entry: str, items: int, args: tuple) -> None:
        kernel = driver.current().kernel("additive_pmf", entry, _defines(variant))
        kernel(grid(items, layout), THREADS, layout.scratch(), args)

    launch("lse_chunks", slots, head + (stats,))
    launch("lse_merge", heavy, merge_args(graph) + (np.int32(graph.rows), stats, lse.data_ptr(), mass.data_ptr()))
    launch("aggregate_chunks", slots, head + dropout.args() + (values.data_ptr(), lse.data_ptr(), minus, plus))
    launch("sum_chunks", heavy, merge_args(graph) + (result.out.data_ptr(), pointer(result.plus), pointer(result.minus),
                                                     minus, plus))
