"""Counting: bytes, operations and launches of small examples, worked out by hand."""
from __future__ import annotations

import pytest

from gnnaccel.dispatch.ir.program import (DST, EDGE, PAIR_DST, PAIR_SRC, PARAM, RELATION, SRC, Op,
                                          Program, op)
from gnnaccel.dispatch.plan import cost
from gnnaccel.dispatch.relational.counting import Count, count, count_on_gpu
from gnnaccel.dispatch.relational.gather import RelationStatistics
from gnnaccel.dispatch.relational.passes import compact, fuse, orderings
from tests.relational_cases import statement

#: 10 sources, 8 destinations, 20 edges, 3 relations, 12 and 9 pairs
GRAPH = RelationStatistics(10, 8, 20, 3, 12, 9)
SHAPES = dict(x=(4,), y=(4,), e=(6,), s=(2,), a=(2,), w=(4, 5), b=(2, 2, 3), c=(3,), v=(3, 4, 5),
              m=(4, 5), q=(5, 2), t=(7, 5), tv=(3, 7, 5),
              ids=(), p=(2,), z=(6,), r=(2,))
INPUTS = (("x", SRC), ("y", DST), ("e", EDGE), ("s", EDGE), ("a", SRC), ("w", RELATION),
          ("b", RELATION), ("c", RELATION), ("v", PARAM),
          ("m", PARAM), ("q", PARAM), ("t", RELATION), ("tv", PARAM), ("ids", SRC), ("p", RELATION),
          ("z", PAIR_DST), ("r", PAIR_DST))
TAIL = op("collect", "out", "z")  # from 9 rows to 8 of 6: 4 * (17 * 6 + 9) bytes, 54 operations
OF_TAIL = Count(444, 54, 1)


def of(step: Op) -> Count:
    """What one operation costs, after those that make its arguments."""
    return count(Program("test", INPUTS, (step, TAIL), "out"), SHAPES, GRAPH)


@pytest.mark.parametrize("step, moved, flops, launches", [
    # rows read and written once, and a matrix for each relation: 12 * (4 + 5) + 3 * 20 values
    (Op("linear", "h", ("x@src", "w@rel"), domain=PAIR_SRC), 4 * 168, 2 * 12 * 20, 1),
    (Op("linear", "h", ("y@dst", "w@rel"), domain=PAIR_DST), 4 * (9 * 9 + 60), 2 * 9 * 20, 1),
    (Op("linear", "h", ("x@src", "w@rel")), 4 * (20 * 9 + 20 * 20), 2 * 20 * 20, 1),  # uncompacted: a matrix per edge
    (Op("linear", "h", ("x@src", "m")), 4 * (20 * 9 + 20), 2 * 20 * 20, 1),  # one matrix for all
    (Op("linear", "h", ("x", "m")), 4 * (10 * 9 + 20), 2 * 10 * 20, 1),
    (Op("linear", "h", ("x@src", "b@rel"), domain=PAIR_SRC), 4 * (12 * (4 + 6) + 3 * 12), 2 * 12 * 12, 1),  # two blocks of [2, 3]
    (Op("linear", "h", ("e", "b@rel"), (("transposed", True),), PAIR_DST), 4 * (9 * (6 + 4) + 3 * 12), 2 * 9 * 12, 1),
    (op("fold", "h", "w", "q"), 4 * (3 * (20 + 8) + 10), 2 * 3 * 8 * 5, 1),
    (op("combine", "h", "c", "v"), 4 * (3 * (3 + 20) + 60), 2 * 3 * 20 * 3, 1),
    (Op("lookup", "h", ("t@rel", "ids@src"), domain=PAIR_SRC), 4 * 12 * 2 * 5, 0, 1),  # a row read, a row written
    (Op("mix", "h", ("c@rel", "tv", "ids@src"), domain=PAIR_SRC), 4 * 12 * 4 * 5, 2 * 12 * 3 * 5, 3),
    (op("reduce", "h", "x@src", mean=True), 4 * (20 + 9) * 4 + 8 * 20, 2 * 20 * 4, 1),
    (op("mean_sum", "h", "x@src", mean=True), 4 * (20 + 8) * 4 + 8 * 20, 2 * 20 * 4, 1),
    (op("collect", "h", "r"), 4 * (9 + 8) * 2 + 4 * 9, 9 * 2, 1),
    # the coefficients' sums of 6 values: read 9 rows 3 times, write 8 and read them again; then a matrix [18, 5] for 8 rows
    (op("per_basis", "h", "z", "c", "v"), 4 * 3 * 6 * (9 + 2 * 8), 2 * 3 * 6 * (9 + 8 * 5), 5),
    (op("aggregate", "h", "s", "x@src", heads=2), 4 * (20 * 4 + 8 * 4), 2 * 20 * 4, 1),
    (op("add", "h", "e", "x@src"), 4 * 20 * (6 + 4 + 6), 2 * 20 * 6, 1),
    (op("dot", "h", "y@dst", "x@src", heads=2), 4 * 20 * (4 + 4 + 2), 2 * 20 * 4, 1),
    (op("segment_softmax", "h", "s", scope="dst"), 4 * 20 * (2 + 2) * 4, 2 * 20 * 2, 4),
    (Op("mul", "h", ("w", "p"), domain=RELATION), 4 * 3 * (20 + 2 + 20), 2 * 3 * 20, 1),
    (op("scale", "h", "x", by=2.0), 4 * 10 * (4 + 4), 2 * 10 * 4, 1),
], ids=lambda v: str(v) if isinstance(v, Op) else "")
def test_one_operation(step, moved, flops, launches):
    total = of(step)
    assert total == Count(moved, flops, launches) + OF_TAIL


