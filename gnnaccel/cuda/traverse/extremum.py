"""Launchers for the largest or smallest message of each row, and the gradient of its inputs
(``src/extremum.cu``)."""
from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import (TYPES, Kernels, Layout, check_graph, layout_for,
                                          over_rows, pointer, wrong_weight)
from gnnaccel.cuda.structures.structure import Rows
from gnnaccel.cuda.traverse.multi_reduce import check

OPS = {"copy": 0, "add": 1, "mul": 2}
WEIGHTS = ("none", "edge", "head")


@dataclass(frozen=True)
class Variant:
    """Key of a kernel of this family. ValueError for a value that none covers.

    ``heads`` x ``width`` of a row of dtype ``row``; ``op``: a key of `OPS`, which makes the message
    of a row and its edge's weight; ``weight``: "none" with "copy", else "edge" or "head", one per
    edge and head; ``largest``: or the smallest; ``identity``: rows are the edges' own, by position;
    ``wide``: the graph has int64 offsets.
    """

    heads: int
    width: int
    row: torch.dtype
    op: str = "copy"
    weight: str = "none"
    largest: bool = True
    identity: bool = False
    wide: bool = False

    def __post_init__(self) -> None:
        for name, value, allowed in (("row", self.row, TYPES), ("op", self.op, OPS),
                                     ("weight", self.weight, WEIGHTS)):
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: the extremum kernels know "
                                 f"{', '.join(map(str, allowed))}")
        if (self.op == "copy") != (self.weight == "none"):
            raise ValueError(f"op={self.op!r} with weight={self.weight!r}: \"copy\" goes without "
                             "weights, the others with them")
        layout_for(self.heads, self.width)

    @functools.cached_property
    def layout(self) -> Layout:
        return layout_for(self.heads, self.width)

    @functools.cached_property
    def kernels(self) -> Kernels:
        """``forward``, ``merge``, ``pick`` and ``add_parts``."""
        flags = dict(ROW_T=TYPES[self.row], OFF_T="i64" if self.wide else "int", DROPOUT=0,
                     OP=OPS[self.op], PER_HEAD=int(self.weight == "head"),
                     LARGEST=int(self.largest), IDENTITY=int(self.identity))
        return Kernels("extremum", self.layout.defines() + tuple((k, str(v))
                                                                 for k, v in flags.items()))


#: `Variant`s by their fields in order, one object each
variant = functools.lru_cache(maxsize=512)(Variant)


def forward(variant: Variant, graph: Rows, x: Tensor,
            weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The best of ``x[other[e], h] op weight[place[e], h]`` over each row's edges e, and the place
    of its edge.

    x: [nodes of the other side, H, D] of ``variant.row``, contiguous (under ``variant.identity``
    [edges, H, D], by position); weight: fp32 [edges] or [edges, H], by place; None with "copy".
    Returns out [rows, H, D] of ``variant.row`` and int32 arg of the same shape (under identity the
    position). Among equals the smallest place wins; NaN never does. A row in which nothing does is
    -inf, or inf for the smallest, with arg -1. ValueError for what does not fit; ids are not
    checked.
    """
    layout, rows, device = variant.layout, graph.rows, graph.indptr.device
    check_graph(variant, graph, not variant.identity)
    check("x", x, (None, variant.heads, variant.width), variant.row, device, layout.vec)
    _check_weight(variant, graph, weight)
    size = variant.heads * variant.width
    out = torch.empty((rows, variant.heads, variant.width), dtype=variant.row, device=device)
    arg = torch.empty(out.shape, dtype=torch.int32, device=device)
    results = (out.data_ptr(), arg.data_ptr())
    over_rows(graph, layout, variant.kernels, "forward", (x.data_ptr(), pointer(weight), *results),
              (size, size), "merge", results)
    return out, arg


def pick(variant: Variant, graph: Rows, arg: Tensor, grad: Tensor,
         weight: Tensor | None = None) -> Tensor:
    """[rows, H, D]: for each row the sum, over its edges e, of ``grad[other[e]]`` where
    ``arg[other[e]]`` is e's place (times the weight with "mul"): the gradient of `forward`'s x.

    graph: that of `forward` by the other end, with the same places. arg [nodes, H, D]: from
    `forward`; grad: the same of ``variant.row``. Sums are fp32 in a fixed order. ValueError for
    what does not fit, and for a variant with ``identity``.
    """
    layout, rows, device = variant.layout, graph.rows, graph.indptr.device
    check_graph(variant, graph, not variant.identity)
    if variant.identity:
        raise ValueError("under identity every row is an edge's own: index with arg instead")
    check("grad", grad, (None, variant.heads, variant.width), variant.row, device, layout.vec)
    check("arg", arg, (None, *grad.shape[1:]), torch.int32, device, 1)
    _check_weight(variant, graph, weight)
    out = torch.empty((rows, variant.heads, variant.width), dtype=variant.row, device=device)
    end = out.data_ptr(),
    over_rows(graph, layout, variant.kernels, "pick",
              (arg.data_ptr(), grad.data_ptr(), pointer(weight), *end),
              (variant.heads * variant.width,), "add_parts", end)
    return out


def _check_weight(variant: Variant, graph: Rows, weight: Tensor | None) -> None:
    if (weight is None) != (variant.weight == "none"):
        raise wrong_weight(variant, weight)
    if weight is not None:
        check("weight", weight, (None, variant.heads) if variant.weight == "head" else (None,),
              torch.float32, graph.indptr.device, 1)
