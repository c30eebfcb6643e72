"""The Programs of relational layers, shared by the hosts: each is the published layer, written edge
by edge, once.

Programs say what is computed; where each value is made, and in which order, is up to the passes.
"""
from __future__ import annotations

import functools

from gnnaccel.dispatch.ir.program import DST, EDGE, PAIR_SRC, PARAM, RELATION, SRC, Op, Program, op


@functools.lru_cache(maxsize=64)
def rgcn(mean: bool, bases: bool, transposed: bool = False, weighted: bool = False) -> Program:
    """RGCN (arXiv 1703.06103) without its root term: the sum over relations of the mean (or sum)
    over neighbours of x W_r.

    ``bases``: W_r is a sum of shared bases; otherwise ``weight`` may hold blocks (block-diagonal
    W_r). ``transposed``: weights are [out, in], as those of linear maps are. ``weighted``: each
    edge counts ``norm`` [E] times.
    """
    inputs, ops = _weights(bases)
    inputs += (("norm", EDGE),) if weighted else ()
    how = dict(transposed=True) if transposed else {}
    reduce = ("h", "norm") if weighted else ("h",)
    ops += (op("linear", "h", "x@src", "weight@rel", **how), op("reduce", "m", *reduce, mean=mean),
            op("collect", "out", "m"))
    return Program("rgcn", (("x", SRC), *inputs), ops, "out")


@functools.lru_cache(maxsize=64)
def rgcn_embedding(mean: bool, bases: bool, own: bool = False) -> Program:
    """RGCN over nodes without features: ``ids`` [num_src] int64 choose rows of each relation's
    table. ``own``: each node's id is its own number."""
    inputs: tuple[tuple[str, str], ...]
    if bases:
        attrs = {"own": True} if own else {}
        inputs, row = (("comp", RELATION),
                       ("bases", PARAM)), op("mix", "h", "comp@rel", "bases", "ids@src", **attrs)
    else:
        inputs, row = (("weight", RELATION),), op("lookup", "h", "weight@rel", "ids@src")
    ops = (row, op("reduce", "m", "h", mean=mean), op("collect", "out", "m"))
    return Program("rgcn_embedding", (("ids", SRC), *inputs), ops, "out")


def _weights(bases: bool) -> tuple[tuple, tuple[Op, ...]]:
    if bases:
        return (("comp", RELATION), ("bases", PARAM)), (op("combine", "weight", "comp", "bases"),)
    return (("weight", RELATION),), ()


@functools.lru_cache(maxsize=256)
def rgat(slope: float, dropout: float, bases: bool, edge: bool, within: bool, heads: int,
         same: bool = True, mod: str | None = None, product: bool = False,
         per_head: int = 1) -> Program:
    """RGAT (arXiv 1904.05811). ``within``: softmax over the edges of one relation, else over all
    edges that enter a node. ``edge``: ``a_edge`` [E, heads * per_head], the edge features' part of
    the logits. ``same``: destinations are the sources.

    Logits are leaky sums (additive self-attention) or, with ``product``, products, ``per_head`` of
    them for each head. ``mod``: "additive" adds every message once more, times ``w`` [width];
    "f-additive" adds 1 to weights above zero. Scaling by the degree of the destination is no
    part of the Program.
    """
    inputs, ops = _weights(bases)
    target = "x@dst" if same else "x_dst@dst"
    inputs = (("x", SRC), *(() if same else (("x_dst", DST),)), *inputs, ("q", PARAM), ("k", PARAM),
              *((("a_edge", EDGE),) if edge else ()))
    ops += (op("linear", "h_dst", target, "weight@rel"), op("linear", "h", "x@src", "weight@rel"),
            op("linear", "a_dst", "h_dst", "q"), op("linear", "a_src", "h", "k"),
            *_logits(slope, edge, product))
    ops += _attend("s", "h", dropout, within, heads, per_head, mod == "f-additive",
                   "sum" if mod == "additive" else "out")
    if mod == "additive":
        inputs += (("w", PARAM),)
        ops += (op("reduce", "m", "h", mean=False), op("collect", "messages", "m"),
                op("add_product", "out", "sum", "messages", "w"))
    return Program("rgat", inputs, ops, "out")


