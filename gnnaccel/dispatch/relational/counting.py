"""Counting what an ordering costs: bytes moved and floating-point operations, operation by
operation.

Counts are in 4-byte values. On a CPU backward moves and computes about twice as much in any
ordering, so it does not change which is best. On a GPU it may: the sums over edges in backward, and
its launches, differ between orderings.

Every count is a constant and so much for each node, edge, relation and pair. So an ordering is read
once, into a `Formula`, and what it costs on the next graph is a few products.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from math import prod
from operator import add, attrgetter, mul
from typing import NamedTuple

import torch

from gnnaccel.cuda.segment import segment_backward
from gnnaccel.dispatch.ir.program import DOMAIN_OF, EDGE, Op, Program, name_of
from gnnaccel.dispatch.plan import cost
from gnnaccel.dispatch.relational.gather import RelationStatistics
from gnnaccel.dispatch.relational.launches import launches

Shape = tuple[int, ...]
_NUMBERS = tuple(field.name for field in fields(RelationStatistics))
_numbers_of = attrgetter(*_NUMBERS)


@dataclass(frozen=True)
class Count:
    """A count: ``moved`` bytes, ``flops``, ``launches``: operations that are launched."""

    moved: int = 0
    flops: int = 0
    launches: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.moved + other.moved, self.flops + other.flops,
                     self.launches + other.launches)

    def seconds(self, device: str) -> float:
        """Seconds on a device of this type, by the rates of ``constants.json``."""
        return self.by(rates(device))

    def by(self, rates: dict[str, float]) -> float:
        """The seconds at these `rates`."""
        return self.moved / rates["bandwidth"] + self.flops / rates[
            "flops"] + self.launches * rates["launch"]


def rates(device: str) -> dict[str, float]:
    """Rates of devices of this type: "bandwidth", "flops" and seconds of a "launch"."""
    return cost.constants()["relational"][device]["orderings"]


class Formula(NamedTuple):
    """How a `Count` follows from `RelationStatistics`: ``fixed``, and for each of their numbers, in
    order, its factors."""

    fixed: Count
    moved: tuple[int, ...]
    flops: tuple[int, ...]

    def with_(self, other: Formula) -> Formula:
        """Formula of both, one after the other."""
        return Formula(self.fixed + other.fixed, tuple(map(add, self.moved, other.moved)),
                       tuple(map(add, self.flops, other.flops)))

    def at(self, statistics: RelationStatistics) -> Count:
        sizes = _numbers_of(statistics)
        return Count(self.fixed.moved + sum(map(mul, self.moved, sizes)),
                     self.fixed.flops + sum(map(mul, self.flops, sizes)), self.fixed.launches)


@functools.lru_cache(maxsize=1024)
def formulas(program: Program, shapes: tuple[tuple[str, Shape], ...], device: str,
             train: bool) -> tuple[Formula, ...]:
    """Formulas of a Program's forward on "cpu" or "cuda", and of its backward, which is weighed on
    a GPU alone. ``shapes``, ``train``: as of `count` and `count_on_gpu`."""
    def counts(sizes: tuple[int, ...]) -> tuple[Count, Count]:
        statistics = RelationStatistics(*sizes)
        if device == "cuda":
            return count_on_gpu(program, dict(shapes), statistics, train)
        return count(program, dict(shapes), statistics), Count()

    fixed = counts((0,) * len(_NUMBERS))
    each = [counts(tuple(int(name == one) for name in _NUMBERS)) for one in _NUMBERS]
    return tuple(Formula(first, tuple(one[way].moved - first.moved for one in each),
                         tuple(one[way].flops - first.flops for one in each))
                 for way, first in enumerate(fixed))


def count(program: Program, shapes: dict[str, Shape], statistics: RelationStatistics) -> Count:
    """Count of a Program's forward. ``shapes``: of one row of each input, without the first
    dimension; of the whole, for PARAM inputs."""
    sizes = shapes_of_all(program, shapes)
    return sum((_cost(step, program, sizes[step.out], sizes, statistics) for step in program.ops),
               Count())


def count_on_gpu(program: Program, shapes: dict[str, Shape], statistics: RelationStatistics,
                 train: bool) -> tuple[Count, Count]:
    """Counts of forward and backward, the latter zero unless the call is to ``train``; launches as
    the kernels are really launched. Gradients are taken to be wanted of all operands."""
    sizes = shapes_of_all(program, shapes)
    forward, backward = launches(program, sizes)
    first = replace(count(program, shapes, statistics), launches=forward)
    if not train:
        return first, Count()
    back = sum((_back(step, program, sizes, statistics) for step in program.ops), Count())
    return first, replace(back, launches=backward)


def shapes_of_all(program: Program, shapes: dict[str, Shape]) -> dict[str, Shape]:
    """The shape of one row of every value; of the whole for parameters."""
    sizes = dict(shapes)
    for step in program.ops:
        sizes[step.out] = _shape(step, sizes)
    return sizes


def _shape(step: Op, known: dict[str, Shape]) -> Shape:
    """The shape of one row of the result."""
    args = [known[name_of(arg)] for arg in step.args]
    kind = step.kind
    if kind == "linear":
        blocks, (k, n) = prod(args[1][:-2]), args[1][-2:]
        return (blocks * (k if step.get("transposed") else n),)
    if kind == "fold":
        return (prod(args[0][:-1]), args[1][-1])
    if kind in ("lookup", "mix"):
        return args[1 if kind == "mix" else 0][-1:]
    if kind in ("combine", "per_basis"):
        return args[-1][1:] if kind == "combine" else args[-1][-1:]
    if kind == "part":
        return (step.attr("stop") - step.attr("start"),)
    if kind == "dot":
        return (step.attr("heads"),)
    if kind == "aggregate":
        return (prod(args[1]) * step.get("per_head", 1),)
    if kind == "attend":
        return args[step.attr("names").index("values" if "values" in step.attr("names") else "x")]
    return args[0]


def _cost(step: Op, program: Program, shape: Shape, known: dict[str, Shape],
          statistics: RelationStatistics) -> Count:
    """Count of one operation: reads and writes each row once, gathers count per row of the finer
    domain."""
    domain = program.domains[step.out]
    rows, width = statistics.rows(domain), prod(shape)
    args = [known[name_of(arg)] for arg in step.args]
    edges, kind = statistics.num_edges, step.kind
    if kind == "linear":
        matrix = prod(args[1])
        if step.args[1].endswith("@rel"):  # in EDGE one matrix per edge is gathered
            matrix *= edges if domain == EDGE else statistics.num_relations
        return Count(4 * (rows * (prod(args[0]) + width) + matrix), 2 * rows * prod(args[1]), 1)
    if kind in ("fold", "combine"):
        inner = args[0][-1]
        return Count(4 * rows * (prod(args[0]) + width) + 4 * prod(args[1]),
                     2 * rows * width * inner, 1)
    if kind == "lookup":
        return Count(8 * rows * width, 0, 1)
    if kind == "mix":
        return Count(4 * rows * (args[0][0] + 1) * width, 2 * rows * args[0][0] * width, 3)
    if kind in ("reduce", "mean_sum"):
        return Count(4 * (edges + rows) * width + 8 * edges, 2 * edges * width, 1)
    if kind == "collect":
        pairs = statistics.pairs_dst
        return Count(4 * (pairs + rows) * width + 4 * pairs, pairs * width, 1)
    if kind == "per_basis":
        pairs, bases, k = statistics.pairs_dst, args[1][0], prod(args[0])
        return Count(4 * bases * k * (pairs + 2 * rows), 2 * bases * k * (pairs + rows * width),
                     2 + bases)
    if kind == "attend":
        gathered = width * (2 if "keys" in step.attr("names") else 1) + 2 * step.attr("heads")
        return Count(4 * (edges * gathered + rows * width), 4 * edges * width, 1)
    if kind == "aggregate":
        return Count(4 * (edges * width + rows * width), 2 * edges * width, 1)
    passes = 4 if kind == "segment_softmax" else 1
    return Count(4 * rows * (sum(prod(a) for a in args) + width) * passes,
                 2 * rows * max(prod(a) for a in args), passes)


def _back(step: Op, program: Program, known: dict[str, Shape],
          statistics: RelationStatistics) -> Count:
    """Backward of one operation, without launches. Kinds not listed read and compute about twice
    what they do forward."""
    domain, edges, width = program.domains[step.out], statistics.num_edges, prod(known[step.out])
    rows, kind = statistics.rows(domain), step.kind
    end = DOMAIN_OF.get(step.args[0].partition("@")[2], EDGE)
    if kind == "linear" and step.args[1].endswith("@rel") and domain != EDGE:
        k, matrix = prod(known[name_of(step.args[0])]), known[name_of(step.args[1])]
        passes = 2 * k + (width if _as_one(step, matrix) else 2 * width)
        gathered = (rows + statistics.rows(end)) * k if end != EDGE else 0
        return Count(4 * (rows * passes + gathered + 2 * statistics.num_relations * prod(matrix)),
                     4 * rows * prod(matrix))
    if kind in ("reduce", "mean_sum"):
        return Count(4 * (edges + statistics.rows(end)) * width + 8 * edges, 2 * edges * width)
    if kind == "collect":  # the operation that made its rows reads the destination's gradient
        return Count()
    # one traversal gathers gradients, for a product of rows another one keys and values
    if kind == "attend":
        passes = 4 if "keys" in step.attr("names") else 1
        gathered = passes * width + 4 * step.attr("heads")
        return Count(4
                     * (edges * gathered + (statistics.rows(step.attr("source")) + rows) * 2
                        * width), 8 * edges * width)
    forward = _cost(step, program, known[step.out], known, statistics)
    return Count(2 * forward.moved, 2 * forward.flops)


def _as_one(step: Op, matrix: Shape) -> bool:
    k, n = matrix[-2:] if not step.get("transposed") else matrix[:-3:-1]
    return segment_backward.as_one(k, n, torch.float32)
