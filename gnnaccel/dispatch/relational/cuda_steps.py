"""The steps that `cuda_program` makes one node of autograd of: maps by relation and sums over
edges, each forward and backward by kernels; and how a Program is divided into these and the
rest."""
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.cuda.traverse.aggregate import total
from gnnaccel.dispatch.ir.program import (DOMAIN_OF, DST, PAIR_DST, PAIR_SRC, PARAM, RELATION, Op,
                                          Program, name_of)
from gnnaccel.dispatch.relational import cuda_attention
from gnnaccel.dispatch.relational.cuda_maps import backward, product
from gnnaccel.dispatch.relational.view import RelationView
from gnnaccel.dispatch.run import attention


class Pass:
    """One run of a Program's steps: values by name, and on the way back their gradients, each with
    the index that says which of its rows is whose, or None. ``attended``: calls of attention, and
    what their backward needs, by what they make."""

    __slots__ = ("view", "values", "grads", "wanted", "train", "out_dtype", "attended")

    def __init__(self, view: RelationView, values: dict[str, Any],
                 wanted: frozenset[str] = frozenset(), train: bool = False,
                 out_dtype: torch.dtype | None = None):
        self.view, self.values, self.wanted, self.train, self.out_dtype = (view, values, wanted,
                                                                           train, out_dtype)
        self.grads: dict[str, tuple[Tensor, Tensor | None]] = {}
        self.attended: dict[str, tuple[attention.Call, Any]] = {}

    def so_far(self, name: str) -> Tensor | None:
        """The gradient to add to, if there is one."""
        entry = self.grads.get(name)
        return None if entry is None else entry[0]

    def put(self, name: str, grad: Tensor) -> None:
        self.grads[name] = grad, None

    def add(self, name: str, grad: Tensor) -> None:
        entry = self.grads.get(name)
        self.grads[name] = (grad if entry is None else entry[0].add_(grad)), None

    def take(self, name: str) -> Tensor:
        grad, index = self.grads.pop(name)
        return grad if index is None else grad.index_select(0, index)


