"""Passes over Programs (arXiv 2301.06284): reordering, compaction, fusion.

*Linear operator reordering*: the same value by maps applied in another order. Each rule looks at
one operation of a Program and returns the Programs that it allows there. `orderings` closes a
Program under all rules; which ordering is taken is decided by counting (`counting`), not here.

    fold_chain       <x W, q> = <x, W q>
    aggregate_first  sum_e (x_e W_r) = (sum_e x_e) W_r over the edges of one (destination,
    relation); likewise means, with weights
    weighted_first   sum_e a_eh (x_e W)_h = (sum_e a_eh x_e) W_h for the features of edges
    per_basis        sum_r a_r (sum_b c_rb V_b) = sum_b (sum_r c_rb a_r) V_b
    table_first      rows of sum_b c_rb T_b: of the sums, rather than sums of the rows
    prior_into_map   p_r <q, k A_r> = <q, k (p_r A_r)>
    other_side       <q, k A> = <q A', k>

*Compaction*: a value that depends on less than the whole edge is made once per what it depends on.
(source, relation) only: PAIR_SRC. (destination, relation) only: PAIR_DST. One node or the relation
alone: there. Chosen for each value by itself, so the two sides of an edge may be compacted
differently.

*Fusion*: chains of operations that one traversal of a (virtual) graph computes become one
operation.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.ir.program import (DOMAIN_OF, DST, EDGE, PAIR_DST, PAIR_SRC, PARAM, RELATION,
                                          SRC, Op, Program, name_of, op)


# --- reordering -----------------------------------------------------------------------------------

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


# --- compaction -----------------------------------------------------------------------------------

_HOMES = {frozenset({"src"}): SRC, frozenset({"dst"}): DST, frozenset({"rel"}): RELATION,
          frozenset({"src", "rel"}): PAIR_SRC, frozenset({"dst", "rel"}): PAIR_DST}
_END_OF = {SRC: "src", DST: "dst", RELATION: "rel", PAIR_SRC: "pair_src", PAIR_DST: "pair_dst"}
#: operations whose value is a function of their arguments row by row
_BY_ROW = {"linear", "lookup", "mix", "add", "mul", "scale", "leaky_relu", "relu", "sigmoid", "dot",
           "head_dot", "part"}


def compact(program: Program) -> Program:
    """The Program with every EDGE value moved to the coarsest domain that determines it. The value
    does not change."""
    ends: dict[str, frozenset[str]] = {}  # the ends that each EDGE value depends on
    moved: dict[str, str] = {}
    ops: list[Op] = []
    for step in program.ops:
        if program.domains[step.out] == EDGE and step.kind in _BY_ROW:
            needs = frozenset().union(*(_needs(arg, program, ends) for arg in step.args))
            ends[step.out] = needs
            home = _HOMES.get(needs)
            if home is not None:
                moved[step.out] = home
                ops.append(replace(step, domain=home,
                                   args=tuple(_read(arg, home, moved) for arg in step.args)))
                continue
        ops.append(replace(step, args=tuple(_read(arg, EDGE, moved) for arg in step.args)))
    return Program(program.name, program.inputs, tuple(ops), program.output)


def _needs(arg: str, program: Program, ends: dict[str, frozenset[str]]) -> frozenset[str]:
    name, _, end = arg.partition("@")
    if end:
        return frozenset({"pair_src": {"src", "rel"}, "pair_dst": {"dst", "rel"}}.get(end, {end}))
    if program.domains[name] == PARAM:
        return frozenset()
    return ends.get(name, frozenset({"edge"}))


def _read(arg: str, home: str, moved: dict[str, str]) -> str:
    """How an operation in ``home`` reads what the Program calls ``arg``."""
    name, _, end = arg.partition("@")
    if name not in moved:
        return name if end and end == _END_OF.get(home) else arg
    return name if moved[name] == home else f"{name}@{_END_OF[moved[name]]}"


# --- fusion ---------------------------------------------------------------------------------------

def fuse(program: Program) -> Program:
    """The compacted Program with reductions and attention as single traversals. The value does not
    change."""
    return _fuse_attention(_fuse_reductions(program))


# --- reductions -----------------------------------------------------------------------------------

def _fuse_reductions(program: Program) -> Program:
    """The mean over the edges of each relation and the sum over relations: one weighted sum by
    destination."""
    ops = list(program.ops)
    read = [arg for step in ops for arg in step.args]
    for at, step in enumerate(program.ops):
        inner = next((o for o in program.ops if o.out == step.args[0]), None)
        if (step.kind == "collect" and len(step.args) == 1 and inner is not None
            and inner.kind == "reduce"
                and read.count(inner.out) == 1):
            ops[at] = op("mean_sum", step.out, *inner.args, mean=inner.attr("mean"))
            ops.remove(inner)
            return Program(program.name, program.inputs, tuple(ops), program.output)
    return program


# --- attention ------------------------------------------------------------------------------------

def _fuse_attention(program: Program) -> Program:
    producers = {step.out: step for step in program.ops}
    tail = next((step for step in program.ops if step.kind == "aggregate"), None)
    if tail is None:
        return program
    dropped = producers.get(tail.args[0])
    softmax = (producers.get(dropped.args[0]) if dropped is not None
               and dropped.kind == "dropout" else dropped)
    if softmax is None or softmax.kind != "segment_softmax":
        return program
    assert dropped is not None
    dropout = dropped.attr("p") if dropped.kind == "dropout" else 0.0
    source = tail.args[1].partition("@")[2]
    if source not in ("src", "pair_src"):
        return program
    target = softmax.attr("scope")
    score = producers.get(softmax.args[0])
    find = _additive if score is not None and score.kind == "leaky_relu" else _dot
    match = find(producers, score, tail.args[1], source, target, dropout)
    if match is None:
        return program
    before, names, args, attention, gone = match
    gone |= {softmax.out, tail.out, dropped.out}
    rest = tuple(step for step in program.ops if step.out not in gone)
    if any(name_of(arg) in gone - {tail.out} for step in rest for arg in step.args):
        return program  # something else wants to see the scores or weights
    home = DOMAIN_OF[target]
    out = tail.out if home == DST else f"{tail.out}_pairs"
    fused = Op("attend", out, args,
               (("attention", attention), ("heads", tail.attr("heads")), ("names", names),
                ("source", DOMAIN_OF[source]), ("target", home)), home)
    fused_ops = before + ((fused,) if home == DST else (fused, op("collect", tail.out, out)))
    at = sum(step in rest for step in program.ops[:program.ops.index(tail)])
    return Program(program.name, program.inputs, rest[:at] + fused_ops + rest[at:], program.output)


def _additive(made: dict[str, Op], score: Op | None, row: str, source: str, target: str,
              dropout: float):
    """leaky_relu of a sum of terms: one by source, one by destination, and the others, which vary
    over the edges."""
    assert score is not None
    z = made.get(score.args[0])
    if z is None or z.kind != "add":
        return None
    by_src = [a for a in z.args if a.endswith(f"@{source}")]
    by_dst = [a for a in z.args if a.endswith(f"@{target}")]
    rest = tuple(a for a in z.args if a not in by_src[:1] + by_dst[:1])
    if not by_src:
        return None
    names: tuple[str, ...]
    args: tuple[str, ...]
    before: tuple[Op, ...]
    names, args, before = ("x", "a_src"), (name_of(row), name_of(by_src[0])), ()
    if by_dst:
        names, args = names + ("a_dst",), args + (name_of(by_dst[0]),)
    if rest:
        if len(rest) == 1 and "@" not in rest[0]:
            edge = rest[0]
        else:
            edge, before = f"{z.out}_edge", (Op("add", f"{z.out}_edge", rest, domain=EDGE),)
        names, args = names + ("a_edge",), args + (edge,)
    attention = programs.additive_terms(score.attr("slope"), dropout, bool(by_dst), bool(rest))
    return before, names, args, attention, {z.out, score.out}


def _dot(made: dict[str, Op], score: Op | None, row: str, source: str, target: str, dropout: float):
    """A scaled inner product of a destination's row with the row of a source, both where the
    value's source is."""
    if score is None or score.kind != "scale":
        return None
    dot = made.get(score.args[0])
    if dot is None or dot.kind != "dot":
        return None
    query, key = dot.args
    if not (query.endswith(f"@{target}") and key.endswith(f"@{source}")):
        return None
    names, args = ("keys", "values", "queries"), (name_of(key), name_of(row), name_of(query))
    return (), names, args, programs.dot_product(score.attr("by"), dropout,
                                                 False), {dot.out, score.out}
