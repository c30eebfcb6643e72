"""Programs: what they refuse, where values live, how they print."""
from __future__ import annotations

import pytest

from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.ir.program import (DST, EDGE, ENDS, OPERATIONS, PAIR_DST, PAIR_SRC, PARAM,
                                          READS, RELATION, SRC, Op, Program, op)
from gnnaccel.dispatch.relational import execute
from gnnaccel.dispatch.run import torch_backend

INPUTS = (("x", SRC), ("y", DST), ("e", EDGE), ("w", PARAM))
AGGREGATE = op("aggregate", "out", "a", "x@src")


def program(*ops: Op, output="out") -> Program:
    return Program("test", INPUTS, ops, output)


def test_a_complete_program():
    made = program(op("head_dot", "a", "x@src", "w"), AGGREGATE)
    assert made.has_input("x") and not made.has_input("a")
    assert str(made).splitlines() == ["test(x: SRC, y: DST, e: EDGE, w: PARAM)",
                                      "  a = head_dot(x@src, w)", "  out = aggregate(a, x@src)",
                                      "  return out"]


@pytest.mark.parametrize("ops, message", [
    ((op("convolve", "a", "x"),), "unknown operation 'convolve'"),
    ((op("head_dot", "a", "x@src", "v"),), "reads 'v', which nothing before it makes"),
    ((AGGREGATE, op("head_dot", "a", "x@src", "w")), "reads 'a', which nothing before it makes"),
    ((op("head_dot", "a", "e@src", "w"),), "reads an end of 'e', which lives in EDGE"),
    ((op("head_dot", "a", "x", "w@dst"),), "reads an end of 'w', which lives in PARAM"),
    ((op("head_dot", "a", "x", "w"),), "output 'out' does not live in DST"),
    ((op("head_dot", "out", "x", "w"),), "output 'out' does not live in DST"),
    ((op("head_dot", "out", "x@dst", "w"),), "output 'out' does not live in DST"),
    ((), "output 'out' does not live in DST"),
])
def test_wrong_programs_are_refused(ops, message):
    with pytest.raises(ValueError, match=message):
        program(*ops)


@pytest.mark.parametrize("args, at_src, at_dst",
                         [(("x",), True, False), (("y",), False, True), (("x", "w"), True, False)])
def test_node_values_stay_in_their_domain(args, at_src, at_dst):
    # a value is read at an end only where it lives on nodes; on edges and parameters that is an
    # error
    made = op("mul", "a", *args)
    for end in ("src", "dst"):
        program(made, op("aggregate", "out", f"a@{end}", "x@src"))
    edge = op("mul", "a", *(f"{args[0]}@src",))
    with pytest.raises(ValueError, match="lives in EDGE"):
        program(edge, op("aggregate", "out", "a@src", "x@src"))


def test_programs_are_memo_keys():
    a = programs.gat(0.2, 0.5, True, True, False)
    assert a is programs.gat(0.2, 0.5, True, True, False)
    others = [programs.gat(0.3, 0.5, True, True, False), programs.gat(0.2, 0.4, True, True, False),
              programs.gat(0.2, 0.5, False, True, False),
              programs.gat(0.2, 0.5, True, False, False), programs.gat(0.2, 0.5, True, True, True)]
    assert len({a, *others}) == 6 and len({str(p) for p in (a, *others)}) == 6
    with pytest.raises(AttributeError):
        a.name = "other"


def test_attributes_do_not_depend_on_their_order():
    assert op("scale", "a", "x", by=2, other=3) == op("scale", "a", "x", other=3, by=2)
    assert op("scale", "a", "x", by=2).attr("by") == 2
    with pytest.raises(KeyError):
        op("scale", "a", "x", by=2).attr("slope")


def test_every_operation_is_interpreted():
    nodes, relations = set(torch_backend._OPERATIONS), set(execute.OPERATIONS)
    assert nodes | relations == set(OPERATIONS)


# ---- relations ----

TYPED = (("x", SRC), ("y", DST), ("e", EDGE), ("w", RELATION), ("m", PARAM), ("ps", PAIR_SRC),
         ("pd", PAIR_DST))
COLLECT = op("collect", "out", "pd")


def typed(*ops: Op) -> Program:
    return Program("typed", TYPED, ops, "out")


@pytest.mark.parametrize("arg",
                         [f"{name}@{end}" for end, domains in ENDS.items() for name, domain in TYPED
                          if domain in domains])
def test_what_is_read_on_edges(arg):
    made = typed(op("scale", "a", arg, by=2.0), COLLECT)
    assert made.domains["a"] == EDGE


