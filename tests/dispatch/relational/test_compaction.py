"""Compaction: where each value is made afterwards, and that the values stay."""
from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnaccel.dispatch.ir.program import (DST, EDGE, PAIR_DST, PAIR_SRC, PARAM, RELATION, SRC, Op,
                                          Program, op)
from gnnaccel.dispatch.relational import statements, torch_maps
from gnnaccel.dispatch.relational.execute import run
from gnnaccel.dispatch.relational.passes import compact, orderings
from tests.relational_cases import (SETTINGS, STATEMENTS, assert_same, by_edges, graphs, is_square,
                                    statement, tensors, typed, value)

INPUTS = (("x", SRC), ("y", DST), ("e", EDGE), ("r", RELATION), ("w", RELATION), ("m", PARAM),
          ("ids", SRC))


def text(*ops) -> list[str]:
    """The operations after compaction; the Program is completed by a sum."""
    tail = op("aggregate", "out", "e", ops[-1].out, heads=1)
    return str(compact(Program("test", INPUTS, (*ops, tail), "out"))).splitlines()[1:-1]


@pytest.mark.parametrize("step, home, becomes, read", [
    (op("linear", "h", "x@src", "w@rel"), PAIR_SRC, "linear(x@src, w@rel)", "h@pair_src"),
    (op("linear", "h", "y@dst", "w@rel"), PAIR_DST, "linear(y@dst, w@rel)", "h@pair_dst"),
    (op("linear", "h", "x@dst", "w@rel"), PAIR_DST, "linear(x@dst, w@rel)", "h@pair_dst"),
    (op("linear", "h", "x@src", "m"), SRC, "linear(x, m)", "h@src"),
    (op("linear", "h", "y@dst", "m"), DST, "linear(y, m)", "h@dst"),
    (op("scale", "h", "r@rel", by=2.0), RELATION, "scale(r, by=2.0)", "h@rel"),
    (op("lookup", "h", "w@rel", "ids@src"), PAIR_SRC, "lookup(w@rel, ids@src)", "h@pair_src"),
    (op("mix", "h", "r@rel", "m", "ids@src"), PAIR_SRC, "mix(r@rel, m, ids@src)", "h@pair_src"),
    (op("sigmoid", "h", "x@src"), SRC, "sigmoid(x)", "h@src"),
])
def test_a_value_moves_to_what_determines_it(step, home, becomes, read):
    assert text(step) == [f"  h = {becomes}  [{home}]", f"  out = aggregate(e, {read}, heads=1)"]


@pytest.mark.parametrize("step", [op("add", "h", "x@src", "y@dst"), op("mul", "h", "e", "r@rel"),
                                  op("dot", "h", "y@dst", "x@src", heads=1),
                                  op("leaky_relu", "h", "e", slope=0.1),
                                  op("dropout", "h", "x@src", p=0.5)], ids=str)
def test_a_value_of_the_whole_edge_stays(step):
    assert text(step) == [f"  {step}", "  out = aggregate(e, h, heads=1)"]


def test_chains_move_as_far_as_they_can():
    assert text(op("linear", "h", "x@src", "w@rel"), op("linear", "a", "h", "m"),
                op("linear", "b", "y@dst", "w@rel"), op("add", "z", "a", "b", "e"),
                op("scale", "s", "z", by=2)) == [
        "  h = linear(x@src, w@rel)  [PAIR_SRC]", "  a = linear(h, m)  [PAIR_SRC]",
        "  b = linear(y@dst, w@rel)  [PAIR_DST]",
        "  z = add(a@pair_src, b@pair_dst, e)", "  s = scale(z, by=2)",
        "  out = aggregate(e, s, heads=1)"]


def test_a_node_value_is_read_at_its_end_by_a_pair():
    assert text(op("linear", "h", "x@src", "m"), op("linear", "g", "h", "w@rel")) == [
        "  h = linear(x, m)  [SRC]", "  g = linear(h@src, w@rel)  [PAIR_SRC]",
        "  out = aggregate(e, g@pair_src, heads=1)"]


@pytest.mark.parametrize("home, end, arg",
                         [(PAIR_SRC, "pair_src", "x@src"), (PAIR_DST, "pair_dst", "y@dst")])
def test_a_value_of_a_pair_keeps_what_comes_after_with_it(home, end, arg):
    first = Op("linear", "h", (arg, "w@rel"), domain=home)
    assert text(first, op("scale", "s", f"h@{end}", by=2)) == [
        f"  {first}", f"  s = scale(h, by=2)  [{home}]", f"  out = aggregate(e, s@{end}, heads=1)"]


def test_the_layers():
    assert str(compact(statements.rgat(0.2, 0.1, True, True, True, 2))).splitlines()[1:] == [
        "  weight = combine(comp, bases)", "  h_dst = linear(x@dst, weight@rel)  [PAIR_DST]",
        "  h = linear(x@src, weight@rel)  [PAIR_SRC]",
        "  a_dst = linear(h_dst, q)  [PAIR_DST]", "  a_src = linear(h, k)  [PAIR_SRC]",
        "  z = add(a_src@pair_src, a_dst@pair_dst, a_edge)",
        "  s = leaky_relu(z, slope=0.2)", "  alpha = segment_softmax(s, scope=pair_dst)",
        "  kept = dropout(alpha, p=0.1)",
        "  out = aggregate(kept, h@pair_src, heads=2)", "  return out"]
    found = compact(statements.hgt(0.5, 2)).domains
    assert (found["key"], found["value"], found["d"],
            found["out"]) == (PAIR_SRC, PAIR_SRC, EDGE, DST)


def test_compacting_again_changes_nothing():
    for name in STATEMENTS:
        for _, program in orderings(statement(name)):
            once = compact(program)
            assert compact(once).ops == once.ops and once.inputs == program.inputs


@pytest.mark.parametrize("name", STATEMENTS)
@SETTINGS
@given(data=st.data())
def test_the_value_stays(name, data):
    torch.manual_seed(0)
    graph = data.draw(graphs(is_square(name)))
    operands = tensors(name, graph)
    expected = by_edges(name, graph, operands)
    view, loose = graph.view(), graph.view(compact=False)
    for how, program in orderings(statement(name)):
        assert_same(value(compact(program), view, operands), expected, operands, how)
        assert_same(value(compact(program), loose, operands), expected, operands,
                    f"{how}, a pair per edge")


class Watching:
    """`torch_maps` that note how many rows they multiply."""

    def __init__(self):
        self.rows = []

    def __getattr__(self, name):
        return getattr(torch_maps, name)

    def multiply(self, pairs, *args):
        out = torch_maps.multiply(pairs, *args)
        self.rows.append(out.shape[0])
        return out


@pytest.mark.parametrize("compaction, rows", [(True, 8), (False, 200)])
def test_a_map_is_made_once_per_pair(compaction, rows):
    """4 sources with 2 relations that have edges; without compaction each of 200 edges."""
    graph, maps = typed(edges=200, num_src=4, num_relations=3), Watching()
    run(compact(statement("rgcn sum")), graph.view(compact=compaction), tensors("rgcn sum", graph),
        maps, None)
    assert maps.rows == [rows]
