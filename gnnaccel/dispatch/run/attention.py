"""Running an attention Program: fused kernels as nodes of autograd, or the torch backend.

Backward runs the plan its forward took. When it is itself recorded (``create_graph=True``) it
recomputes with the torch backend instead, with the same dropout mask, so that second derivatives
are right.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gnnaccel.cuda.attention import additive, pairwise
from gnnaccel.cuda.runtime.launch import dense
from gnnaccel.cuda.traverse import column_sum, head_dot
from gnnaccel.cuda.traverse.dropout import OFF, Dropout, draw, factors
from gnnaccel.dispatch.graph.view import SORT_FROM, GraphView
from gnnaccel.dispatch.ir.attention_programs import Attention
from gnnaccel.dispatch.ir.program import Program
from gnnaccel.dispatch.run import (attention_families as families, attention_folded, attention_maps,
                                   torch_backend)
from gnnaccel.dispatch.run.attention_families import Family, present
from gnnaccel.dispatch.run.attention_folded import Folded
from gnnaccel.dispatch.run.attention_maps import Mapped
from gnnaccel.dispatch.run.autograd import Operation

_KEPT_FROM = SORT_FROM.bit_length()  # bits of edges from which on backward may keep scores
_BANDS_FROM = 21  # bits of edges: with fewer, rows that do not fit the L2 have too few edges each


@dataclass
class Call:
    """One attention call, with which an adapter runs its Program once its tensors are made.

    ``exposed``: the caller hands the result on as it is, so a user may change it in place; where
    backward reads the output it must then be a copy. ``pmf``: long rows by PMF; ``run``: (call,
    tensors) -> the output; ``unread``: [num_src] rows of "x" that no edge reads, which gradients of
    parameters are to leave out; ``kernels``: of a relational call, whether it runs by the CUDA
    kernels, so that its adapter may use them as well.
    """

    program: Program
    attention: Attention
    graph: GraphView
    heads: int
    width: int
    out_dtype: torch.dtype
    exposed: bool = False
    pmf: bool = False
    dropout: Dropout = None  # type: ignore[assignment]  # set before anything runs by kernels
    run: Any = None
    unread: Tensor | None = None
    kernels: ClassVar[bool] = False

    def __call__(self, tensors: dict[str, Tensor | Mapped] | Folded) -> Tensor:
        return self.run(self, tensors)


def size_class(edge_bits: int, long: bool) -> int:
    """The class of ``edge_bits`` and ``long`` for `prepare`: equal for graphs with the same
    kernels."""
    return (long and edge_bits >= _BANDS_FROM) + 2 * (edge_bits >= _KEPT_FROM) + 4 * (
        edge_bits > 31)


def prepare(found: Attention, heads: int, width: int, row: torch.dtype, out: torch.dtype,
            grad: bool, edge_bits: int, biased: bool = True, long: bool = True) -> None:
    """Compile the kernels of a call of this kind, on a graph of so many bits of edges, so that one
    that does not compile is known before anything runs. ``biased``: a bias was added to rows or to
    the result, as `biased` says; ``long``: its rows may be read in bands.

    Raises CompileError. Costs nothing the second time.
    """
    family = additive if found.family == "additive" else pairwise
    score = () if found.family == "additive" else (found.score, False, found.vectors)
    kernels = family.variant(heads, width, row, out, found.edge, found.dropout > 0, grad,
                             edge_bits > 31, *score)
    cut = long and edge_bits >= _BANDS_FROM
    if found.family == "additive":
        wanted = _additive_kernels(kernels, found, grad, cut)
    else:
        forms = (kernels, *(kernels.in_bands() if cut else ()))
        wanted = [one for form in forms for one in _pairwise_kernels(form, found, grad, edge_bits)]
    for compiled, entries in wanted:
        for entry in entries:
            compiled(entry)
    if grad and biased:
        for dtype in {row, out}:
            column_sum.prepare(heads * width, dtype)


def biased(program: Program, found: Attention) -> bool:
    """Whether a call may give gradients to biases: of its result, or of the maps that it makes rows
    by itself, as `attention_maps` and `attention_folded` do."""
    return found.score in ("dot", "gatv2") or program.has_input("bias")


def _additive_kernels(kernels: additive.Variant, found: Attention, grad: bool,
                      in_bands: bool) -> list[tuple]:
    """The kernels that additive attention launches, each with its entries."""
    cut = (kernels.in_bands(False), kernels.in_bands(True)) if in_bands else ((), ())
    wanted: list[tuple] = [(form.forward_kernels, ("forward", "merge"))
                           for form in (kernels, *cut[0])]
    if found.score == "additive":
        terms = head_dot.kernels(kernels.heads, kernels.width, kernels.row)
        wanted.append((terms, ("dot", "grad", "sum_blocks") if grad else ("dot",)))
    if grad:
        wanted += [(form.backward_kernels, ("prepare", "sources", "merge"))
                   for form in (kernels, *cut[1])]
    return wanted


def _pairwise_kernels(kernels: pairwise.Variant, found: Attention, grad: bool,
                      edge_bits: int) -> list[tuple]:
    """The kernels that pairwise attention launches, each with its entries."""
    wanted: list[tuple] = [(kernels.forward_kernels, ("forward", "merge"))]
    if grad:
        wanted += [(kernels.backward_kernels(True), ("prepare", "backward", "merge")),
                   (kernels.backward_kernels(False), ("backward", "merge"))]
        # where scores may be kept
        if found.score == "dot" and not found.edge and edge_bits >= _KEPT_FROM:
            wanted += [(kernels.backward_kernels(True, True), ("backward", "merge")),
                       (kernels.backward_kernels(False, True), ("queries", "merge"))]
        if found.vectors:
            wanted.append((families.vector_sums(kernels.heads, kernels.width).kernels,
                           ("forward", "merge")))
    return wanted


def run_cuda(call: Call, tensors: dict[str, Tensor | Mapped] | Folded,
             family: Family | None = None) -> Tensor:
    """The Program's output [num_dst, heads, width] by the fused kernels. ``tensors`` by input name;
    rows may be `Mapped`; a `Folded` runs as it describes. ``family``: other kernels than those for
    the Program."""
    pattern = call.attention
    call.dropout = draw(pattern.dropout, call.graph.device) if pattern.dropout else OFF
    if type(tensors) is Folded:
        return attention_folded.run(call, tensors, with_the_same_dropout)
    family = family or families.of(pattern)
    for t in tensors.values():
        if type(t) is Mapped:
            return attention_maps.run(call, family, tensors, with_the_same_dropout)
    inputs: tuple = tuple(map(tensors.get, family.names))
    if torch.is_grad_enabled():
        for t in tensors.values():
            if t is not None and t.requires_grad:  # type: ignore[union-attr]
                return _Attention(call, family).apply(*inputs)
    return family.forward(call, inputs, False)[0]


def run_torch(call: Call, tensors: dict[str, Tensor | Mapped] | Folded) -> Tensor:
    """Attention by the torch backend, with torch's own dropout. Works in any floating dtype."""
    if type(tensors) is Folded:
        return attention_folded.composed(call, tensors, run_torch)
    inputs = attention_maps.made(call, tensors)
    edges = call.graph.edges()
    keep = None
    if call.attention.dropout > 0:
        first = next(iter(inputs.values()))
        # factors of 16 bits would be off on average too
        dtype = torch.promote_types(first.dtype, torch.float32)
        ones = first.new_ones(edges.src.shape[0], call.heads, dtype=dtype)
        keep = torch.nn.functional.dropout(ones, call.attention.dropout)
    return torch_backend.run(call.program, edges, shaped(call, inputs), keep).to(call.out_dtype)


