"""The maps by relation and sums over edges with which a Program begins, by the CUDA kernels as one
node of autograd: its steps forward, and the same steps backward. Often that is the whole Program.

Strung together by autograd, every step would be a node, and every sum of two gradients, or of
messages and a root term, a pass over memory: here the last kernel adds to the term in place.
Where backward is itself recorded, the steps run again on torch operations.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.cuda.traverse.aggregate import total
from gnnaccel.cuda.traverse.column_sum import column_sum
from gnnaccel.dispatch.ir.program import Program
from gnnaccel.dispatch.relational import added as adding, cuda_maps, execute, torch_maps
from gnnaccel.dispatch.relational.added import Added
from gnnaccel.dispatch.relational.cuda_maps import backward, dense, product
from gnnaccel.dispatch.relational.cuda_steps import Pass, Steps, steps_of
from gnnaccel.dispatch.relational.view import RelationView
from gnnaccel.dispatch.run import attention
from gnnaccel.dispatch.run.autograd import Operation, wants_grad

_ADDED = ("+rows", "+matrix", "+bias")


class _Plan(NamedTuple):
    """Plan of a `_Node`. ``names``: of the inputs, in order; ``rows``: those the root term reads;
    ``out_dtype``: of what an attention makes, None for that of its rows."""

    program: Program
    steps: Steps
    view: RelationView
    names: tuple[str, ...]
    added: Added | None
    rows: str
    out_dtype: torch.dtype | None


def run(program: Program, view: RelationView, tensors: dict[str, Any],
        out_dtype: torch.dtype | None = None) -> Tensor:
    """The output of a Program that `steps_of` divides. ``tensors`` may hold the operand `ADDED`;
    ``out_dtype`` as for `execute.run`."""
    steps: Steps
    steps, added = steps_of(program), tensors.get(adding.ADDED)  # type: ignore[assignment]
    values = {name: t for name, t in tensors.items() if name != adding.ADDED}
    state = execute.Run(program, view, values, cuda_maps, attention.run_cuda, out_dtype)
    for op in steps.before:
        values[op.out] = execute.OPERATIONS[op.kind](state, op, program.domains[op.out])
    values.update(zip(steps.outs,
                      _node(program, steps, view, values, None if steps.after else added,
                            out_dtype)))
    for op in steps.after:
        values[op.out] = execute.OPERATIONS[op.kind](state, op, program.domains[op.out])
    out = values[program.output]
    return (adding.add(out, added, view, cuda_maps.take) if added is not None
            and steps.after else out)


def _node(program: Program, steps: Steps, view: RelationView, values: dict[str, Tensor],
          added: Added | None, out_dtype: torch.dtype | None) -> tuple:
    """The values that the steps make for later operations."""
    # a factor of another dtype may have gone into the matrices
    row = values[program.inputs[0][0]].dtype
    inputs: list[Tensor | None]
    names, rows = steps.names, _ADDED[0]
    operands = [values[name] for name in names]
    inputs = [t if t.dtype is row else t.to(row) for t in operands]
    if added is not None:
        rows = ([name for name, t in zip(names, inputs) if t is added.rows] or [rows])[0]
        names = *names, *_ADDED
        inputs += [None if rows != _ADDED[0] else added.rows, added.matrix, added.bias]
        added = Added(added.sizes, None, None, None, added.transposed)  # the tensors are inputs
    plan = _Plan(program, steps, view, names, added, rows, out_dtype)
    if wants_grad(*inputs):
        return _Node(plan).apply(*inputs)
    return _forward(plan, Pass(view, dict(zip(names, inputs)), out_dtype=out_dtype))


def _forward(plan: _Plan, p: Pass) -> tuple[Tensor, ...]:
    for name in plan.steps.rows:
        t = p.values[name]
        if not t.is_contiguous() or t.data_ptr() % 16:
            p.values[name] = dense(t)
    into, bias = None, p.values.get("+bias")
    if plan.added is not None and (len(plan.added.sizes) > 1 or p.values["+matrix"] is not None):
        into, bias = _root(plan, p, bias), None
    *first, last = plan.steps.steps
    for step in first:
        p.values[step.out] = step.forward(p)
    p.values[last.out] = last.forward(p, into, bias)
    return tuple([p.values[name] for name in plan.steps.outs])


def _root(plan: _Plan, p: Pass, bias: Tensor | None) -> Tensor:
    """The root term and bias, which differ from row to row: new memory for the last step to add
    to."""
    sizes, _, _, _, transposed = plan.added  # type: ignore[misc]
    blocks, matrix = p.view.blocks(sizes), p.values["+matrix"]
    if matrix is None:
        return bias.index_select(0, blocks.relation)  # type: ignore[union-attr]
    return product(blocks.segments, p.values[plan.rows],
                   matrix if matrix.dim() == 3 else matrix.unsqueeze(0), transposed, None, bias)


class _Node(Operation):
    """A plan's steps. ``calls``: of their attention, and how many tensors each has saved."""

    __slots__ = ("calls", "plan")
    keeps_inputs = True

    def __init__(self, plan: _Plan):
        self.plan = plan

    def forward(self, needs, *inputs):
        plan = self.plan
        p = Pass(plan.view, dict(zip(plan.names, inputs)), train=True, out_dtype=plan.out_dtype)
        outs = _forward(plan, p)
        attended = [p.attended[name] for name in plan.steps.attends]
        self.calls = [(call, len(saved)) for call, saved in attended]
        intermediates = [p.values[name] for name in plan.steps.kept]
        outs = tuple(t.detach() for t in outs)  # no views, which nobody could change in place
        return outs, (*inputs, *intermediates, *(t for _, saved in attended for t in saved))

    def backward(self, needs, saved, *grads):
        plan, count = self.plan, len(needs)
        inputs, at = saved[:count], count + len(plan.steps.kept)
        wanted = {name for name, need in zip(plan.names, needs) if need}
        for step in plan.steps.steps:
            if not wanted.isdisjoint(step.inputs()):
                wanted.add(step.out)
        values = {**dict(zip(plan.names, inputs)), **dict(zip(plan.steps.kept, saved[count:at]))}
        p = Pass(plan.view, values, frozenset(wanted))
        for name, (call, length) in zip(plan.steps.attends, self.calls):
            p.attended[name] = call, saved[at:at + length]
            at += length
        saved.clear()  # so that what is done with can be freed on the way
        by_name = zip(plan.steps.outs, grads)
        _backward(plan, p, {name: dense(grad) for name, grad in by_name if grad is not None})
        return [_like(p.so_far(name), t) for name, t in zip(plan.names, inputs)]

    def reference(self, *inputs):
        return _by_torch(self.plan, {call.program: call for call, _ in self.calls}, *inputs)