def _logits(slope: float, edge: bool, product: bool) -> tuple[Op, ...]:
    """``s``: the logits of RGAT from the terms of an edge's ends, and of its features."""
    if not product:
        terms = ("a_src", "a_dst", "a_edge") if edge else ("a_src", "a_dst")
        return op("add", "z", *terms), op("leaky_relu", "s", "z", slope=slope)
    if not edge:
        return (op("mul", "s", "a_src", "a_dst"),)
    return op("mul", "z", "a_src", "a_dst"), op("mul", "s", "z", "a_edge")


@functools.lru_cache(maxsize=4)
def typed_linear(bases: bool = False, transposed: bool = False, bias: bool = False) -> Program:
    """Each row times the matrix of its type: row i is the source and the destination of edge i, its
    type the relation. ``bases``: as in `rgcn`; ``transposed``: the matrices are linear layers',
    [channels of the result, of the row]; ``bias`` [N] by relation."""
    inputs, ops = _weights(bases)
    turned = dict(transposed=True) if transposed else {}
    ops += (op("linear", "h", "x@src", "weight@rel", **turned),)
    ops += (op("add", "shifted", "h", "bias@rel"),) if bias else ()
    ops += (op("single", "out", ops[-1].out),)
    return Program("typed_linear", (("x", SRC), *inputs, *((("bias", RELATION),) if bias else ())),
                   ops, "out")


@functools.lru_cache(maxsize=64)
def film(width: int, mean: bool, bias: bool, activated: bool, same: bool = True) -> Program:
    """GNN-FiLM (arXiv 1906.12192) without its skip term: each relation's messages are scaled and
    shifted by the destination.

    ``weight`` [width, K] and ``film`` [2 * width, K] by relation are a linear layer's, so they are
    applied transposed; the first half of the latter's channels shifts, the second scales. ``bias``
    [2 * width] by relation; ``activated``: ReLU.
    """
    inputs = (("x", SRC), *(() if same else (("x_dst", DST),)), ("weight", RELATION),
              ("film", RELATION), *((("bias", RELATION),) if bias else ()))
    ops: tuple[Op, ...]
    ops = (op("linear", "h", "x@src", "weight@rel", transposed=True),
           op("linear", "f", "x@dst" if same else "x_dst@dst", "film@rel", transposed=True))
    ops += (op("add", "g", "f", "bias@rel"),) if bias else ()
    ops += (op("part", "beta", ops[-1].out, start=0, stop=width),
            op("part", "gamma", ops[-1].out, start=width, stop=2 * width),
            op("mul", "scaled", "h", "gamma"), op("add", "shifted", "scaled", "beta"))
    ops += (op("relu", "message", "shifted"),) if activated else ()
    return Program("film", inputs,
                   ops + (op("reduce", "m", ops[-1].out, mean=mean), op("collect", "out", "m")),
                   "out")


@functools.lru_cache(maxsize=256)
def heat(slope: float, dropout: float, heads: int) -> Program:
    """HEAT (arXiv 2106.07161) after its maps of nodes and edges: heads that share their rows, and
    edge features that go into the messages.

    ``rows`` [N, width], ``a_src``, ``a_dst`` [N, heads], ``a_rel`` [relations, heads], ``a_edge``
    [E, heads]; ``edges`` [E, K] enter the messages by ``w_edge`` [K, width], which is applied to
    their weighted sums. Result [N, 1, heads, width].
    """
    inputs = (("rows", SRC), ("a_src", SRC), ("a_dst", DST), ("a_rel", RELATION), ("a_edge", EDGE),
              ("edges", EDGE), ("w_edge", PARAM))
    ops: tuple[Op, ...]
    ops = (op("add", "z", "a_src@src", "a_dst@dst", "a_rel@rel", "a_edge"),
           op("leaky_relu", "s", "z", slope=slope), *_weights_of("s", dropout))
    weight = ops[-1].out
    ops += (op("aggregate", "from_rows", weight, "rows@src", heads=1, per_head=heads),
            op("aggregate", "from_edges", weight, "edges", heads=1, per_head=heads),
            Op("linear", "mapped", ("from_edges", "w_edge"), domain=DST),
            Op("add", "out", ("from_rows", "mapped"), domain=DST))
    return Program("heat", inputs, ops, "out")


