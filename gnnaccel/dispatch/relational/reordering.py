"""Linear operator reordering: the same value by maps applied in another order (arXiv 2301.06284).

Each rule looks at one operation of a Program and returns the Programs that it allows there.
`orderings` closes a Program under all rules; which ordering is taken is decided by counting
(`counting`), not here.

    fold_chain       <x W, q> = <x, W q>
    aggregate_first  sum_e (x_e W_r) = (sum_e x_e) W_r over the edges of one (destination,
    relation); likewise means, with weights
    weighted_first   sum_e a_eh (x_e W)_h = (sum_e a_eh x_e) W_h for the features of edges
    per_basis        sum_r a_r (sum_b c_rb V_b) = sum_b (sum_r c_rb a_r) V_b
    table_first      rows of sum_b c_rb T_b: of the sums, rather than sums of the rows
    prior_into_map   p_r <q, k A_r> = <q, k (p_r A_r)>
    other_side       <q, k A> = <q A', k>
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

from gnnaccel.dispatch.ir.program import (DST, EDGE, PAIR_DST, PARAM, RELATION, Op, Program,
                                          name_of, op)

_MOST = 32  # orderings of one Program that are looked at


@functools.lru_cache(maxsize=256)
def orderings(program: Program) -> tuple[tuple[str, Program], ...]:
    """(names of the rules applied, Program) for each ordering that the rules reach; the Program as
    stated comes first."""
    by_ops: dict[tuple, tuple[str, Program]] = {program.ops: ("as stated", program)}
    queue = [("", program)]
    while queue and len(by_ops) < _MOST:
        done, start = queue.pop(0)
        for rule in RULES:
            for changed in rule(start):
                changed = without_dead(changed)
                if changed.ops not in by_ops:
                    name = f"{done} + {rule.__name__}" if done else rule.__name__
                    by_ops[changed.ops] = name, changed
                    queue.append((name, changed))
    return tuple(by_ops.values())


def without_dead(program: Program) -> Program:
    """The Program without operations whose value nothing reads."""
    needed, live = {program.output}, []
    for step in reversed(program.ops):
        if step.out in needed:
            live.append(step)
            needed.update(name_of(arg) for arg in step.args)
    return _with_ops(program, tuple(reversed(live)))


# --- rules ----------------------------------------------------------------------------------------

def fold_chain(program: Program) -> Iterator[Program]:
    for at, step, inner in _chains(program, "linear", 0, "linear"):
        if program.domains[name_of(step.args[1])] == PARAM and inner.args[1].endswith("@rel"):
            folded = f"{name_of(inner.args[1])}_{step.args[1]}"
            yield _replace(program, at, op("fold", folded, name_of(inner.args[1]), step.args[1]),
                           replace(step, args=(inner.args[0], f"{folded}@rel")))


def aggregate_first(program: Program) -> Iterator[Program]:
    for at, step, inner in _chains(program, "reduce", 0, "linear"):
        if inner.args[1].endswith("@rel") and inner.args[0].endswith("@src"):
            yield _replace(program, at,
                           replace(step, args=(inner.args[0], *step.args[1:]),
                                   out=f"{step.out}_in"),
                           replace(inner, out=step.out, args=(f"{step.out}_in", inner.args[1]),
                                   domain=PAIR_DST))


def weighted_first(program: Program) -> Iterator[Program]:
    for at, step, inner in _chains(program, "aggregate", 1, "linear"):
        rows, matrix = inner.args
        domains = program.domains
        if ((domains.get(rows), domains.get(matrix)) == (EDGE, PARAM) and not inner.attrs
            and not step.get("per_head")):
            heads, sums = step.attr("heads"), f"{step.out}_in"
            yield _replace(program, at,
                           op("aggregate", sums, step.args[0], rows, heads=1, per_head=heads),
                           Op("linear", step.out, (sums, matrix), (("heads", heads),), DST))


def per_basis(program: Program) -> Iterator[Program]:
    for at, step, inner in _chains(program, "collect", 0, "linear"):
        weight = _maker(program, inner.args[1])
        if weight is not None and weight.kind == "combine":
            yield _replace(program, at, op("per_basis", step.out, inner.args[0], *weight.args))


def table_first(program: Program) -> Iterator[Program]:
    for at, step in enumerate(program.ops):
        if step.kind == "mix":
            comp, bases, ids = step.args
            yield _replace(program, at, op("combine", "weight", name_of(comp), bases),
                           op("lookup", step.out, "weight@rel", ids))


def prior_into_map(program: Program) -> Iterator[Program]:
    for at, step, inner in _chains(program, "mul", 0, "dot"):
        for side in (0, 1):
            linear = _maker(program, inner.args[side])
            if (linear is not None and linear.kind == "linear" and step.args[1].endswith("@rel")
                and linear.args[1].endswith("@rel")):
                prior = f"{name_of(linear.args[1])}_{name_of(step.args[1])}"
                unmapped = inner.args[1 - side]
                mapped = replace(linear, out=f"{linear.out}_{name_of(step.args[1])}",
                                 args=(linear.args[0], f"{prior}@rel"))
                args = (mapped.out, unmapped) if side == 0 else (unmapped, mapped.out)
                yield _replace(program, at,
                               Op("mul", prior, (name_of(linear.args[1]), name_of(step.args[1])),
                                  domain=RELATION), mapped, replace(inner, out=step.out, args=args))


def other_side(program: Program) -> Iterator[Program]:
    for at, step in enumerate(program.ops):
        if step.kind != "dot":
            continue
        linear = _maker(program, step.args[1])
        if (linear is not None and linear.kind == "linear" and linear.args[1].endswith("@rel")
            and step.args[0].endswith("@dst")):
            mapped = op("linear", f"{name_of(step.args[0])}_mapped", step.args[0], linear.args[1],
                        transposed=True)
            yield _replace(program, at, mapped, replace(step, args=(mapped.out, linear.args[0])))


RULES: tuple[Callable[[Program], Iterator[Program]],
             ...] = (fold_chain, aggregate_first, weighted_first, per_basis, table_first,
                     prior_into_map, other_side)


# --- small tools ----------------------------------------------------------------------------------

def _maker(program: Program, arg: str) -> Op | None:
    return next((step for step in program.ops if step.out == name_of(arg)), None)


def _chains(program: Program, kind: str, place: int, inner: str) -> Iterator[tuple[int, Op, Op]]:
    """(position, operation, the one that makes its argument ``place``) of these kinds."""
    for at, step in enumerate(program.ops):
        if step.kind == kind:
            maker = _maker(program, step.args[place])
            if maker is not None and maker.kind == inner:
                yield at, step, maker


def _replace(program: Program, at: int, *ops: Op) -> Program:
    return _with_ops(program, program.ops[:at] + ops + program.ops[at + 1:])


def _with_ops(program: Program, ops: tuple[Op, ...]) -> Program:
    return Program(program.name, program.inputs, ops, program.output)
