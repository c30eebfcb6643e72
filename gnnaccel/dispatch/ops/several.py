"""Several reduces of neighbours' rows, to which rows of the edges may be added, as the operation of
a plain layer: `multi_reduce` without weights.

``reduce`` is "several:", or with rows of edges "several with edges:", and the reduces, with commas.
"""
from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import factored
from gnnaccel.cuda.traverse import multi_reduce as kernels
from gnnaccel.dispatch.ops import multi_reduce
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.plan import cost

OPERANDS = ("x", "edge")
seconds = cost.plain  # as of a `Candidate`, by us or natively
_WITH_EDGES = "several with edges"
FORMULAS = {"several": "out[i] = several reduces of x[j], side by side",
            _WITH_EDGES: "out[i] = several reduces of x[j] + y[e], side by side"}


def name_of(reduces: list[str], edges: bool = False) -> str:
    """The operation's name; ``edges``: with rows of edges."""
    return f"{_WITH_EDGES if edges else 'several'}:{','.join(reduces)}"


def _reduces(reduce: str) -> tuple[str, ...]:
    return tuple(reduce.partition(":")[2].split(","))


def by_operations(graph: OpGraph, reduce: str, x: Tensor, edge: Tensor | None = None) -> Tensor:
    """[num_dst, reduces, *features] of x [num_src, *features] and ``edge`` [E, *features], by torch
    operations. Equal messages share a gradient evenly."""
    return multi_reduce.by_operations(graph, x, _reduces(reduce), None, False, added=edge)


def by_kernels(graph: OpGraph, reduce: str, x: Tensor, edge: Tensor | None = None) -> Tensor:
    """The reductions by the CUDA kernels, over a graph with edges."""
    reduces = _reduces(reduce)
    return multi_reduce.run(graph, x, reduces, None, False,
                            added=edge).view(-1, len(reduces), *x.shape[1:])


def prepare(reduce: str, width: int, dtype: torch.dtype, weighted: bool) -> None:
    """Compile the kernels that `by_kernels` launches."""
    kind = "added" if reduce.startswith(_WITH_EDGES) else "none"
    multi_reduce.compiler(kernels.variant(*factored(width), dtype, _reduces(reduce), kind))()
