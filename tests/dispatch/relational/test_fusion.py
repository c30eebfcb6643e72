"""Fusion: which chains become one traversal, what stays as it is, and that the value stays."""
from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.ir.program import (DST, EDGE, PAIR_DST, PAIR_SRC, PARAM, RELATION, SRC,
                                          Program, op)
from gnnaccel.dispatch.relational import statements, torch_maps
from gnnaccel.dispatch.relational.execute import run
from gnnaccel.dispatch.relational.passes import compact, fuse, orderings
from gnnaccel.dispatch.run import torch_backend
from tests.relational_cases import (SETTINGS, STATEMENTS, assert_same, by_edges, graphs, is_square,
                                    statement, tensors, typed, value)


def lines(program: Program) -> list[str]:
    return [line.strip() for line in str(fuse(compact(program))).splitlines()[1:-1]]


def ordering(name: str, how: str) -> Program:
    return next(program for found, program in orderings(statement(name)) if found == how)


# ---- what becomes of each layer ----

@pytest.mark.parametrize("name, how, expected", [
    ("rgcn mean", "as stated",
     ["h = linear(x@src, weight@rel)  [PAIR_SRC]", "out = mean_sum(h@pair_src, mean=True)"]),
    ("rgcn sum", "as stated",
     ["h = linear(x@src, weight@rel)  [PAIR_SRC]", "out = mean_sum(h@pair_src, mean=False)"]),
    ("rgcn sum weighted", "as stated", ["h = linear(x@src, weight@rel)  [PAIR_SRC]",
                                        "out = mean_sum(h@pair_src, norm, mean=False)"]),
    ("rgcn mean bases weighted", "aggregate_first + per_basis",
     ["m_in = reduce(x@src, norm, mean=True)",
      "out = per_basis(m_in, comp, bases)"]),
    ("rgcn mean", "aggregate_first",
     ["m_in = reduce(x@src, mean=True)", "m = linear(m_in, weight@rel)  [PAIR_DST]",
      "out = collect(m)"]),
    ("rgcn mean bases", "aggregate_first + per_basis",
     ["m_in = reduce(x@src, mean=True)", "out = per_basis(m_in, comp, bases)"]),
    ("embedding mean", "as stated",
     ["h = lookup(weight@rel, ids@src)  [PAIR_SRC]", "out = mean_sum(h@pair_src, mean=True)"]),
    ("rgat", "fold_chain + fold_chain", [
        "h = linear(x@src, weight@rel)  [PAIR_SRC]", "weight_q = fold(weight, q)",
        "a_dst = linear(x@dst, weight_q@rel)  [PAIR_DST]",
        "weight_k = fold(weight, k)", "a_src = linear(x@src, weight_k@rel)  [PAIR_SRC]",
        "z_edge = add(a_dst@pair_dst)  [EDGE]",
        "out = attend(h, a_src, z_edge, attention=additive_terms, heads=2, "
        "names=('x', 'a_src', 'a_edge'), source=PAIR_SRC,"
        " target=DST)  [DST]"]),
    ("hgt", "prior_into_map", [
        "value = linear(values@src, w_msg@rel)  [PAIR_SRC]", "w_att_p = mul(w_att, p)  [RELATION]",
        "key_p = linear(keys@src, w_att_p@rel)  [PAIR_SRC]",
        "out = attend(key_p, value, queries, attention=dot_product, heads=2, "
        "names=('keys', 'values', 'queries'),"
        " source=PAIR_SRC, target=DST)  [DST]"]),
], ids=lambda v: v if isinstance(v, str) else "")
def test_the_layers(name, how, expected):
    assert lines(ordering(name, how)) == expected


def test_softmax_within_a_relation_is_by_pairs_and_collected():
    made = fuse(compact(statements.rgat(0.2, 0.3, False, True, True, 2)))
    attend, collect = made.ops[-2:]
    assert str(attend).startswith(
        "out_pairs = attend(h, a_src, a_dst, a_edge, attention=additive_terms, heads=2, ")
    assert (attend.attr("source"), attend.attr("target"),
            attend.domain) == (PAIR_SRC, PAIR_DST, PAIR_DST)
    assert str(collect) == "out = collect(out_pairs)"
    found = programs.attention(attend.attr("attention"))
    assert (found.score, found.slope, found.dropout, found.edge) == ("terms", 0.2, 0.3, True)


def test_several_terms_of_the_edges_become_one():
    made = fuse(compact(statements.rgat(0.2, 0.0, False, True, False, 2)))
    assert "z_edge = add(a_dst@pair_dst, a_edge)  [EDGE]" in map(str, made.ops)
    assert made.ops[-1].attr("names") == ("x", "a_src", "a_edge")


def test_every_fused_attention_is_one_that_the_kernels_know():
    for name in [n for n in STATEMENTS if n.startswith(("rgat", "hgt")) and "product" not in n
                 and "raised" not in n]:
        ops = [step for _, program in orderings(statement(name))
               for step in fuse(compact(program)).ops]
        fused = [step for step in ops if step.kind == "attend"]
        assert fused and all(programs.attention(step.attr("attention")) is not None
                             for step in fused), name