def layer(name: str, how: str, shapes: dict) -> Count:
    program = next(program for found, program in orderings(statement(name)) if found == how)
    return count(fuse(compact(program)), shapes, GRAPH)


def test_attention():
    shapes = dict(keys=(4,), values=(4,), queries=(4,), w_att=(2, 2, 2), w_msg=(2, 2, 2), p=(2,))
    prior = Count(4 * 3 * (8 + 2 + 8), 2 * 3 * 8, 1)
    mapped = Count(4 * (12 * 8 + 3 * 8), 2 * 12 * 8, 1)
    # key, value and two numbers per head for each edge
    attend = Count(4 * (20 * (2 * 4 + 2 * 2) + 8 * 4), 4 * 20 * 4, 1)
    assert layer("hgt", "prior_into_map", shapes) == prior + mapped + mapped + attend


def test_attention_with_terms():
    shapes = dict(x=(4,), weight=(4, 6), q=(6, 2), k=(6, 2))
    folds = Count(4 * (3 * (24 + 8) + 12), 2 * 3 * 8 * 6, 1)
    terms = Count(4 * (9 * 6 + 3 * 8), 2 * 9 * 8, 1) + Count(4 * (12 * 6 + 3 * 8), 2 * 12 * 8, 1)
    edge = Count(4 * 20 * (2 + 2), 2 * 20 * 2, 1)
    attend = Count(4 * (20 * (6 + 2 * 2) + 8 * 6), 4 * 20 * 6, 1)
    rows = Count(4 * (12 * 10 + 3 * 24), 2 * 12 * 24, 1)
    assert layer("rgat", "fold_chain + fold_chain",
                 shapes) == rows + folds + folds + terms + edge + attend


@pytest.mark.parametrize("how, moved, flops, launches", [
    ("as stated", 4 * 168 + 4 * 28 * 5 + 160, 480 + 200, 2),
    ("aggregate_first", 4 * 29 * 4 + 160 + 4 * 141 + 4 * 17 * 5 + 36, 160 + 360 + 45, 3),
])
def test_a_layer_is_the_sum_of_its_operations(how, moved, flops, launches):
    assert layer("rgcn mean", how, dict(x=(4,), weight=(4, 5))) == Count(moved, flops, launches)


@pytest.mark.parametrize("how, moved, flops", [
    # the sum's gradient gathered at 20 edges to 12 pairs; then rows, gradients (twice: two kernels) and new gradients, all of 12
    # pairs, and the matrices and theirs; the new gradients summed over each of 10 sources' pairs
    ("as stated", 4 * 32 * 5 + 160 + 4 * (12 * (2 * 4 + 2 * 5) + 2 * 60 + 22 * 4), 200 + 960),
    # the destinations' gradients read by 9 pairs, the new ones gathered at 20 edges to 10 sources
    ("aggregate_first", 4 * (9 * (2 * 4 + 2 * 5) + 2 * 60) + 4 * 30 * 4 + 160, 720 + 160),
])
def test_backward(how, moved, flops):
    shapes = dict(x=(4,), weight=(4, 5))
    program = next(program for found, program in orderings(statement("rgcn mean")) if found == how)
    program = fuse(compact(program))
    forward, back = count_on_gpu(program, shapes, GRAPH, True)
    assert (back.moved, back.flops) == (moved, flops) and forward == count(program, shapes, GRAPH)
    assert count_on_gpu(program, shapes, GRAPH, False) == (forward, Count())


def test_gradients_by_one_kernel_read_the_outputs_gradient_once():
    step = Op("linear", "h", ("x@src", "weight@rel"), domain=PAIR_SRC)
    program = Program("test", (("x", SRC), ("weight", RELATION)),
                      (step, op("mean_sum", "out", "h@pair_src", mean=False)), "out")

    def moved(k: int, n: int) -> int:
        rest = 4 * ((20 + 12) * n + 12 * 2 * k + 22 * k + 2 * 3 * k * n) + 160
        return (count_on_gpu(program, dict(x=(k,), weight=(k, n)), GRAPH, True)[1].moved
                - rest) / (4 * 12 * n)

    assert (moved(64, 64), moved(64, 128), moved(4, 5)) == (1, 2, 2)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_seconds(device):
    rates = cost.constants()["relational"][device]["orderings"]
    assert Count(10, 0, 0).seconds(device) == pytest.approx(10 / rates["bandwidth"])
    assert Count(0, 10, 0).seconds(device) == pytest.approx(10 / rates["flops"])
    assert Count(0, 0, 10).seconds(device) == pytest.approx(10 * rates["launch"])
    alone = Count(1, 0, 0), Count(0, 2, 0), Count(0, 0, 3)
    assert Count(1, 2, 3).seconds(device) == pytest.approx(sum(c.seconds(device) for c in alone))
