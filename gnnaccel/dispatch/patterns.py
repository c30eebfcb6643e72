"""Recognising a Program as one that a fused attention kernel computes."""
from __future__ import annotations

import functools
from dataclasses import dataclass

from gnnaccel.dispatch.program import Op, Program

#: the operations between the inputs and the softmax, without what is optional, -> the kernels' kind of score
_SHAPES = {
    ("head_dot", "add", "leaky_relu"): "additive",
    ("add", "leaky_relu", "head_dot"): "gatv2",
    ("dot", "scale"): "dot",
    ("dot", "mul"): "cosine",
    ("dot", "sigmoid", "add", "mul", "leaky_relu"): "mx",
    ("dot", "scale", "leaky_relu"): "sd",
}
_INPUTS = {
    "additive": {"x", "x_dst", "att_src", "att_dst", "a_edge"},
    "gatv2": {"keys", "queries", "att", "edges"},
    "dot": {"keys", "values", "queries", "edges"},
    "cosine": {"keys", "queries", "c_src"},
    "mx": {"keys", "queries", "c_src", "c_dst"},
    "sd": {"keys", "queries"},
}


@dataclass(frozen=True)
class Attention:
    """A Program seen as attention: the kind of score and its constants."""

    score: str
    slope: float
    scale: float
    dropout: float
    edge: bool

    @property
    def family(self) -> str:
        return "additive" if self.score == "additive" else "pairwise"


@functools.lru_cache(maxsize=512)
def attention(program: Program) -> Attention | None:
    """The attention that ``program`` is, None when no fused kernel computes it."""
    kinds = [op.kind for op in program.ops]
    if kinds.count("segment_softmax") != 1 or kinds[-1] != "aggregate":
        return None
    cut = kinds.index("segment_softmax")
    edge = program.has_input("a_edge") or program.has_input("edges")
    score = _SHAPES.get(_shape(program.ops[:cut]))
    if score is None or not {name for name, _ in program.inputs} <= _INPUTS[score]:
        return None
    if kinds[cut + 1:-1] not in ([], ["dropout"]):
        return None
    found = {name: value for op in program.ops for name, value in op.attrs}
    return Attention(score, float(found.get("slope", 0.0)), float(found.get("by", 1.0)), float(found.get("p", 0.0)), edge)


def _shape(ops: tuple[Op, ...]) -> tuple[str, ...]:
    """Kinds in order, without repeats of head_dot and without sums that only bring in edge rows under a dot product."""
    kinds: list[str] = []
    dotted = any(op.kind == "dot" for op in ops)
    for op in ops:
        if op.kind == "head_dot" and kinds and kinds[-1] == "head_dot":
            continue
        if dotted and op.kind == "add" and "edges" in op.args:
            continue
        kinds.append(op.kind)
    return tuple(kinds)
