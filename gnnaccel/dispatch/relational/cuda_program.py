"""The maps by relation and sums over edges with which a Program begins, by the CUDA kernels as one
node of autograd: its steps forward, and the same steps backward. Often that is the whole Program.

Strung together by autograd, every step would be a node, and every sum of two gradients, or of
messages and a root term, a pass over memory: here the last kernel adds to what is there already.
Where backward is itself recorded, the steps run again on torch operations.
"""
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.cuda.column_sum import column_sum
from gnnaccel.dispatch.ir.program import (DOMAIN_OF, DST, PAIR_DST, PAIR_SRC, PARAM, RELATION, Op,
                                          Program, name_of)
from gnnaccel.dispatch.relational import added as adding
from gnnaccel.dispatch.relational import cuda_attention, cuda_maps, execute, torch_maps
from gnnaccel.dispatch.relational.added import Added
from gnnaccel.dispatch.relational.cuda_maps import backward, dense, product, total
from gnnaccel.dispatch.relational.view import RelationView
from gnnaccel.dispatch.run import attention
from gnnaccel.dispatch.run.autograd import Operation, wants_grad

_ADDED = ("+rows", "+matrix", "+bias")


class _Pass:
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
        found = self.grads.get(name)
        return None if found is None else found[0]

    def put(self, name: str, grad: Tensor) -> None:
        self.grads[name] = grad, None

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

    def reads(self) -> tuple[str, ...]:
        return self.inputs()

    def _index(self, p: _Pass) -> Tensor | None:
        return None if self.coarse is None else p.view.index(self.coarse, self.domain)

    def forward(self, p: _Pass, into: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        index = None if self.coarse is None else p.view.index(self.coarse, self.domain)
        return product(p.view.pairs(self.domain).segments, p.values[self.rows],
                       p.values[self.weight], self.transposed, index)

    def backward(self, p: _Pass) -> None:
        grad, where = p.grads.pop(self.out)
        segments = p.view.pairs(self.domain).segments
        found, by_weight = backward(segments, p.values[self.rows], grad, p.values[self.weight],
                                    self.transposed, self._index(p), where, self.rows in p.wanted,
                                    self.weight in p.wanted)
        if by_weight is not None:
            before = p.so_far(self.weight)
            p.put(self.weight, by_weight if before is None else before.add_(by_weight))
        if found is None:
            return
        if self.coarse is None:
            p.put(self.rows, found if self.rows not in p.grads else found + p.take(self.rows))
            return
        members = p.view.members(self.coarse, self.domain)
        p.put(self.rows, total(members.csc(places=False), found, into=p.so_far(self.rows)))


class _Sum(NamedTuple):
    """The sum over the edges from ``source`` to ``target``, each counting its ``share`` of a mean
    or once."""

    out: str
    rows: str
    source: str
    target: str
    share: bool

    def inputs(self) -> tuple[str, ...]:
        return (self.rows,)

    def reads(self) -> tuple[str, ...]:
        return ()

    def forward(self, p: _Pass, into: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        graph = p.view.graph(self.source, self.target)
        weight = p.view.share_along(self.source, self.target) if self.share else None
        return total(graph.csc(places=False), p.values[self.rows], weight, "position", into, bias)

    def backward(self, p: _Pass) -> None:
        graph = p.view.graph(self.source, self.target)
        weight = p.view.share_along(self.source, self.target, back=True) if self.share else None
        p.put(self.rows,
              total(graph.csr(places=False), p.take(self.out), weight, "position",
                    p.so_far(self.rows)))


class _Collect(NamedTuple):
    """The sum over a destination's relations. Its gradient is the destination's, which the step
    before gathers."""

    out: str
    rows: str

    def inputs(self) -> tuple[str, ...]:
        return (self.rows,)

    def reads(self) -> tuple[str, ...]:
        return ()

    def forward(self, p: _Pass, into: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        members = p.view.members(DST, PAIR_DST)
        return total(members.csc(places=False), p.values[self.rows], into=into, bias=bias)

    def backward(self, p: _Pass) -> None:
        p.grads[self.rows] = p.take(self.out), p.view.index(DST, PAIR_DST)


class Steps(NamedTuple):
    """``before``: operations on relations and parameters alone, left to autograd; ``ops``: those of
    the node, as ``steps``; ``after``: what is left, one by one; ``names``: what the steps read that
    they do not make; ``outs``: what they make for others; ``kept``: what they make that backward
    reads, ``done``: and which of those it reads no more after each of the steps; ``attends``: which
    of them are attention."""

    before: tuple[Op, ...]
    ops: tuple[Op, ...]
    steps: tuple[Any, ...]
    after: tuple[Op, ...]
    names: tuple[str, ...]
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
    """With the steps ``attended``, if all of those come to be in the node."""
    before = tuple(op for op in program.ops if program.domains[op.out] in (RELATION, PARAM)
                   and op.out not in attended)
    rest = tuple(sorted((op for op in program.ops if op not in before),
                        key=lambda op: op.kind != "fold"))
    found = tuple(attended[op.out] if op.out in attended else _step(op, program) for op in rest)
    count = next((i for i, (op, step) in enumerate(zip(rest, found)) if step is None
                  and op.out not in attended), len(found))
    steps, ops, after = tuple(step for step in found[:count]
                              if step is not None), rest[:count], rest[count:]
    if not steps or (after and count == 1) or (not after and type(steps[-1]) is Linear):
        return None
    made = {step.out for step in steps}
    read = tuple(dict.fromkeys(name for step in steps for name in step.inputs()))
    later = {name_of(arg) for op in after for arg in op.args} | {program.output}
    folded = {step.out for step in steps if type(step) is cuda_attention.Fold}
    if not attended.keys() <= {op.out for op in ops} or not folded.isdisjoint(later):
        return None
    first = {name: at for at, step in reversed(list(enumerate(steps))) for name in step.reads()
             if name in made}
    return Steps(before, ops, steps, after, tuple(name for name in read if name not in made),
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


# --- running --------------------------------------------------------------------------------------

class _Plan(NamedTuple):
    """``names``: of the inputs, in order; ``rows``: the name of the rows that the root term reads;
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
    """The output of a Program that `steps_of` divides. ``tensors`` may hold what is added to it;
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
    """What the steps make for others."""
    # a factor of another dtype may have gone into the matrices
    row = values[program.inputs[0][0]].dtype
    inputs: list[Tensor | None]
    names, rows = steps.names, _ADDED[0]
    given = [values[name] for name in names]
    inputs = [t if t.dtype is row else t.to(row) for t in given]
    if added is not None:
        rows = ([name for name, t in zip(names, inputs) if t is added.rows] or [rows])[0]
        names = *names, *_ADDED
        inputs += [None if rows != _ADDED[0] else added.rows, added.matrix, added.bias]
        added = Added(added.sizes, None, None, None, added.transposed)  # the tensors are inputs
    plan = _Plan(program, steps, view, names, added, rows, out_dtype)
    if wants_grad(*inputs):
        return _Node(plan).apply(*inputs)
    return _forward(plan, _Pass(view, dict(zip(names, inputs)), out_dtype=out_dtype))


def _forward(plan: _Plan, p: _Pass) -> tuple[Tensor, ...]:
    for step in plan.steps.steps:
        if step.rows in plan.steps.names:
            p.values[step.rows] = dense(p.values[step.rows])
    into, bias = (None, None) if plan.added is None else _root(plan, p)
    *first, last = plan.steps.steps
    for step in first:
        p.values[step.out] = step.forward(p)
    p.values[last.out] = last.forward(p, into, bias)
    return tuple([p.values[name] for name in plan.steps.outs])


def _root(plan: _Plan, p: _Pass) -> tuple[Tensor | None, Tensor | None]:
    """The root term and bias: new memory for the last step to add to, or what is the same for every
    row."""
    (sizes, _, _, _, transposed), matrix, bias = (
        plan.added, p.values["+matrix"], p.values["+bias"])  # type: ignore[misc]
    if matrix is None and len(sizes) == 1:
        return None, bias
    blocks = p.view.blocks(sizes)
    if matrix is None:
        return bias.index_select(0, blocks.relation), None
    p.values[plan.rows] = dense(p.values[plan.rows])
    return product(blocks.segments, p.values[plan.rows],
                   matrix if matrix.dim() == 3 else matrix.unsqueeze(0), transposed, None,
                   bias), None


def _by_type(matrix: Tensor) -> Tensor:
    """[types, ., .]; of one type it comes without."""
    return matrix if matrix.dim() == 3 else matrix.unsqueeze(0)


class _Node(Operation):
    """``calls``: of the attention among its steps, and how many tensors each has saved."""

    __slots__ = ("calls", "plan")

    def __init__(self, plan: _Plan):
        self.plan = plan

    def forward(self, needs, *inputs):
        plan = self.plan
        p = _Pass(plan.view, dict(zip(plan.names, inputs)), train=True, out_dtype=plan.out_dtype)
        outs = _forward(plan, p)
        attended = [p.attended[name] for name in plan.steps.attends]
        self.calls = [(call, len(saved)) for call, saved in attended]
        kept = [p.values[name] for name in plan.steps.kept]
        outs = tuple(t.detach() for t in outs)  # no views, which nobody could change in place
        return outs, (*inputs, *kept, *(t for _, saved in attended for t in saved))

    def backward(self, needs, saved, *grads):
        plan, count = self.plan, len(needs)
        inputs, at = saved[:count], count + len(plan.steps.kept)
        wanted = {name for name, need in zip(plan.names, needs) if need}
        for step in plan.steps.steps:
            if not wanted.isdisjoint(step.inputs()):
                wanted.add(step.out)
        values = {**dict(zip(plan.names, inputs)), **dict(zip(plan.steps.kept, saved[count:at]))}
        p = _Pass(plan.view, values, frozenset(wanted))
        for name, (call, length) in zip(plan.steps.attends, self.calls):
            p.attended[name] = call, saved[at:at + length]
            at += length
        saved.clear()  # so that what is done with can be freed on the way
        given = zip(plan.steps.outs, grads)
        _backward(plan, p, {name: dense(grad) for name, grad in given if grad is not None})
        return [_like(p.so_far(name), t) for name, t in zip(plan.names, inputs)]

    def reference(self, *inputs):
        return _by_torch(self.plan, {call.program: call for call, _ in self.calls}, *inputs)


def _like(grad: Tensor | None, t: Tensor | None) -> Tensor | None:
    return (grad if grad is None or grad.dtype is t.dtype  # type: ignore[union-attr]
            else grad.to(t.dtype))  # type: ignore[union-attr]


def _backward(plan: _Plan, p: _Pass, grads: dict[str, Tensor]) -> None:
    if plan.added is not None:
        _root_backward(plan, p, *grads.values())
    for name, grad in grads.items():
        p.put(name, grad)
    for step, done in zip(reversed(plan.steps.steps), reversed(plan.steps.done)):
        if step.out in p.wanted and step.out in p.grads:
            step.backward(p)
        for name in done:
            del p.values[name]


def _root_backward(plan: _Plan, p: _Pass, grad: Tensor) -> None:
    """First of all, so that the other gradients of the rows are added to it."""
    (sizes, _, _, _, transposed), matrix = (
        plan.added, p.values["+matrix"])  # type: ignore[misc]
    if "+bias" in p.wanted:
        sums = column_sums(p.view, sizes, grad if grad.dim() == 2 else grad.flatten(1))
        p.put("+bias", sums[0] if len(sizes) == 1 else sums)
    if matrix is None:
        return
    segments = p.view.blocks(sizes).segments
    by_rows, by_matrix = backward(segments, p.values[plan.rows], grad, _by_type(matrix), transposed,
                                  None, None, plan.rows in p.wanted, "+matrix" in p.wanted)
    if by_matrix is not None:
        p.put("+matrix", by_matrix.view(matrix.shape))
    if by_rows is not None:
        p.put(plan.rows, by_rows)


def column_sums(view: RelationView, sizes: tuple[int, ...], grad: Tensor) -> Tensor:
    """[types, N]: what all rows of a type add up to."""
    if len(sizes) == 1 and grad.numel():
        return column_sum(grad).unsqueeze(0)
    by_type = view.of_blocks(sizes)
    return total(by_type.csc(places=False), grad)


def _by_torch(plan: _Plan, calls: dict[Program, attention.Call],
              *inputs: Tensor | None) -> tuple[Tensor, ...]:
    """The same on torch operations, which can be differentiated any number of times. ``calls``: of
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
