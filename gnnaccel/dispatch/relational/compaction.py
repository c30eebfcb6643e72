"""Compaction: a value that depends on less than the whole edge is made once per what it depends on
(arXiv 2301.06284).

(source, relation) only: PAIR_SRC. (destination, relation) only: PAIR_DST. One node or the relation
alone: there. Chosen for each value by itself, so the two sides of an edge may be compacted
differently.
"""
from __future__ import annotations

from dataclasses import replace

from gnnaccel.dispatch.ir.program import (DST, EDGE, PAIR_DST, PAIR_SRC, PARAM, RELATION, SRC, Op,
                                          Program)

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
    for op in program.ops:
        if program.domains[op.out] == EDGE and op.kind in _BY_ROW:
            needs = frozenset().union(*(_needs(arg, program, ends) for arg in op.args))
            ends[op.out] = needs
            home = _HOMES.get(needs)
            if home is not None:
                moved[op.out] = home
                ops.append(replace(op, args=tuple(_read(arg, home, moved) for arg in op.args),
                                   domain=home))
                continue
        ops.append(replace(op, args=tuple(_read(arg, EDGE, moved) for arg in op.args)))
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
