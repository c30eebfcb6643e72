"""Recognising a Program as one that a fused attention kernel computes."""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.ir.program import Op, Program

#: the operations between the inputs and the softmax, without optional ones -> the kernels' kind of
#: score
_SHAPES = {
    ("head_dot", "add", "leaky_relu"): "additive",
    ("add", "leaky_relu"): "terms",
    ("add", "leaky_relu", "head_dot"): "gatv2",
    ("add", "leaky_relu", "pick", "head_dot"): "gatv2",
    ("dot", "scale"): "dot",
    ("dot", "mul"): "cosine",
    ("dot", "sigmoid", "add", "mul", "leaky_relu"): "mx",
    ("dot", "scale", "leaky_relu"): "sd",
}
_INPUTS = {
    "additive": {"x", "x_dst", "att_src", "att_dst", "a_edge", "bias"},
    "terms": {"x", "a_src", "a_dst", "a_edge"},
    "gatv2": {"keys", "queries", "att", "edges", "bias", "of_src", "of_dst"},
    "dot": {"keys", "values", "queries", "edges"},
    "cosine": {"keys", "queries", "c_src"},
    "mx": {"keys", "queries", "c_src", "c_dst"},
    "sd": {"keys", "queries"},
}


@dataclass(frozen=True)
class Attention:
    """A Program seen as attention: the kind of score and its constants. ``vectors``: rows have
    attention vectors of their own."""

    score: str
    slope: float
    scale: float
    dropout: float
    edge: bool
    vectors: bool = False

    @functools.cached_property
    def places(self) -> bool:
        """Whether kernels look up edge ids or CSC places: for edge features, and in backward for
        dropout."""
        return self.edge or self.dropout > 0

    @property
    def family(self) -> str:
        return "additive" if self.score in ("additive", "terms") else "pairwise"


@functools.lru_cache(maxsize=512)
def attention(program: Program) -> Attention | None:
    """``program`` as an attention, None when no fused kernel computes it."""
    kinds = [op.kind for op in program.ops]
    if program.has_input("bias"):  # an epilogue of the kernels
        if program.ops[-1].kind != "add" or program.ops[-1].args[1:] != ("bias",):
            return None
        kinds.pop()
    if kinds.count("segment_softmax") != 1 or kinds[-1] != "aggregate":
        return None
    cut = kinds.index("segment_softmax")
    edge = program.has_input("a_edge") or program.has_input("edges")
    score = _SHAPES.get(_shape(program.ops[:cut]))
    if score is None or not {name for name, _ in program.inputs} <= _INPUTS[score]:
        return None
    if kinds[cut + 1:-1] not in ([], ["dropout"]):
        return None
    constants = {name: value for op in program.ops for name, value in op.attrs}
    if _wiring(program) != _wiring(_published(program, score, edge, constants)):
        return None
    if score == "dot" and not program.has_input("values"):
        # values are the keys: SuperGAT's kernel with an identity for leaky_relu
        score, constants["slope"] = "sd", 1.0
    return Attention(score, float(constants.get("slope", 0.0)), float(constants.get("by", 1.0)),
                     float(constants.get("p", 0.0)), edge, program.has_input("of_dst"))


def _published(program: Program, score: str, edge: bool, found: dict[str, Any]) -> Program:
    """The layer that consists of these operations, with the constants found in ``program``."""
    slope, by, p = (found.get(name, 0.0) for name in ("slope", "by", "p"))
    if score == "additive":
        return programs.gat(slope, p, not program.has_input("x_dst"), program.has_input("att_dst"),
                            edge, program.has_input("bias"))
    if score == "terms":
        return programs.additive_terms(slope, p, program.has_input("a_dst"),
                                       program.has_input("a_edge"))
    if score == "gatv2" and program.has_input("of_dst"):
        return programs.gatv2_vectors(slope, p)
    if score == "gatv2":
        return programs.gatv2(slope, p, edge, program.has_input("bias"))
    if score == "dot":
        return (programs.dot_product(by, p, edge)
                if program.has_input("values") else programs.dot_product_shared(by, p))
    if score == "cosine":
        return programs.cosine()
    return programs.supergat_mx(slope, p) if score == "mx" else programs.supergat_sd(by, slope, p)


def _wiring(program: Program) -> tuple:
    """Inputs and operations with intermediate values called by their place: their names do not
    count."""
    place = {name: name for name, _ in program.inputs}
    ops = []
    for i, op in enumerate(program.ops):
        args = tuple((place[name], end) for name, _, end in (arg.partition("@") for arg in op.args))
        ops.append((op.kind, args, op.attrs))
        place[op.out] = f"value {i}"
    return frozenset(program.inputs), tuple(ops), place[program.output]


def _shape(ops: tuple[Op, ...]) -> tuple[str, ...]:
    """Kinds in order, without repeats of head_dot and without sums that only bring in edge rows
    under a dot product."""
    kinds: list[str] = []
    dotted = any(op.kind == "dot" for op in ops)
    for op in ops:
        if op.kind == "head_dot" and kinds and kinds[-1] == "head_dot":
            continue
        if dotted and op.kind == "add" and "edges" in op.args:
            continue
        kinds.append(op.kind)
    return tuple(kinds)
