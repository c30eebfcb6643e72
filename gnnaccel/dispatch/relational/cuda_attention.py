"""Attention over terms made of pairs (RGAT), as steps of the one node of autograd that
`cuda_program` makes of a Program.

The matrices that make the terms, the terms, their way to the edges and the attention: strung
together by autograd these are some twenty nodes, and on graphs like FB15k-237 they take longer than
the kernels.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from gnnaccel.cuda.traverse.aggregate import total
from gnnaccel.cuda.traverse.dropout import OFF, draw
from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.ir.program import DOMAIN_OF, EDGE, PAIR_SRC, Op, Program, name_of
from gnnaccel.dispatch.run import attention
from gnnaccel.dispatch.run.attention_families import TERMS

if TYPE_CHECKING:
    from gnnaccel.dispatch.relational.cuda_steps import Pass

_NAMES = TERMS.names[:4]  # the names that a fused attention has; the others are added here


class Fold(NamedTuple):
    """Each relation's matrix times a parameter. This step is the first, so that its gradient of the
    matrices is added to theirs."""

    out: str
    rows: str
    matrix: str

    def inputs(self) -> tuple[str, ...]:
        return self.rows, self.matrix

    def forward(self, p: Pass, into: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        weight, matrix = p.values[self.rows], p.values[self.matrix]
        if weight.dim() == 3:
            return (weight.view(-1,
                                weight.shape[2]) @ matrix).view(*weight.shape[:2], matrix.shape[1])
        return (weight @ _in_blocks(matrix, weight)).flatten(1, 2)

    def backward(self, p: Pass) -> None:
        grad = p.take(self.out)
        weight, matrix = p.values[self.rows].to(grad.dtype), p.values[self.matrix].to(grad.dtype)
        shape, before = weight.shape, p.so_far(self.rows)
        if weight.dim() == 3:
            weight, grad = weight.view(-1, shape[2]), grad.view(-1, grad.shape[2])
        else:
            matrix, grad = _in_blocks(matrix, weight), grad.unflatten(1, shape[1:3])
        if self.matrix in p.wanted:
            product = weight.transpose(-1, -2) @ grad
            p.add(self.matrix, product if product.dim() == 2 else product.sum(0).flatten(0, 1))
        if self.rows not in p.wanted:
            return
        if before is not None and weight.dim() == 2:
            before.view(weight.shape).addmm_(grad, matrix.t())
        else:
            p.add(self.rows, (grad @ matrix.transpose(-1, -2)).view(shape))


def _in_blocks(matrix: Tensor, weight: Tensor) -> Tensor:
    """A parameter [blocks * N, M] as [blocks, N, M]."""
    return matrix.view(weight.shape[1], weight.shape[3], -1)


class Spread(NamedTuple):
    """A value of pairs, at their edges."""

    out: str
    rows: str
    coarse: str

    def inputs(self) -> tuple[str, ...]:
        return (self.rows,)

    def forward(self, p: Pass, into: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return p.values[self.rows].index_select(0, p.view.index(self.coarse, EDGE))

    def backward(self, p: Pass) -> None:
        members = p.view.members(self.coarse, EDGE)
        p.put(self.rows,
              total(members.csc(places=False), p.take(self.out), into=p.so_far(self.rows)))


class Attend(NamedTuple):
    """An attention over the graph between two domains. ``terms``: the names of its inputs, in
    the order of `TERMS`; with its fifth, a vector, the second is made of the rows here."""

    out: str
    rows: str
    terms: tuple[str | None, ...]
    program: Program
    found: programs.Attention
    heads: int
    source: str
    target: str

    def inputs(self) -> tuple[str, ...]:
        return tuple(name for name in self.terms if name is not None)

    def forward(self, p: Pass, into: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        terms = [None if name is None else p.values[name] for name in self.terms[1:]]
        rows, pattern = p.values[self.rows], self.found
        width = rows.shape[1] // self.heads
        call = attention.Call(self.program, pattern, p.view.graph(self.source, self.target),
                              self.heads, width, p.out_dtype or rows.dtype)
        call.dropout = draw(pattern.dropout, rows.device) if pattern.dropout else OFF
        out, saved = TERMS.forward(call, (rows.view(rows.shape[0], self.heads, width), *terms,
                                          bias), p.train)
        p.attended[self.out] = call, saved
        return out if into is None else out.add_(into.view(out.shape))

    def backward(self, p: Pass) -> None:
        call, saved = p.attended.pop(self.out)
        wanted = [name in p.wanted for name in self.terms]
        inputs = [None if name is None else p.values[name] for name in self.terms]
        grads = TERMS.backward(call, (*inputs, None), saved, p.take(self.out), (*wanted, False))
        for name, grad in zip(self.terms, grads):
            if name in p.wanted and grad is not None:
                p.add(name, grad)


def steps_in(program: Program) -> dict[str, Any]:
    """The steps by which an attention over terms of pairs is computed, by the value they make; None
    for a value that another step makes. Empty where there is no such attention, or its terms come
    from elsewhere."""
    producers = {op.out: op for op in program.ops}
    step = next((op for op in program.ops if op.kind == "attend"), None)
    if step is None or not set(step.attr("names")) <= set(_NAMES):
        return {}
    operands = dict(zip(step.attr("names"), step.args))
    steps: dict[str, Any] = {}
    terms: list[Any] = [operands.get(name) for name in _NAMES]
    vector = _vector(program, producers.get(terms[1]), step)
    if vector is not None:
        steps[terms[1]] = terms[1] = None
    edge = producers.get(terms[3])
    if edge is not None and edge.kind == "add" and len(edge.args) == 1:
        name, _, end = edge.args[0].partition("@")
        steps[edge.out] = Spread(edge.out, name, DOMAIN_OF[end])
    attended = step.attr("attention")
    steps[step.out] = Attend(step.out, terms[0], (*terms, vector), attended,
                             programs.attention(attended),  # type: ignore[arg-type]
                             step.attr("heads"), step.attr("source"), step.attr("target"))
    steps.update((op.out, Fold(op.out, *op.args)) for op in program.ops if op.kind == "fold")
    return steps


def _vector(program: Program, term: Op | None, step: Op) -> str | None:
    """Name of the vector that an attention of one head multiplies its rows with to make their own
    ``term``; None where it does not."""
    if (term is None or term.kind != "linear" or step.attr("heads") != 1
        or program.domains[term.out] != PAIR_SRC):
        return None
    readers = [op for op in program.ops if term.out in map(name_of, op.args)]
    return (term.args[1] if term.args[0] == step.args[0] and not term.attrs
            and readers == [step] else None)
