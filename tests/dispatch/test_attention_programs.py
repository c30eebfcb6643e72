"""Which Programs are taken for attention, with which constants; and that look-alikes are not."""
from __future__ import annotations

import dataclasses

import pytest

from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.ir.attention_programs import Attention
from gnnaccel.dispatch.ir.program import EDGE, SRC, op

KNOWN = [
    *((programs.gat(0.3, p, same, dst, edge), Attention("additive", 0.3, 1.0, p, edge))
      for p in (0.0, 0.6) for same in (False, True) for dst in (False, True)
      for edge in (False, True)),
    *((programs.gatv2(0.1, p, edge), Attention("gatv2", 0.1, 1.0, p, edge)) for p in (0.0, 0.6)
      for edge in (False, True)),
    *((programs.dot_product(0.5, p, edge), Attention("dot", 0.0, 0.5, p, edge)) for p in (0.0, 1.0)
      for edge in (False, True)),
    *((programs.additive_terms(0.3, p, dst, edge), Attention("terms", 0.3, 1.0, p, edge))
      for p in (0.0, 0.6) for dst in (False, True) for edge in (False, True)),
    (programs.gat(0.3, 0.6, True, True, True, True), Attention("additive", 0.3, 1.0, 0.6, True)),
    (programs.gatv2(0.1, 0.6, True, True), Attention("gatv2", 0.1, 1.0, 0.6, True)),
    (programs.dot_product_shared(0.5, 0.3), Attention("sd", 1.0, 0.5, 0.3, False)),
    (programs.cosine(), Attention("cosine", 0.0, 1.0, 0.0, False)),
    (programs.supergat_mx(0.2, 0.4), Attention("mx", 0.2, 1.0, 0.4, False)),
    (programs.supergat_sd(0.25, 0.2, 0.4), Attention("sd", 0.2, 0.25, 0.4, False)),
]


@pytest.mark.parametrize("program, expected", KNOWN, ids=lambda value: getattr(value, "name", ""))
def test_published_layers_are_recognised(program, expected):
    found = programs.attention(program)
    assert found == expected
    assert found.family == ("additive" if expected.score in ("additive", "terms") else "pairwise")


def changed(program, index: int, kind=None, args=None, out=None, drop=False, insert=()):
    """``program`` with one operation replaced, dropped, or others put in front of it."""
    ops = list(program.ops)
    old = ops[index]
    new = ([]
           if drop
           else [dataclasses.replace(old, kind=kind or old.kind, args=tuple(args or old.args),
                                     out=out or old.out)])
    ops[index:index + 1] = [*insert, *new]
    return dataclasses.replace(program, ops=tuple(ops))


GAT = programs.gat(0.2, 0.0, False, True, True)
DOT = programs.dot_product(0.5, 0.6, True)
TERMS = programs.additive_terms(0.2, 0.0, True, True)


@pytest.mark.parametrize("program", [
    changed(GAT, -1, args=("s", "x@src")),  # no softmax in the sum
    changed(GAT, -1, args=("alpha", "x_dst@dst")),  # sums its own row
    changed(GAT, 0, args=("x", "att_dst")),  # the vectors exchanged
    changed(GAT, 2, args=("a_src@src", "a_dst@dst")),  # edges given, not used
    changed(GAT, 2, args=("a_src@src", "a_edge", "a_edge")),
    changed(GAT, 3, args=("a_edge",)),  # leaky_relu of something else
    changed(GAT, 4, args=("z",)),  # softmax before leaky_relu
    changed(DOT, 2, args=("queries@dst", "value")),  # the key is not what is scored
    changed(DOT, -1, args=("kept", "key")),  # sums keys
    changed(DOT, -1, args=("alpha", "value")),  # dropout drawn, not used
    changed(programs.cosine(), 0, args=("keys@src", "keys@src")),
    changed(programs.supergat_mx(0.2, 0.0), 2, args=("c_src@src", "c_src@src")),
    changed(programs.supergat_mx(0.2, 0.0), 3, args=("a", "d")),  # no sigmoid
    changed(programs.gatv2(0.2, 0.0, False), 0, args=("keys@src", "keys@src")),
    changed(programs.gatv2(0.2, 0.0, True), -1, args=("alpha", "z")),
    changed(programs.gatv2(0.2, 0.0, True, True), -1, args=("sum", "att")),
    changed(programs.gatv2(0.2, 0.0, True, True), -1, args=("bias", "sum")),
    changed(programs.gatv2(0.2, 0.0, True, True), -1, args=("sum", "bias", "bias")),
    changed(TERMS, 0, args=("a_src@src", "a_edge")),  # a term given, not used
    changed(TERMS, 0, args=("a_src@src", "a_dst@dst", "a_edge", "a_edge")),
    changed(TERMS, 0, args=("a_src@src", "a_dst@src", "a_edge")),  # the destination's term of the source
    changed(TERMS, 0, args=("a_src@dst", "a_dst@dst", "a_edge")),
    changed(TERMS, 2, args=("z",)),  # softmax before leaky_relu
    changed(TERMS, -1, args=("alpha", "x@dst")),  # sums its own row
    changed(TERMS, -1, args=("s", "x@src")),
], ids=range(25))
def test_the_same_operations_wired_otherwise_are_not(program):
    assert programs.attention(program) is None


@pytest.mark.parametrize("program", [
    changed(GAT, 4, insert=[op("scale", "t", "s", by=2.0)]),
    changed(GAT, 4, insert=[op("segment_softmax", "s", "s")]),
    changed(GAT, 3, kind="sigmoid"),
    changed(GAT, 2, kind="mul", args=("a_src@src", "a_dst@dst")),
    changed(GAT, 5, insert=[op("scale", "alpha", "alpha", by=0.5)]),
    changed(DOT, 3, drop=True, insert=[op("leaky_relu", "s", "d", slope=0.1)]),
    changed(DOT, 6, insert=[op("dropout", "kept", "kept", p=0.1)]),
    dataclasses.replace(GAT, inputs=(*GAT.inputs, ("extra", SRC))),
    dataclasses.replace(programs.supergat_mx(0.2, 0.0),
                        inputs=(*programs.supergat_mx(0.2, 0.0).inputs, ("edges", EDGE))),
    changed(TERMS, 0, kind="mul"),
    changed(TERMS, 2, insert=[op("scale", "s", "s", by=2.0)]),
    dataclasses.replace(TERMS, inputs=(*TERMS.inputs, ("bias", SRC))),
], ids=range(12))
def test_other_operations_and_inputs_are_not(program):
    assert programs.attention(program) is None


def test_names_of_intermediate_values_do_not_matter():
    renamed = {"alpha": "weights", "z": "u", "s": "t", "a_src": "p", "a_dst": "q", "out": "h"}

    def rename(name):
        value, at, end = name.partition("@")
        return renamed.get(value, value) + at + end

    ops = tuple(dataclasses.replace(o, out=rename(o.out), args=tuple(map(rename, o.args)))
                for o in GAT.ops)
    other = dataclasses.replace(GAT, name="mine", ops=ops, output="h")
    assert programs.attention(other) == programs.attention(GAT) is not None
