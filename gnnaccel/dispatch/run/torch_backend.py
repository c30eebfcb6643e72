"""The torch backend: runs a Program with torch operations, on any device and in any dtype.

This backend is the default where there is no GPU, and gives second derivatives. Edges come in the
CSC's order (sorted by destination). `plain` interprets the Program one operation at a time; it is
the oracle of the tests. On the CPU `run` takes `torch_segments` instead where that computes the
same.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.ir.program import EDGE, Op, Program
from gnnaccel.dispatch.run import torch_segments
from gnnaccel.dispatch.run.torch_segments import Segments

_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Edges:
    """A graph for the interpreter, in CSC order: ``src``, ``dst`` [E] int64, sorted by dst; ``eid``
    [E] int64 or None when the caller's order is this order; ``num_dst``."""

    src: Tensor
    dst: Tensor
    eid: Tensor | None
    num_dst: int
    _segments: dict[int, Segments] = field(default_factory=dict, compare=False, repr=False)

    def segments(self, num_src: int) -> Segments:
        """The edges with offsets, as the CPU's operations need them, made once."""
        if num_src not in self._segments:
            self._segments[num_src] = Segments.of(self.src, self.dst, num_src, self.num_dst)
        return self._segments[num_src]

    def nbytes(self) -> int:
        """Bytes of all index arrays held."""
        return (sum(t.nbytes for t in (self.src, self.dst, self.eid) if t is not None)
                + sum(segments.nbytes() for segments in self._segments.values()))


def run(program: Program, edges: Edges, tensors: dict[str, Tensor],
        keep: Tensor | None = None) -> Tensor:
    """The Program's output [num_dst, heads, width].

    ``tensors``: by input name; edge inputs are in the caller's edge order. ``keep``: [E, heads]
    dropout factors in CSC order, needed when the Program has a dropout.

    With inputs in bf16 or fp16 all is computed in fp32, as kernels do: gradients of scores are
    small differences, of which softmax and sums in 16 bits leave few digits. The output has the
    dtype to which torch promotes those of the inputs.
    """
    halves = {name: t for name, t in tensors.items() if t.dtype in _HALVES}
    if halves:
        wide = {**tensors, **{name: t.float() for name, t in halves.items()}}
        dtype = functools.reduce(torch.promote_types, [t.dtype for t in tensors.values()])
        return run(program, edges, wide, keep).to(dtype)
    attention = programs.attention(program)
    if torch_segments.covers(attention, edges, tensors):
        out = torch_segments.attend(attention, edges, tensors, keep)
        return out + tensors["bias"] if program.has_input("bias") else out
    return plain(program, edges, tensors, keep)


def plain(program: Program, edges: Edges, tensors: dict[str, Tensor],
          keep: Tensor | None = None) -> Tensor:
    """`run` by plain differentiable operations, whatever the device."""
    values = dict(tensors)
    for name, domain in program.inputs:
        if domain == EDGE and edges.eid is not None:
            values[name] = values[name].index_select(0, edges.eid)
    lifted: dict[str, Tensor] = {}

    def read(arg: str) -> Tensor:
        name, _, end = arg.partition("@")
        if not end:
            return values[name]
        if arg not in lifted:
            lifted[arg] = values[name].index_select(0, edges.src if end == "src" else edges.dst)
        return lifted[arg]

    for op in program.ops:
        values[op.out] = _OPERATIONS[op.kind](op, [read(arg) for arg in op.args], edges, keep)
    return values[program.output]


def segment_softmax(scores: Tensor, edges: Edges) -> Tensor:
    """Softmax over the edges that enter each node; scores [E, heads]."""
    index = edges.dst.unsqueeze(-1).expand_as(scores)
    top = scores.new_full((edges.num_dst, scores.shape[1]), -torch.inf)
    top = top.scatter_reduce(0, index, scores.detach(), "amax")
    p = (scores - top.index_select(0, edges.dst)).exp()
    total = scores.new_zeros(top.shape).index_add(0, edges.dst, p)
    return p / total.index_select(0, edges.dst)


def _sum_of(op: Op, args: list[Tensor], edges: Edges, keep) -> Tensor:
    total = args[0]
    for term in args[1:]:
        total = total + term
    return total


def _aggregate(op: Op, args: list[Tensor], edges: Edges, keep) -> Tensor:
    weight, rows = args
    message = weight.unsqueeze(-1) * rows
    return message.new_zeros((edges.num_dst, *message.shape[1:])).index_add(0, edges.dst, message)


_OPERATIONS = {
    "head_dot": lambda op, a, edges, keep: (a[0] * a[1]).sum(-1),
    "pick": lambda op, a, edges, keep: a[0].index_select(0, a[1]),
    "dot": lambda op, a, edges, keep: (a[0] * a[1]).sum(-1),
    "add": _sum_of,
    "mul": lambda op, a, edges, keep: a[0] * a[1],
    "scale": lambda op, a, edges, keep: a[0] * op.attr("by"),
    "leaky_relu": lambda op, a, edges, keep: F.leaky_relu(a[0], op.attr("slope")),
    "sigmoid": lambda op, a, edges, keep: a[0].sigmoid(),
    "segment_softmax": lambda op, a, edges, keep: segment_softmax(a[0], edges),
    "dropout": lambda op, a, edges, keep: a[0] * keep,
    "aggregate": _aggregate,
}
