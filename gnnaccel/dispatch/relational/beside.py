"""Kernels that relational layers launch beside their Programs, as data for `prepare`, which
compiles them."""
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from gnnaccel.cuda import blend_grad, column_sum, segment_backward, segment_gemm, segment_gemm_grad
from gnnaccel.dispatch.relational import cuda_maps
from gnnaccel.dispatch.relational.prepare import product, sums

if TYPE_CHECKING:
    from gnnaccel.dispatch.relational.request import RelationalRequest


class RootTerm(NamedTuple):
    """Sizes of an `Added`: ``k``: columns of its rows, 0 where it has no matrix; ``n``: of the
    result; ``types``: of destinations; ``bias``: whether it has one; ``transposed``: as `Added`."""

    k: int
    n: int
    types: int
    bias: bool
    transposed: bool

    def prepare(self, request: RelationalRequest, inside: bool) -> None:
        """Compile it. ``inside``: it is added by the kernels of the Program's one node; else by
        torch. Raises CompileError."""
        if inside and self.k:
            product(self.k, self.n, 1, request, 1 << request.dst_bits, self.types, self.transposed)
        if not inside or not self.bias or not request.grad:
            return
        if self.types == 1:
            column_sum.prepare(self.n, request.row)
        else:
            sums(self.n, request)


class MapsByType(NamedTuple):
    """HGT's maps before and after its attention, of `by_type`, for nodes of so many ``types``: from
    ``k`` columns to ``n``, and from ``n`` to ``n``. ``gated``: the result is blended with the
    inputs; ``transposed``: as there; ``rows_grad``: the inputs want gradients; ``apart``: there are
    fewer destinations than sources, which are mapped by themselves."""

    k: int
    n: int
    types: int
    gated: bool
    transposed: bool
    rows_grad: bool
    apart: bool = False

    def prepare(self, request: RelationalRequest, inside: bool) -> None:
        """Compile them. Raises CompileError."""
        (k, n, types, gated, transposed, rows_grad, apart), row = self, request.row
        device, precision = torch.device(request.device), cuda_maps.precision()
        sizes, of_dst = ((row, 1 << bits, types, transposed, precision, device)
                         for bits in (request.src_bits, request.dst_bits))
        for ends in dict.fromkeys((sizes, of_dst)):
            segment_gemm.prepare(k, n, 1, *ends)
        segment_gemm.prepare(n, n, 1, *of_dst, "BLEND" if gated else "PLAIN")
        if not request.grad:
            return
        segment_backward.prepare(n, n, 1, *of_dst, True, "GELU_GRAD")
        if gated:
            blend_grad.prepare(n, row)
        if not rows_grad:
            return segment_gemm_grad.prepare(k, n, 1, row, precision, device, True)
        # the gradients of several maps are added up where they are fp32
        added = row is torch.float32
        first = "BLEND" if gated and added else "PLAIN"
        writes = [(first, of_dst), ("PLAIN" if apart else first, sizes),
                  ("BLEND" if added else "PLAIN", sizes)]
        for write, ends in dict.fromkeys(writes):
            segment_backward.prepare(k, n, 1, *ends, True, write)
