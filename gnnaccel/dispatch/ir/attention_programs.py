"""The Programs of attention layers, shared by the hosts: each is the published layer, written once;
and recognising a Program as one of them, which a fused attention kernel computes.

Names of inputs are those of the kernels' operands; adapters bind tensors to them.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from gnnaccel.dispatch.ir.program import DST, EDGE, PARAM, SRC, Op, Program, op


def _attend(score: str, dropout: float, row: str, bias: bool = False) -> tuple[Op, ...]:
    """Softmax of ``score``, dropout, weighted sum of ``row``, the parameter ``bias``."""
    ops: tuple[Op, ...] = (op("segment_softmax", "alpha", score),)
    if dropout > 0:
        ops += (op("dropout", "kept", "alpha", p=dropout),)
    ops += (op("aggregate", "sum" if bias else "out", ops[-1].out, row),)
    return ops + (op("add", "out", "sum", "bias"),) if bias else ops


@functools.lru_cache(maxsize=256)
def gat(slope: float, dropout: float, same: bool, has_dst: bool, edge: bool,
        bias: bool = False) -> Program:
    """GAT (arXiv 1710.10903). ``same``: destinations are the sources, or the first of them;
    ``has_dst`` False: they have no features."""
    inputs = [("x", SRC), ("att_src", PARAM)]
    ops = [op("head_dot", "a_src", "x", "att_src")]
    terms = ["a_src@src"]
    if has_dst:
        inputs += ([] if same else [("x_dst", DST)]) + [("att_dst", PARAM)]
        ops.append(op("head_dot", "a_dst", "x" if same else "x_dst", "att_dst"))
        terms.append("a_dst@dst")
    if edge:
        inputs.append(("a_edge", EDGE))
        terms.append("a_edge")
    ops += [op("add", "z", *terms), op("leaky_relu", "s", "z", slope=slope),
            *_attend("s", dropout, "x@src", bias)]
    if bias:
        inputs.append(("bias", PARAM))
    return Program("gat", tuple(inputs), tuple(ops), "out")


@functools.lru_cache(maxsize=256)
def additive_terms(slope: float, dropout: float, has_dst: bool, edge: bool) -> Program:
    """Additive attention whose logits' terms come from elsewhere: ``a_src`` [num_src, heads],
    ``a_dst``, ``a_edge``."""
    inputs = [("x", SRC),
              ("a_src", SRC)] + ([("a_dst", DST)]
                                 if has_dst else []) + ([("a_edge", EDGE)] if edge else [])
    terms = ["a_src@src"] + (["a_dst@dst"] if has_dst else []) + (["a_edge"] if edge else [])
    ops = (op("add", "z", *terms), op("leaky_relu", "s", "z", slope=slope),
           *_attend("s", dropout, "x@src"))
    return Program("additive_terms", tuple(inputs), ops, "out")


@functools.lru_cache(maxsize=256)
def gatv2(slope: float, dropout: float, edge: bool, bias: bool = False) -> Program:
    """GATv2 (arXiv 2105.14491): keys are the values."""
    inputs = [("keys", SRC), ("queries", DST), ("att", PARAM)] + ([("edges", EDGE)] if edge else [])
    inputs += [("bias", PARAM)] if bias else []
    terms = ["keys@src", "queries@dst"] + (["edges"] if edge else [])
    ops = (op("add", "z", *terms), op("leaky_relu", "l", "z", slope=slope),
           op("head_dot", "s", "l", "att"), *_attend("s", dropout, "keys@src", bias))
    return Program("gatv2", tuple(inputs), ops, "out")


@functools.lru_cache(maxsize=256)
def gatv2_vectors(slope: float, dropout: float) -> Program:
    """`gatv2` with several attention vectors, ``att`` [vectors, heads, width]: ``of_dst`` [num_dst]
    and ``of_src`` [num_src] int32 tell which is a row's, the same at both ends of an edge."""
    inputs = (("keys", SRC), ("queries", DST), ("att", PARAM), ("of_src", SRC), ("of_dst", DST))
    ops = (op("add", "z", "keys@src", "queries@dst"), op("leaky_relu", "l", "z", slope=slope),
           op("pick", "a", "att", "of_dst@dst"), op("head_dot", "s", "l", "a"),
           *_attend("s", dropout, "keys@src"))
    return Program("gatv2_vectors", inputs, ops, "out")