def _like(grad: Tensor | None, t: Tensor | None) -> Tensor | None:
    return (grad if grad is None or grad.dtype is t.dtype  # type: ignore[union-attr]
            else grad.to(t.dtype))  # type: ignore[union-attr]


def _backward(plan: _Plan, p: Pass, grads: dict[str, Tensor]) -> None:
    if plan.added is not None:
        _root_backward(plan, p, *grads.values())
    for name, grad in grads.items():
        p.put(name, grad)
    for step, done in zip(reversed(plan.steps.steps), reversed(plan.steps.done)):
        if step.out in p.wanted and step.out in p.grads:
            step.backward(p)
        for name in done:
            del p.values[name]


def _root_backward(plan: _Plan, p: Pass, grad: Tensor) -> None:
    """The root term's gradients; first, so that others of the rows are added to them."""
    (sizes, _, _, _, transposed), matrix = (
        plan.added, p.values["+matrix"])  # type: ignore[misc]
    if "+bias" in p.wanted:
        sums = column_sums(p.view, sizes, grad if grad.dim() == 2 else grad.flatten(1))
        p.put("+bias", sums[0] if len(sizes) == 1 else sums)
    if matrix is None:
        return
    segments = p.view.blocks(sizes).segments
    by_rows, by_matrix = backward(segments, p.values[plan.rows], grad,
                                  matrix if matrix.dim() == 3 else matrix.unsqueeze(0), transposed,
                                  None, None, plan.rows in p.wanted, "+matrix" in p.wanted)
    if by_matrix is not None:
        p.put("+matrix", by_matrix.view(matrix.shape))
    if by_rows is not None:
        p.put(plan.rows, by_rows)


def column_sums(view: RelationView, sizes: tuple[int, ...], grad: Tensor) -> Tensor:
    """Sums over the rows of each type: [types, N]."""
    if len(sizes) == 1 and grad.numel():
        return column_sum(grad).unsqueeze(0)
    by_type = view.of_blocks(sizes)
    return total(by_type.csc(places=False), grad)


def _by_torch(plan: _Plan, calls: dict[Program, attention.Call],
              *inputs: Tensor | None) -> tuple[Tensor, ...]:
    """The node on torch operations, which can be differentiated any number of times. ``calls``: of
    attention, by their Programs: they have drawn their dropout."""
    values: dict[str, Any]
    values, program = dict(zip(plan.names, inputs)), plan.program

    def attend(call: attention.Call, tensors: dict[str, Tensor]) -> Tensor:
        return attention.with_the_same_dropout(calls[call.program], tensors)

    state = execute.Run(program, plan.view, values, torch_maps, attend, plan.out_dtype)
    for op in plan.steps.ops:
        values[op.out] = execute.OPERATIONS[op.kind](state, op, program.domains[op.out])
    if plan.added is not None:
        operands = dict(rows=values.get(plan.rows), matrix=values["+matrix"], bias=values["+bias"])
        values[program.output] = adding.add(values[program.output], plan.added._replace(**operands),
                                            plan.view)
    return tuple(values[name] for name in plan.steps.outs)
