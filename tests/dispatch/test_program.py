"""Programs: what they refuse, where values live, how they print."""
from __future__ import annotations

import pytest

from gnnaccel.dispatch import attention_programs as programs
from gnnaccel.dispatch.program import DST, EDGE, OPERATIONS, PARAM, SRC, Op, Program, op
from gnnaccel.dispatch.torch_backend import _OPERATIONS

INPUTS = (("x", SRC), ("y", DST), ("e", EDGE), ("w", PARAM))
AGGREGATE = op("aggregate", "out", "a", "x@src")


def program(*ops: Op, output="out") -> Program:
    return Program("test", INPUTS, ops, output)


def test_a_complete_program():
    made = program(op("head_dot", "a", "x@src", "w"), AGGREGATE)
    assert made.has_input("x") and not made.has_input("a")
    assert str(made).splitlines() == ["test(x: SRC, y: DST, e: EDGE, w: PARAM)", "  a = head_dot(x@src, w)",
                                      "  out = aggregate(a, x@src)", "  return out"]


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


@pytest.mark.parametrize("args, at_src, at_dst", [(("x",), True, False), (("y",), False, True), (("x", "w"), True, False)])
def test_node_values_stay_in_their_domain(args, at_src, at_dst):
    # a value is read at an end only where it lives on nodes; on edges and parameters that is an error
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
              programs.gat(0.2, 0.5, False, True, False), programs.gat(0.2, 0.5, True, False, False),
              programs.gat(0.2, 0.5, True, True, True)]
    assert len({a, *others}) == 6 and len({str(p) for p in (a, *others)}) == 6
    with pytest.raises(AttributeError):
        a.name = "other"


def test_attributes_do_not_depend_on_their_order():
    assert op("scale", "a", "x", by=2, other=3) == op("scale", "a", "x", other=3, by=2)
    assert op("scale", "a", "x", by=2).attr("by") == 2
    with pytest.raises(KeyError):
        op("scale", "a", "x", by=2).attr("slope")


def test_every_operation_is_interpreted():
    assert set(_OPERATIONS) == set(OPERATIONS)
