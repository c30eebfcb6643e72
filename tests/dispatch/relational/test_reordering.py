"""Linear operator reordering: what each rule writes, what the rules reach, and that the value
stays."""
from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnaccel.dispatch.ir.program import DST, EDGE, PARAM, RELATION, SRC, Program, op
from gnnaccel.dispatch.relational import passes, statements
from gnnaccel.dispatch.relational.passes import RULES, orderings, without_dead
from tests.relational_cases import (SETTINGS, STATEMENTS, assert_same, by_edges, graphs, is_square,
                                    statement, tensors, value)


def lines(program: Program) -> list[str]:
    return [line.strip() for line in str(program).splitlines()[1:-1]]


def applied(rule: str, program: Program) -> list[list[str]]:
    """What a rule makes of a Program, one list of operations for each place where it holds."""
    return [lines(without_dead(changed)) for changed in getattr(passes, rule)(program)]


# ---- the rules, one by one ----

def test_fold_chain():
    program = Program("test", (("x", SRC), ("w", RELATION), ("q", PARAM)), (
        op("linear", "h", "x@src", "w@rel"), op("linear", "a", "h", "q"),
        op("reduce", "m", "a", mean=False),
        op("collect", "out", "m")),
        "out")
    assert applied("fold_chain", program) == [
        ["w_q = fold(w, q)", "a = linear(x@src, w_q@rel)", "m = reduce(a, mean=False)",
         "out = collect(m)"]]


def test_fold_chain_keeps_a_map_that_is_read_elsewhere():
    made, = applied("fold_chain",
                    without_dead(statements.rgat(0.2, 0.0, False, False, False, 2)))[1:]
    assert made[:5] == ["h_dst = linear(x@dst, weight@rel)", "h = linear(x@src, weight@rel)",
                        "a_dst = linear(h_dst, q)", "weight_k = fold(weight, k)",
                        "a_src = linear(x@src, weight_k@rel)"]
    assert made[-1] == "out = aggregate(alpha, h, heads=2)"


def test_fold_chain_wants_a_map_for_all_after_one_by_relation():
    inputs = (("x", SRC), ("w", RELATION), ("v", RELATION), ("q", PARAM))
    tail = (op("reduce", "m", "a", mean=False), op("collect", "out", "m"))
    for first, second in (("w@rel", "v@rel"), ("q", "q")):
        ops = (op("linear", "h", "x@src", first), op("linear", "a", "h", second), *tail)
        assert applied("fold_chain", Program("test", inputs, ops, "out")) == []


@pytest.mark.parametrize("mean", [False, True])
def test_aggregate_first(mean):
    assert applied("aggregate_first", statements.rgcn(mean, False)) == [
        [f"m_in = reduce(x@src, mean={mean})", "m = linear(m_in, weight@rel)  [PAIR_DST]",
         "out = collect(m)"]]


def test_aggregate_first_keeps_the_weights():
    assert applied("aggregate_first", statements.rgcn(False, False, weighted=True))[0][:2] == [
        "m_in = reduce(x@src, norm, mean=False)", "m = linear(m_in, weight@rel)  [PAIR_DST]"]


def test_aggregate_first_wants_a_row_of_the_source_and_a_map_by_relation():
    inputs = (("x", SRC), ("w", RELATION), ("m", PARAM))
    tail = (op("reduce", "s", "h", mean=False), op("collect", "out", "s"))
    for step in (op("linear", "h", "x@dst", "w@rel"), op("linear", "h", "x@src", "m"),
                 op("scale", "h", "x@src", by=2)):
        assert applied("aggregate_first", Program("test", inputs, (step, *tail), "out")) == []


def test_weighted_first():
    made, = applied("weighted_first", statements.edge_gat(0.2, 0.0, 2))
    assert made[-3:] == ["from_edges_in = aggregate(alpha, edges, heads=1, per_head=2)",
                         "from_edges = linear(from_edges_in, w_edge, heads=2)  [DST]",
                         "out = add(from_rows, from_edges)  [DST]"]
    assert not any(line.startswith("mapped") for line in made)


def test_weighted_first_wants_features_of_edges():
    assert applied("weighted_first", statements.heat(0.2, 0.0, 2)) == []
    assert applied("weighted_first", statements.rgat(0.2, 0.0, False, True, False, 2)) == []


def test_per_basis_follows_aggregating_first():
    first, = passes.aggregate_first(statements.rgcn(True, True))
    assert applied("per_basis", statements.rgcn(True, True)) == []
    assert applied("per_basis",
                   first) == [["m_in = reduce(x@src, mean=True)",
                               "out = per_basis(m_in, comp, bases)"]]
    assert applied("per_basis", next(passes.aggregate_first(statements.rgcn(True, False)))) == []


def test_table_first():
    assert applied("table_first", statements.rgcn_embedding(False, True)) == [
        ["weight = combine(comp, bases)", "h = lookup(weight@rel, ids@src)",
         "m = reduce(h, mean=False)", "out = collect(m)"]]
    assert applied("table_first", statements.rgcn_embedding(False, False)) == []


