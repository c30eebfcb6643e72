"""Compiling what a relational call will launch before it runs, so that a kernel that does not
compile is a reason (GA403)."""
from __future__ import annotations

from math import prod

import torch

from gnnaccel.cuda import head_dot, pairs, segment_backward, segment_gemm
from gnnaccel.cuda.layout import TYPES
from gnnaccel.dispatch.ir import patterns
from gnnaccel.dispatch.ir.program import PAIR_DST, PAIR_SRC, Op, Program, name_of
from gnnaccel.dispatch.relational import cuda_maps
from gnnaccel.dispatch.relational.counting import Shape, shapes_of_all
from gnnaccel.dispatch.relational.optimise import optimise
from gnnaccel.dispatch.relational.request import RelationalRequest
from gnnaccel.dispatch.run import attention


def prepare(request: RelationalRequest) -> None:
    """Compile what finds a graph's pairs, the fused attention of every ordering and the products by
    segment of each. Raises CompileError; costs nothing where it has been done.

    The sizes are estimates, so a product may be cut into other tiles in the end: the source is the
    same.
    """
    pairs.prepare()
    statistics = request.statistics()
    found: set[patterns.Attention] = set()
    for ordering in optimise(request.program, dict(request.shapes), statistics, "cuda").orderings:
        known = shapes_of_all(ordering.program, dict(request.shapes))
        for step in ordering.program.ops:
            if step.kind == "attend":
                found.add(patterns.attention(  # type: ignore[arg-type]
                    step.attr("attention")))
            elif step.kind == "linear" and step.args[1].endswith("@rel") and request.row in TYPES:
                _product(step, ordering.program, known, request,
                         statistics.rows(ordering.program.domains[step.out]))
    if request.heads == 1 and any(attended.score == "terms" for attended in found):
        for entry in ("dot", "grad", "sum_blocks") if request.grad else ("dot",):
            head_dot.kernels(1, request.width, request.row)(entry)
    for attended in found:
        attention.prepare(attended, request.heads, request.width, request.row, request.out,
                          request.grad, request.edge_bits)


def _product(step: Op, program: Program, known: dict[str, Shape], request: RelationalRequest,
             rows: int) -> None:
    if program.domains[step.out] not in (PAIR_SRC, PAIR_DST):
        return
    shape = known[name_of(step.args[1])]
    blocks, (k, n), transposed = prod(shape[:-2]), shape[-2:], bool(step.get("transposed"))
    if transposed:
        k, n = n, k
    for family in (segment_gemm, segment_backward) if request.grad else (segment_gemm,):
        family.prepare(k, n, blocks, request.row, rows, 1 << request.relation_bits, transposed,
                       cuda_maps.precision(), torch.device(request.device))