class Linear(NamedTuple):
    """Rows of ``domain``, gathered from ``coarse`` unless that is None, times their relation's
    matrix."""

    out: str
    rows: str
    weight: str
    domain: str
    coarse: str | None
    transposed: bool

    def inputs(self) -> tuple[str, ...]:
        return self.rows, self.weight

    def forward(self, p: Pass, into: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        pairs, coarse = p.view.pairs(self.domain), self.coarse
        index = None if coarse is None else pairs.relation if coarse == RELATION else pairs.node
        return product(pairs.segments, p.values[self.rows], p.values[self.weight], self.transposed,
                       index)

    def backward(self, p: Pass) -> None:
        (grad, where), pairs, coarse = p.grads.pop(self.out), p.view.pairs(self.domain), self.coarse
        index = None if coarse is None else pairs.relation if coarse == RELATION else pairs.node
        d_rows, by_weight = backward(pairs.segments, p.values[self.rows], grad,
                                     p.values[self.weight], self.transposed, index, where,
                                     self.rows in p.wanted, self.weight in p.wanted)
        if by_weight is not None:
            p.add(self.weight, by_weight)
        if d_rows is None:
            return
        if self.coarse is None:
            p.put(self.rows, d_rows if self.rows not in p.grads else d_rows + p.take(self.rows))
            return
        members = p.view.members(self.coarse, self.domain)
        p.put(self.rows, total(members.csc(places=False), d_rows, into=p.so_far(self.rows)))


class _Sum(NamedTuple):
    """The sum over the edges from ``source`` to ``target``, each counting its ``share`` of a mean
    or once: then by the kernel that others take, which is told "place"."""

    out: str
    rows: str
    source: str
    target: str
    share: bool

    def inputs(self) -> tuple[str, ...]:
        return (self.rows,)

    def forward(self, p: Pass, into: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        graph = p.view.graph(self.source, self.target)
        weight = p.view.share_along(self.source, self.target) if self.share else None
        return total(graph.csc(places=False), p.values[self.rows], weight,
                     "position" if self.share else "place", bias=bias, into=into)

    def backward(self, p: Pass) -> None:
        graph = p.view.graph(self.source, self.target)
        weight = p.view.share_along(self.source, self.target, back=True) if self.share else None
        p.put(self.rows,
              total(graph.csr(places=False), p.take(self.out), weight,
                    "position" if self.share else "place", into=p.so_far(self.rows)))


class _Collect(NamedTuple):
    """The sum over a destination's relations. Its gradient is the destination's, which the step
    before gathers."""

    out: str
    rows: str

    def inputs(self) -> tuple[str, ...]:
        return (self.rows,)

    def forward(self, p: Pass, into: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        members = p.view.members(DST, PAIR_DST)
        return total(members.csc(places=False), p.values[self.rows], into=into, bias=bias)

    def backward(self, p: Pass) -> None:
        p.grads[self.rows] = p.take(self.out), p.view.index(DST, PAIR_DST)


#: steps whose backward reads their inputs
_READING = (Linear, cuda_attention.Fold, cuda_attention.Attend)


class Steps(NamedTuple):
    """A Program divided. ``before``: operations on relations and parameters alone, for autograd;
    ``ops``: those of the node, as ``steps``; ``after``: the rest, one by one. Names of values:
    ``names``: what the steps read and do not make, ``rows``: those of them that are rows; ``outs``:
    what they make for others; ``kept``: what they make that backward reads, ``done``: those it
    reads no more after each of the steps; ``attends``: the outputs of attention."""

    before: tuple[Op, ...]
    ops: tuple[Op, ...]
    steps: tuple[Any, ...]
    after: tuple[Op, ...]
    names: tuple[str, ...]
    rows: tuple[str, ...]
    outs: tuple[str, ...]
    kept: tuple[str, ...]
    done: tuple[tuple[str, ...], ...]
    attends: tuple[str, ...]


@functools.lru_cache(maxsize=256)
def steps_of(program: Program) -> Steps | None:
    """How a Program is divided; None where a node brings nothing: it would be one map, with other
    operations to follow."""
    attended = cuda_attention.steps_in(program)
    return (_divided(program, attended) if attended else None) or _divided(program, {})


def _divided(program: Program, attended: dict[str, Any]) -> Steps | None:
    """The division with the steps ``attended``; None where not all of them are in the node."""
    before = tuple(op for op in program.ops if program.domains[op.out] in (RELATION, PARAM)
                   and op.out not in attended)
    rest = tuple(sorted((op for op in program.ops if op not in before),
                        key=lambda op: op.kind != "fold"))
    by_op = tuple(attended[op.out] if op.out in attended else _step(op, program) for op in rest)
    count = next((i for i, (op, step) in enumerate(zip(rest, by_op)) if step is None
                  and op.out not in attended), len(by_op))
    steps, ops, after = tuple(step for step in by_op[:count]
                              if step is not None), rest[:count], rest[count:]
    if not steps or (after and count == 1) or (not after and type(steps[-1]) is Linear):
        return None
    outs = {step.out for step in steps}
    inputs = tuple(dict.fromkeys(name for step in steps for name in step.inputs()))
    later = {name_of(arg) for op in after for arg in op.args} | {program.output}
    folded = {step.out for step in steps if type(step) is cuda_attention.Fold}
    if not attended.keys() <= {op.out for op in ops} or not folded.isdisjoint(later):
        return None
    first = {name: at for at, step in reversed(list(enumerate(steps))) if type(step) in _READING
             for name in step.inputs() if name in outs}
    return Steps(before, ops, steps, after, tuple(name for name in inputs if name not in outs),
                 tuple({step.rows: None for step in steps if step.rows not in outs}),
                 tuple(step.out for step in steps if step.out in later), tuple(first),
                 tuple(tuple(name for name, place in first.items() if place == at)
                       for at in range(len(steps))),
                 tuple(step.out for step in steps if type(step) is cuda_attention.Attend))


def _step(op: Op, program: Program) -> Any:
    name, _, end = op.args[0].partition("@")
    home, domain = DOMAIN_OF.get(end), program.domains[op.out]
    if (op.kind == "linear" and domain in (PAIR_SRC, PAIR_DST) and op.args[1].endswith("@rel")
        and not op.get("heads")):
        return Linear(op.out, name, name_of(op.args[1]), domain, home, bool(op.get("transposed")))
    if op.kind in ("reduce", "mean_sum") and len(op.args) == 1 and home is not None:
        return _Sum(op.out, name, home, domain, op.attr("mean"))
    return _Collect(op.out, name) if op.kind == "collect" and len(op.args) == 1 else None