# ---- what stays ----

X = (("x", SRC), ("y", DST), ("e", EDGE), ("w", RELATION), ("m", PARAM))


def unchanged(*ops) -> None:
    program = compact(Program("test", X, ops, "out"))
    assert fuse(program).ops == program.ops


def test_reductions_that_stay():
    head = op("linear", "h", "x@src", "w@rel")
    # a map in between
    unchanged(head, op("reduce", "m", "h", mean=True), op("linear", "g", "m", "m"),
              op("collect", "out", "g"))
    unchanged(head, op("reduce", "m", "h", mean=True), op("collect", "c", "m"),
              op("collect", "d", "m"), op("add", "out", "c", "d"))


@pytest.mark.parametrize("change", [
    dict(at=0, step=op("add", "d", "y@dst", "x@src")),  # no inner product
    dict(at=0, step=op("dot", "d", "x@src", "y@dst", heads=1)),  # the other way round
    dict(at=0, step=op("dot", "d", "e", "x@src", heads=1)),  # a query per edge
    dict(at=1, step=op("leaky_relu", "s", "d", slope=0.1)),
    dict(at=3, step=op("aggregate", "out", "a", "e", heads=1)),  # values of the edges
    dict(at=3, step=op("aggregate", "out", "s", "x@src", heads=1)),  # no softmax
    dict(at=2, step=op("segment_softmax", "a", "s", scope="pair_dst")),  # a query by node, a softmax by pair
], ids=range(7))
def test_attention_that_stays(change):
    ops = [op("dot", "d", "y@dst", "x@src", heads=1), op("scale", "s", "d", by=2.0),
           op("segment_softmax", "a", "s", scope="dst"),
           op("aggregate", "out", "a", "x@src", heads=1)]
    assert fuse(Program("test", X, tuple(ops), "out")).ops[-1].kind == "attend"
    ops[change["at"]] = change["step"]
    unchanged(*ops)


@pytest.mark.parametrize("name", ["d", "s", "a"])
def test_attention_stays_where_something_else_reads_its_scores(name):
    unchanged(op("dot", "d", "y@dst", "x@src", heads=1), op("scale", "s", "d", by=2.0),
              op("segment_softmax", "a", "s", scope="dst"),
              op("aggregate", "sum", "a", "x@src", heads=1),
              op("mean_sum", "seen", name, mean=False), op("add", "out", "sum", "seen"))


def test_what_comes_after_the_attention_stays_after_it():
    ops = [op("dot", "d", "y@dst", "x@src", heads=1), op("scale", "s", "d", by=2.0),
           op("segment_softmax", "a", "s", scope="dst"),
           op("aggregate", "sum", "a", "x@src", heads=1), op("scale", "out", "sum", by=3.0)]
    made = fuse(Program("test", X, tuple(ops), "out"))
    assert [step.kind for step in made.ops] == ["attend", "scale"] and made.ops[1] == ops[-1]


# ---- the value ----

@pytest.mark.parametrize("name", STATEMENTS)
@SETTINGS
@given(data=st.data())
def test_the_value_stays(name, data):
    torch.manual_seed(2)
    graph = data.draw(graphs(is_square(name)))
    operands = tensors(name, graph)
    expected = by_edges(name, graph, operands)
    view = graph.view(compact=data.draw(st.booleans()))
    for how, program in orderings(statement(name)):
        assert_same(value(fuse(compact(program)), view, operands), expected, operands, how)


@pytest.mark.parametrize("name", STATEMENTS)
def test_five_thousand_relations_of_which_most_are_empty(name):
    torch.manual_seed(3)
    graph = typed(edges=80, num_relations=5000)
    used = graph.relation.unique()
    assert len(used) <= 80
    operands = tensors(name, graph)
    expected = by_edges(name, graph, operands)
    for how, program in orderings(statement(name)):
        assert_same(value(fuse(compact(program)), graph.view(), operands), expected, operands, how)


@pytest.mark.parametrize("within", [False, True])
def test_dropout_goes_with_the_attention(within, monkeypatch):
    """The fused Program drops what the plain one drops when both draw the same mask."""
    graph = typed(edges=90)
    torch.manual_seed(4)
    operands = tensors("rgat", graph)
    stated = statements.rgat(0.2, 0.5, False, False, within, 2)
    calls = []

    def keep_half(call, given):
        calls.append(call.attention.dropout)
        edges = call.graph.edges()
        eid = torch.arange(90) if edges.eid is None else edges.eid
        return torch_backend.run(call.program, edges, given, mask.index_select(0, eid))

    mask = (torch.rand(90, 2) < 0.5).double() / 0.5
    monkeypatch.setattr("gnnaccel.dispatch.relational.execute.F.dropout", lambda alpha,
                        p: alpha * mask)
    expected = value(compact(stated), graph.view(), operands)
    got = run(fuse(compact(stated)), graph.view(), operands, torch_maps, keep_half)
    assert calls == [0.5]
    assert_same(got, expected, operands)
    without = value(compact(statements.rgat(0.2, 0.0, False, False, within, 2)), graph.view(),
                    operands)
    assert (expected - without).abs().max() > 1e-3