def with_the_same_dropout(call: Call, tensors: dict[str, Tensor]) -> Tensor:
    """The output by the torch backend, with the dropout that the kernels drew in this call."""
    edges = call.graph.edges(call.attention.places)
    keep = None
    if call.attention.dropout > 0:
        keep = factors(call.dropout, edges.src.shape[0], call.heads, call.graph.device)
    return torch_backend.run(call.program, edges, shaped(call, tensors), keep).to(call.out_dtype)


def shaped(call: Call, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` with the bias as [heads, width], which kernels take as the layer has it, and with
    zeros for unread rows, which kernels leave out."""
    if call.unread is not None:
        tensors = {**tensors, "x": families.read(call, tensors["x"])}
    if "bias" not in tensors:
        return tensors
    return {**tensors, "bias": tensors["bias"].view(call.heads, call.width)}


class _Attention(Operation):
    """Attention over the inputs of a family, by its kernels."""

    __slots__ = ("call", "family")
    keeps_inputs = True

    def __init__(self, call: Call, family: Family):
        self.call, self.family = call, family

    def forward(self, needs, *inputs):
        out, saved = self.family.forward(self.call, inputs, True)
        return out, (*inputs, *saved)

    def backward(self, needs, saved, grad):
        inputs = tuple(saved[:len(needs)])
        del saved[:len(needs)]
        return self.family.backward(self.call, inputs, saved, dense(grad), needs)

    def reference(self, *inputs):
        return with_the_same_dropout(self.call, present(self.family.names, inputs))
