"""Compiling the kernels of a relational call before it runs, and those that its layer launches
beside its Program, so that they are compiled side by side, and one that does not compile is a
reason (GA403)."""
from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from gnnaccel.cuda.attention import blend_grad
from gnnaccel.cuda.runtime.launch import TYPES
from gnnaccel.cuda.segment import segment_backward, segment_gemm, segment_gemm_grad
from gnnaccel.cuda.structures import pairs, tile_ptr
from gnnaccel.cuda.traverse import aggregate, column_sum, head_dot
from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.ir.program import PAIR_DST, PAIR_SRC, Op, Program, name_of
from gnnaccel.dispatch.plan import compiling
from gnnaccel.dispatch.policy.reasons import Reason
from gnnaccel.dispatch.relational import cuda_maps, cuda_steps
from gnnaccel.dispatch.relational.counting import Shape, shapes_of_all
from gnnaccel.dispatch.relational.gather import RelationStatistics
from gnnaccel.dispatch.relational.optimise import Optimised, optimise
from gnnaccel.dispatch.run import attention

if TYPE_CHECKING:  # `request` imports this module
    from gnnaccel.dispatch.relational.request import RelationalRequest

_SUMMED = ("reduce", "mean_sum", "collect", "mix")
#: times the estimate of the cheapest ordering up to which another may be taken in the end
_CLOSE = 2.0


def prepare(request: RelationalRequest) -> None:
    """Compile the kernels that find a graph's pairs, the fused attention and the products by
    segment of every ordering that may be taken, the sums over edges of the one that probably is,
    and what the layer launches beside its Program. Raises CompileError; costs nothing the second
    time.

    The sizes are estimates, so a product may be cut into other tiles in the end: the source is the
    same. Where they mislead, `problem` compiles the rest.
    """
    pairs.prepare()
    tile_ptr.prepare()
    first, *others = optimise(request.program, dict(request.shapes), request.statistics(), "cuda",
                              train=request.grad).orderings
    for ordering in (first, *[one for one in others if one.seconds <= _CLOSE * first.seconds]):
        _operations(ordering.program, request, request.statistics())
    if request.row not in TYPES:
        return
    _sums(first.program, request)
    if request.beside is not None:
        steps = cuda_steps.steps_of(first.program)
        request.beside.prepare(request, steps is not None and not steps.after)


def problem(found: Optimised, request: RelationalRequest) -> Reason | None:
    """Why the kernels of the ordering taken cannot run over this graph, or not yet; None where they
    can. Compiles side by side those that `prepare` has not compiled; see `compiling.problem`."""
    counted = found.statistics
    key = ("ordering", found.program, request._replace(fresh=False), cuda_maps.precision(),
           counted.pairs_src.bit_length(), counted.pairs_dst.bit_length())

    def compile_() -> None:
        _operations(found.program, request, counted)
        if request.row in TYPES:
            _sums(found.program, request)
            _coefficients(found.program, request)

    return compiling.problem(key, compile_)


def _coefficients(program: Program, request: RelationalRequest) -> None:
    """Compile the sums that make the gradients of a mixture's coefficients, of which each row has a
    copy."""
    row_shapes = shapes_of_all(program, dict(request.shapes))
    for op in program.ops:
        if op.kind == "mix" and request.grad:
            sums(prod(row_shapes[name_of(op.args[0])]), request)


def _operations(program: Program, request: RelationalRequest,
                counted: RelationStatistics) -> None:
    """Compile a Program's attention and products by segment."""
    row_shapes, attentions = shapes_of_all(program, dict(request.shapes)), set()
    for step in program.ops:
        if step.kind == "attend":
            attentions.add(programs.attention(step.attr("attention")))
        elif step.kind == "linear" and step.args[1].endswith("@rel") and request.row in TYPES:
            _product(step, program, row_shapes, request, counted)
    for attended in attentions:
        assert attended is not None
        terms = attended.score == "terms"
        if request.heads == 1 and terms:
            for entry in ("dot", "grad", "sum_blocks") if request.grad else ("dot",):
                head_dot.kernels(1, request.width, request.row)(entry)
        attention.prepare(attended, request.heads, request.width, request.row, request.out,
                          request.grad, request.edge_bits, terms)


def sums(features: int, request: RelationalRequest, weighted: bool = False,
         at: str = "place") -> None:
    """Compile the sums of rows of so many ``features``, each ``weighted`` or not."""
    form = aggregate.variant(*aggregate.factored(features), request.row, request.row,
                             "edge" if weighted else "none", at, False, False,
                             request.edge_bits > 31)
    for entry in ("forward", "forward_short", "merge"):
        form.kernels(entry)


def product(k: int, n: int, blocks: int, request: RelationalRequest, rows: int, segments: int,
            transposed: bool) -> None:
    """Compile a product by segment and, as the request has it, its gradients."""
    device, precision = torch.device(request.device), cuda_maps.precision()
    segment_gemm.prepare(k, n, blocks, request.row, rows, segments, transposed, precision, device)
    if request.grad and request.rows_grad:
        segment_backward.prepare(k, n, blocks, request.row, rows, segments, transposed, precision,
                                 device)
    elif request.grad:
        sides = (n, k) if transposed else (k, n)
        segment_gemm_grad.prepare(*sides, blocks, request.row, precision, device)


def _product(step: Op, program: Program, known: dict[str, Shape], request: RelationalRequest,
             counted: RelationStatistics) -> None:
    if program.domains[step.out] not in (PAIR_SRC, PAIR_DST):
        return
    shape = known[name_of(step.args[1])]
    blocks, (k, n), transposed = prod(shape[:-2]), shape[-2:], bool(step.get("transposed"))
    if transposed:
        k, n = n, k
    product(k, n, blocks, request, counted.rows(program.domains[step.out]), counted.num_relations,
            transposed)


def _sums(program: Program, request: RelationalRequest) -> None:
    """Compile a Program's sums over edges, and those by which its backward gathers."""
    grad = request.grad and request.rows_grad
    row_shapes = shapes_of_all(program, dict(request.shapes))
    inside = cuda_steps.steps_of(program)
    for op in program.ops:
        end = op.args[0].partition("@")[2]
        if op.kind == "linear" and end and program.domains[op.out] in (PAIR_SRC, PAIR_DST) and grad:
            sums(prod(row_shapes[name_of(op.args[0])]), request)
        if op.kind not in _SUMMED or not row_shapes[op.out]:
            continue
        # a mixture's weights are parameters, which are looked up where they stand
        mixed, meant = op.kind == "mix", bool(op.get("mean"))
        weighted = mixed or meant or op.kind != "collect" and len(op.args) > 1
        if inside is not None and op in inside.ops:
            sums(prod(row_shapes[op.out]), request, weighted, "position" if weighted else "place")
        else:
            sums(prod(row_shapes[op.out]), request, weighted)
            if meant and len(op.args) == 1:  # shares: in that order from the second time
                sums(prod(row_shapes[op.out]), request, True, "position")


# --- kernels that layers launch beside their Programs ---------------------------------------------

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