def test_prior_into_map():
    assert applied("prior_into_map", statements.hgt(0.5, 2)) == [
        ["value = linear(values@src, w_msg@rel)", "w_att_p = mul(w_att, p)  [RELATION]",
         "key_p = linear(keys@src, w_att_p@rel)", "prior = dot(queries@dst, key_p, heads=2)",
         "s = scale(prior, by=0.5)", "alpha = segment_softmax(s, scope=dst)",
         "out = aggregate(alpha, value, heads=2)"]]


def test_prior_into_the_first_side():
    program = Program("test",
                      (("x", SRC), ("y", DST), ("w", RELATION), ("p", RELATION), ("e", EDGE)), (
        op("linear", "k", "x@src", "w@rel"), op("dot", "d", "k", "y@dst", heads=1),
        op("mul", "s", "d", "p@rel"),
        op("aggregate", "out", "s", "x@src", heads=1)), "out")
    assert applied("prior_into_map", program) == [
        ["w_p = mul(w, p)  [RELATION]", "k_p = linear(x@src, w_p@rel)",
         "s = dot(k_p, y@dst, heads=1)", "out = aggregate(s, x@src, heads=1)"]]


def test_other_side():
    found, = applied("other_side", statements.hgt(0.5, 2))
    assert found[:4] == ["value = linear(values@src, w_msg@rel)",
                         "queries_mapped = linear(queries@dst, w_att@rel, transposed=True)",
                         "d = dot(queries_mapped, keys@src, heads=2)", "prior = mul(d, p@rel)"]


@pytest.mark.parametrize("query, key",
                         [("e", "k"), ("x@src", "k"), ("y@dst", "x@src"), ("y@dst", "g")])
def test_other_side_wants_a_destination_and_a_map_by_relation(query, key):
    program = Program("test", (("x", SRC), ("y", DST), ("e", EDGE), ("w", RELATION), ("m", PARAM)),
                      (
        op("linear", "k", "x@src", "w@rel"), op("linear", "g", "x@src", "m"),
        op("dot", "d", query, key, heads=1),
        op("aggregate", "out", "d", "k", heads=1)), "out")
    assert applied("other_side", program) == []


def test_every_rule_has_its_place():
    assert {rule.__name__ for rule in RULES} == {"fold_chain", "aggregate_first", "weighted_first",
                                                 "per_basis", "table_first", "prior_into_map",
                                                 "other_side"}
    reached = {part for name in STATEMENTS for how, _ in orderings(statement(name))
               for part in how.split(" + ")}
    assert reached == {"as stated", *(rule.__name__ for rule in RULES)}


# ---- what the rules reach ----

@pytest.mark.parametrize("name, expected", [
    ("rgcn sum", ["as stated", "aggregate_first"]),
    ("rgcn mean bases", ["as stated", "aggregate_first", "aggregate_first + per_basis"]),
    ("embedding sum", ["as stated"]),
    ("embedding mean bases", ["as stated", "table_first"]),
    ("rgat", ["as stated", "fold_chain", "fold_chain", "fold_chain + fold_chain"]),
    ("edge_gat", ["as stated", "weighted_first"]),
    ("hgt",
     ["as stated", "prior_into_map", "other_side", "prior_into_map + other_side",
      "other_side + prior_into_map"]),
])
def test_orderings(name, expected):
    found = orderings(statement(name))
    assert [how for how, _ in found] == expected
    assert found[0][1] is statement(name) and orderings(statement(name)) is found
    assert len({program.ops for _, program in found}) == len(found), "no ordering twice"


def test_there_is_an_end():
    """A Program with many places for a rule: not all of their combinations are looked at."""
    width = 12
    ops = [op("linear", f"h{i}", "x@src", f"w{i}@rel") for i in range(width)]
    ops += [op("linear", f"a{i}", f"h{i}", "q") for i in range(width)]
    ops += [op("add", "z", *(f"a{i}" for i in range(width))), op("reduce", "m", "z", mean=False),
            op("collect", "out", "m")]
    inputs = (("x", SRC), ("q", PARAM), *((f"w{i}", RELATION) for i in range(width)))
    found = orderings(Program("wide", inputs, tuple(ops), "out"))
    assert passes._MOST <= len(found) <= passes._MOST + width


def test_dead_operations_go():
    program = Program("test", (("x", SRC), ("w", RELATION)), (
        op("linear", "unused", "x@src", "w@rel"), op("scale", "also", "unused", by=2),
        op("linear", "h", "x@src", "w@rel"),
        op("reduce", "m", "h", mean=False), op("collect", "out", "m")), "out")
    assert [step.out for step in without_dead(program).ops] == ["h", "m", "out"]
    assert without_dead(statement("hgt")).ops == statement("hgt").ops


# ---- the value ----

@pytest.mark.parametrize("name", STATEMENTS)
@SETTINGS
@given(data=st.data())
def test_the_value_stays(name, data):
    torch.manual_seed(1)
    graph = data.draw(graphs(is_square(name)))
    operands, view = tensors(name, graph), graph.view()
    expected = by_edges(name, graph, operands)
    for how, program in orderings(statement(name)):
        assert_same(value(program, view, operands), expected, operands, how)
