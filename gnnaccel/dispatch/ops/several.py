"""Several reduces of neighbours' rows as the operation of a plain layer: `multi_reduce` without
weights.

``reduce`` is "several:" and the reduces, with commas.
"""
from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.cuda import multi_reduce as kernels
from gnnaccel.cuda.aggregate import factored
from gnnaccel.dispatch.ops import multi_reduce
from gnnaccel.dispatch.ops.graph import OpGraph

OPERANDS = ("x",)
FORMULAS = {"several": "out[i] = several reduces of x[j], side by side"}


def name_of(reduces: list[str]) -> str:
    """The operation's name."""
    return f"several:{','.join(reduces)}"


def _reduces(reduce: str) -> tuple[str, ...]:
    return tuple(reduce.partition(":")[2].split(","))


def by_operations(graph: OpGraph, reduce: str, x: Tensor) -> Tensor:
    """[num_dst, reduces, *features] of x [num_src, *features], by torch operations. Equal messages
    share a gradient evenly."""
    return multi_reduce.by_operations(graph, x, _reduces(reduce), None, False)


def by_kernels(graph: OpGraph, reduce: str, x: Tensor) -> Tensor:
    """The reductions by the CUDA kernels."""
    return multi_reduce.multi_reduce(graph, x, _reduces(reduce),
                                     zero_share=False).kernel.run()  # type: ignore[union-attr]


def prepare(reduce: str, width: int, dtype: torch.dtype, weighted: bool) -> None:
    """Compile what `by_kernels` launches."""
    multi_reduce.compiler(kernels.variant(*factored(width), dtype, _reduces(reduce)))()