@pytest.mark.parametrize("arg, domain",
                         [(f"{name}@{end}", domain) for end, domains in ENDS.items()
                          for name, domain in TYPED
                          if domain not in domains])
def test_an_end_that_the_value_does_not_have(arg, domain):
    with pytest.raises(ValueError,
                       match=f"'{arg}' reads an end of '{arg.partition('@')[0]}', which lives in "
                       f"{domain}$"):
        typed(op("scale", "a", arg, by=2.0), COLLECT)


def test_ends():
    assert ENDS == {"src": (SRC, DST), "dst": (SRC, DST), "rel": (RELATION,),
                    "pair_src": (PAIR_SRC,), "pair_dst": (PAIR_DST,)}
    assert READS == {EDGE: tuple(ENDS), PAIR_SRC: ("src", "rel"), PAIR_DST: ("dst", "rel")}
    with pytest.raises(ValueError, match="reads an end of 'x'"):
        typed(op("scale", "a", "x@nowhere", by=2.0), COLLECT)


@pytest.mark.parametrize("home, args",
                         [(PAIR_SRC, ("x@src", "w@rel", "ps")),
                          (PAIR_DST, ("y@dst", "x@dst", "w@rel", "pd")), (SRC, ("x", "m")),
                          (RELATION, ("w", "m")), (EDGE, ("x@src", "pd@pair_dst", "e"))])
def test_an_explicit_domain(home, args):
    made = typed(Op("add", "a", args, domain=home), COLLECT)
    assert made.domains["a"] == home
    assert str(made).splitlines()[1] == f"  a = add({', '.join(args)})  [{home}]"


@pytest.mark.parametrize("home, arg",
                         [(PAIR_SRC, "y@dst"), (PAIR_SRC, "pd@pair_dst"), (PAIR_SRC, "ps@pair_src"),
                          (PAIR_DST, "x@src"),
                          (PAIR_DST, "ps@pair_src"), (SRC, "x@src"), (DST, "w@rel"),
                          (RELATION, "w@rel"), (PARAM, "x@src")])
def test_what_an_explicit_domain_cannot_read(home, arg):
    with pytest.raises(ValueError, match=f"lives in {home}, where '{arg}' cannot be read"):
        typed(Op("scale", "a", (arg,), (("by", 2.0),), home), COLLECT)


def test_an_explicit_domain_counts_for_what_comes_after():
    body = Op("scale", "a", ("x@src",), (("by", 2.0),), PAIR_SRC)
    assert typed(body, op("scale", "b", "a@pair_src", by=2.0), COLLECT).domains["b"] == EDGE
    assert typed(body, op("scale", "b", "a", by=2.0), COLLECT).domains["b"] == PAIR_SRC
    with pytest.raises(ValueError, match="'a@src' reads an end of 'a', which lives in PAIR_SRC"):
        typed(body, op("scale", "b", "a@src", by=2.0), COLLECT)


@pytest.mark.parametrize("step, home", [
    (op("reduce", "a", "x@src", mean=True), PAIR_DST),
    (op("reduce", "a", "e", mean=True), PAIR_DST),
    (op("collect", "a", "pd"), DST),
    (op("mean_sum", "a", "ps@pair_src", mean=True), DST),
    (op("per_basis", "a", "pd", "w", "m"), DST),
    (op("fold", "a", "w", "m"), RELATION),
    (op("combine", "a", "w", "m"), RELATION), (op("aggregate", "a", "e", "ps@pair_src"), DST),
    (op("linear", "a", "ps", "m"), PAIR_SRC),
    (op("linear", "a", "pd", "m"), PAIR_DST), (op("linear", "a", "x@src", "w@rel"), EDGE),
    (op("add", "a", "x", "y"), PARAM),
])
def test_where_results_live(step, home):
    assert typed(step, COLLECT).domains["a"] == home


def test_the_domain_is_part_of_an_operation():
    plain, moved = op("scale", "a", "x", by=2.0), Op("scale", "a", ("x",), (("by", 2.0),), SRC)
    assert plain != moved and plain.domain is None
    assert plain.get("by") == 2.0 and plain.get("slope", 7) == 7 and plain.get("slope") is None
    inner = programs.cosine()
    assert str(Op("attend", "a", ("x",), (("attention", inner),),
                  DST)) == "a = attend(x, attention=cosine)  [DST]"


def test_programs_compare_by_identity():
    a, b = typed(COLLECT), typed(COLLECT)
    assert a == a and a != b and a.ops == b.ops and len({a, b}) == 2