@functools.lru_cache(maxsize=256)
def dot_product(scale: float, dropout: float, edge: bool) -> Program:
    """Scaled dot-product attention over edges (arXiv 2009.03509); edge rows add to key and
    value."""
    inputs = [("keys", SRC), ("values", SRC),
              ("queries", DST)] + ([("edges", EDGE)] if edge else [])
    ops: list[Op] = []
    key, value = "keys@src", "values@src"
    if edge:
        ops += [op("add", "key", key, "edges"), op("add", "value", value, "edges")]
        key, value = "key", "value"
    ops += [op("dot", "d", "queries@dst", key), op("scale", "s", "d", by=scale),
            *_attend("s", dropout, value)]
    return Program("dot_product", tuple(inputs), tuple(ops), "out")


@functools.lru_cache(maxsize=256)
def dot_product_shared(scale: float, dropout: float) -> Program:
    """Dot-product attention whose values are its keys: the part left on the edges when the linear
    maps of keys and values are moved to the destinations (linear operator reordering, arXiv
    2301.06284)."""
    ops = (op("dot", "d", "queries@dst", "keys@src"), op("scale", "s", "d", by=scale),
           *_attend("s", dropout, "keys@src"))
    return Program("dot_product_shared", (("keys", SRC), ("queries", DST)), ops, "out")


@functools.lru_cache(maxsize=8)
def cosine() -> Program:
    """AGNN (arXiv 1803.03735): queries are beta times the unit rows, ``c_src`` is 1 / |x|."""
    ops = (op("dot", "d", "queries@dst", "keys@src"), op("mul", "s", "d", "c_src@src"),
           *_attend("s", 0.0, "keys@src"))
    return Program("cosine", (("keys", SRC), ("queries", DST), ("c_src", SRC)), ops, "out")


@functools.lru_cache(maxsize=256)
def supergat_mx(slope: float, dropout: float) -> Program:
    """SuperGAT's mixed attention: GAT's logit times the sigmoid of the dot product."""
    ops = (op("dot", "d", "queries@dst", "keys@src"), op("sigmoid", "g", "d"),
           op("add", "a", "c_src@src", "c_dst@dst"), op("mul", "y", "a", "g"),
           op("leaky_relu", "s", "y", slope=slope), *_attend("s", dropout, "keys@src"))
    return Program("supergat_mx", (("keys", SRC), ("queries", DST), ("c_src", SRC), ("c_dst", DST)),
                   ops, "out")


@functools.lru_cache(maxsize=256)
def supergat_sd(scale: float, slope: float, dropout: float) -> Program:
    """SuperGAT's scaled dot product, with its leaky_relu before the softmax."""
    ops = (op("dot", "d", "queries@dst", "keys@src"), op("scale", "y", "d", by=scale),
           op("leaky_relu", "s", "y", slope=slope), *_attend("s", dropout, "keys@src"))
    return Program("supergat_sd", (("keys", SRC), ("queries", DST)), ops, "out")


# --- recognition ----------------------------------------------------------------------------------

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
    kinds = [step.kind for step in program.ops]
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
    constants = {name: value for step in program.ops for name, value in step.attrs}
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
        return gat(slope, p, not program.has_input("x_dst"), program.has_input("att_dst"),
                            edge, program.has_input("bias"))
    if score == "terms":
        return additive_terms(slope, p, program.has_input("a_dst"),
                                       program.has_input("a_edge"))
    if score == "gatv2" and program.has_input("of_dst"):
        return gatv2_vectors(slope, p)
    if score == "gatv2":
        return gatv2(slope, p, edge, program.has_input("bias"))
    if score == "dot":
        return (dot_product(by, p, edge)
                if program.has_input("values") else dot_product_shared(by, p))
    if score == "cosine":
        return cosine()
    return supergat_mx(slope, p) if score == "mx" else supergat_sd(by, slope, p)


def _wiring(program: Program) -> tuple:
    """Inputs and operations with intermediate values called by their place: their names do not
    count."""
    place = {name: name for name, _ in program.inputs}
    ops = []
    for i, step in enumerate(program.ops):
        ends = (arg.partition("@") for arg in step.args)
        args = tuple((place[name], end) for name, _, end in ends)
        ops.append((step.kind, args, step.attrs))
        place[step.out] = f"value {i}"
    return frozenset(program.inputs), tuple(ops), place[program.output]


def _shape(ops: tuple[Op, ...]) -> tuple[str, ...]:
    """Kinds in order, without repeats of head_dot and without sums that only bring in edge rows
    under a dot product."""
    kinds: list[str] = []
    dotted = any(step.kind == "dot" for step in ops)
    for step in ops:
        if step.kind == "head_dot" and kinds and kinds[-1] == "head_dot":
            continue
        if dotted and step.kind == "add" and "edges" in step.args:
            continue
        kinds.append(step.kind)
    return tuple(kinds)
