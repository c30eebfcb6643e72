"""Launchers for PMF: the long rows of additive attention (``src/additive_pmf.cu``)."""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gnnaccel.cuda.dropout import Dropout
from gnnaccel.cuda.launch import THREADS, grid, workspace
from gnnaccel.cuda.structure import Rows

if TYPE_CHECKING:
    from gnnaccel.cuda.additive import Variant


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
