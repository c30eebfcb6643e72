"""The Programs of attention layers, shared by the hosts: each is the published layer, written once.

Names of inputs are those of the kernels' operands; adapters bind tensors to them.
"""
from __future__ import annotations

import functools

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
