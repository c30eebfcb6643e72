"""How many kernels a Program launches on a GPU, ours and torch's: forward, and backward to all of
its operands.

Small graphs wait for launches, not for memory. Counted are the steps that `cuda_program` runs as
one node, and the operations that `execute` runs one by one around it; not the merge of sums that
several warps share, which only rows of many edges need.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any

import torch

from gnnaccel.cuda.segment import segment_backward
from gnnaccel.dispatch.ir.program import EDGE, Op, Program, name_of
from gnnaccel.dispatch.relational import cuda_steps
from gnnaccel.dispatch.relational.cuda_attention import Attend, Fold

Shape = tuple[int, ...]
Pair = tuple[int, int]  # forward, backward


def launches(program: Program, known: dict[str, Shape]) -> Pair:
    """(forward, backward). known: the shape of one row of every value, of the whole for
    parameters."""
    divided = cuda_steps.steps_of(program)
    steps = {} if divided is None else {step.out: step for step in divided.steps}
    inside = () if divided is None else divided.ops
    outside = tuple(op for op in program.ops if op not in inside)
    pairs = [_inside(op, steps, known) for op in inside if op.out in steps]
    pairs += [_outside(op, program, known) for op in outside]
    reads = {(arg, program.domains[op.out]) for op in outside for arg in _gathered(op, program)}
    numbers = {op.args[-1] for op in outside if op.kind in _NUMBERED}  # have no gradient
    forward, backward = (sum(part)
                         for part in zip(*pairs,
                                         (len(reads), sum(arg not in numbers for arg, _ in reads))))
    return forward, backward + _added_inside(steps, divided,
                                             known) + _added_outside(outside, divided)


#: operations that read the rows of edges' ends themselves; for others rows are gathered first, and
#: their gradient summed
_AT_ENDS = {"reduce", "mean_sum", "collect", "per_basis", "aggregate", "attend", "segment_softmax"}
_NUMBERED = {"lookup", "mix"}  # the last argument of these are numbers of rows


def _gathered(op: Op, program: Program) -> tuple[str, ...]:
    mapped = op.kind == "linear" and op.args[1].endswith("@rel") and program.domains[op.out] != EDGE
    if op.kind in _AT_ENDS or mapped:
        return ()
    args = op.args[1:] if op.kind == "lookup" else op.args[:1] if op.get("own") else op.args
    return tuple(arg for arg in args if "@" in arg)


def _product(op: Op, known: dict[str, Shape]) -> Pair:
    """A map by relation: both gradients by one kernel and a merge, or by two, a merge and zeros;
    those of gathered rows are summed."""
    k, n = known[name_of(op.args[1])][-2:]
    k, n = (n, k) if op.get("transposed") else (k, n)
    return 1, (2 if segment_backward.as_one(k, n, torch.float32) else 4) + ("@" in op.args[0])


# --- in the node ----------------------------------------------------------------------------------

def _inside(op: Op, steps: dict[str, Any], known: dict[str, Shape]) -> Pair:
    step = steps[op.out]
    if op.kind == "linear":
        return _product(op, known)
    if isinstance(step, Fold):
        return (1, 2) if len(known[step.rows]) == 2 else (2, 4)
    if isinstance(step, Attend):  # the score terms of one head come with it
        return (1, 3) if step.terms[4] is None else (2, 4)
    if op.kind == "collect":  # a map gathers the gradient itself
        return 1, int(type(steps.get(step.rows)) is not cuda_steps.Linear)
    return 1, 1


def _added_inside(steps: dict[str, Any], divided: cuda_steps.Steps | None,
                  known: dict[str, Shape]) -> int:
    """Additions of gradients that are a pass of their own: sums add in place."""
    if divided is None:
        return 0
    additions, begun = 0, set(divided.outs)
    for step in reversed(steps.values()):
        for at, name in enumerate(step.inputs()):
            additions += name in begun and _adds_apart(step, at, known)
            begun.add(name)
    return additions


def _adds_apart(step: Any, at: int, known: dict[str, Shape]) -> bool:
    if isinstance(step, Fold):
        return at == 1 or len(known[step.rows]) > 2
    if isinstance(step, cuda_steps.Linear):
        return at == 1 or step.coarse is None
    return isinstance(step, Attend)


# --- one by one -----------------------------------------------------------------------------------

def _outside(op: Op, program: Program, known: dict[str, Shape]) -> Pair:
    if op.kind == "linear" and op.args[1].endswith("@rel"):
        return (1, 2) if program.domains[op.out] == EDGE else _product(op, known)
    return _ONE_BY_ONE[op.kind](op, [known[name_of(arg)] for arg in op.args])


def _per_basis(op: Op, args: list[Shape]) -> Pair:
    return 3 + 2 * args[1][0], 3 + 7 * args[1][0]


def _aggregate(op: Op, args: list[Shape]) -> Pair:
    copies = op.get("per_head", 1)
    return (1, 2) if copies == 1 else (copies + 2, 5 * copies)


def _attend(op: Op, args: list[Shape]) -> Pair:
    return 1, 3


def _sum(op: Op, args: list[Shape]) -> Pair:
    """A sum over edges. Gradients of weights are inner products; means have a share for each edge,
    at its place."""
    weighted, mean = len(op.args) > 1, bool(op.get("mean"))
    if weighted:
        return 1 + mean, 3 + mean
    return (3, 3) if mean else (1, 1)


_ONE_BY_ONE: dict[str, Callable[[Op, list[Shape]], Pair]] = {
    "linear": lambda op, args: (1, 2), "fold": lambda op,
    args: (1, 2) if len(args[0]) == 2 else (3, 3),
    "combine": lambda op, args: (1, 2),
    "lookup": lambda op, args: (9, 2), "mix": lambda op, args: (1, 3) if op.get("own") else (7, 4),
    "mul": lambda op, args: (1, 2 + (prod(args[0]) != prod(args[1]))), "add": lambda op,
    args: (len(args) - 1, 0),
    "dot": lambda op, args: (2, 2), "scale": lambda op, args: (1, 1), "leaky_relu": lambda op,
    args: (1, 1),
    "relu": lambda op, args: (1, 1), "dropout": lambda op, args: (2, 1), "part": lambda op,
    args: (0, 1), "reduce": _sum,
    "mean_sum": _sum, "collect": lambda op, args: (1, 1), "per_basis": _per_basis,
    "segment_softmax": lambda op, args: (9, 9),
    "aggregate": _aggregate, "attend": _attend, "add_product": lambda op, args: (2, 3),
    "single": lambda op, args: (0, 0),
    "raise_positive": lambda op, args: (3, 5),
}


def _added_outside(outside: tuple[Op, ...], divided: cuda_steps.Steps | None) -> int:
    """Additions of gradients by autograd: one for each reader of a value but the first; the node is
    one."""
    readers = Counter(name_of(arg) for op in outside for arg in op.args)
    readers.update(() if divided is None else divided.names)
    return sum(count - 1 for count in readers.values())