@functools.lru_cache(maxsize=256)
def edge_gat(slope: float, dropout: float, heads: int) -> Program:
    """GAT (arXiv 1710.10903) whose messages are the source's row plus a map of the edge's features,
    after its maps of nodes.

    ``rows`` [N, heads * width], ``a_src``, ``a_dst`` [N, heads], ``a_edge`` [E, heads]; ``edges``
    [E, K] enter the messages by ``w_edge`` [K, heads * width]. Relations do not count. Result [N,
    heads, width].
    """
    inputs = (("rows", SRC), ("a_src", SRC), ("a_dst", DST), ("a_edge", EDGE), ("edges", EDGE),
              ("w_edge", PARAM))
    ops: tuple[Op, ...]
    ops = (op("add", "z", "a_src@src", "a_dst@dst", "a_edge"),
           op("leaky_relu", "s", "z", slope=slope), *_weights_of("s", dropout))
    weight = ops[-1].out
    ops += (op("aggregate", "from_rows", weight, "rows@src", heads=heads),
            op("linear", "mapped", "edges", "w_edge"),
            op("aggregate", "from_edges", weight, "mapped", heads=heads),
            Op("add", "out", ("from_rows", "from_edges"), domain=DST))
    return Program("edge_gat", inputs, ops, "out")


@functools.lru_cache(maxsize=256)
def hgt(scale: float, heads: int) -> Program:
    """HGT (arXiv 2003.01332) between its node-type maps: keys and values of a source mapped by
    relation and head, scores scaled by the relation's prior ``p``."""
    ops = (op("linear", "key", "keys@src", "w_att@rel"),
           op("linear", "value", "values@src", "w_msg@rel"),
           op("dot", "d", "queries@dst", "key", heads=heads), op("mul", "prior", "d", "p@rel"),
           op("scale", "s", "prior", by=scale)) + _attend("s", "value", 0.0, False, heads)
    return Program("hgt",
                   (("keys", SRC), ("values", SRC), ("queries", DST), ("w_att", RELATION),
                    ("w_msg", RELATION), ("p", RELATION)), ops, "out")


def hgt_shapes(heads: int, width: int) -> tuple:
    """`request.shapes_of` the operands of `hgt`, which are not there yet when it is stated."""
    rows, matrix = (heads * width,), (heads, width, width)
    return (*((name, rows) for name in ("keys", "values", "queries")), ("w_att", matrix),
            ("w_msg", matrix), ("p", (heads,)))


@functools.lru_cache(maxsize=256)
def hgt_of_pairs(scale: float, heads: int) -> Program:
    """`hgt` after all of its maps: keys and values of (source, relation) pairs, priors in the
    keys."""
    ops: tuple[Op, ...]
    ops = (op("dot", "d", "queries@dst", "keys@pair_src", heads=heads),
           op("scale", "s", "d", by=scale))
    ops += _attend("s", "values@pair_src", 0.0, False, heads)
    return Program("hgt_of_pairs", (("keys", PAIR_SRC), ("values", PAIR_SRC), ("queries", DST)),
                   ops, "out")


def _weights_of(score: str, dropout: float, within: bool = False) -> tuple[Op, ...]:
    """Softmax of ``score`` over the edges of a node, or of a node and a relation; dropout."""
    alpha = op("segment_softmax", "alpha", score, scope="pair_dst" if within else "dst")
    return (alpha, op("dropout", "kept", "alpha", p=dropout)) if dropout > 0 else (alpha,)


def _attend(score: str, row: str, dropout: float, within: bool, heads: int, per_head: int = 1,
            raised: bool = False, out: str = "out") -> tuple[Op, ...]:
    """Softmax of ``score``, dropout, weighted sum of ``row``. ``raised``: weights above zero are
    one more."""
    ops = _weights_of(score, dropout, within)
    if raised:
        ops += (op("raise_positive", "raised", ops[-1].out),)
    attrs = {"per_head": per_head} if per_head > 1 else {}
    return ops + (op("aggregate", out, ops[-1].out, row, heads=heads, **attrs),)
