"""`Program`: the computation of a layer, with no host and no kernel in it (Hector's inter-operator
level, arXiv 2301.06284).

A Program is a list of operations over named values. Each value lives in a domain: SRC and DST (one
row per node), EDGE, RELATION, PARAM, and the compacted domains PAIR_SRC and PAIR_DST (one row per
pair of a node and a relation that some edge has at that end). A value is read in a finer domain by
naming the end: ``"x@src"``, ``"x@dst"``, ``"w@rel"``, ``"h@pair_src"``. Host adapters state their
layers as Programs; backends interpret them (`torch_backend`, `relational.execute`) or recognise
them as something they have a fused kernel for (`attention_programs`). Programs are frozen, so they
serve as memo keys.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

SRC, DST, EDGE, PARAM = "SRC", "DST", "EDGE", "PARAM"
RELATION, PAIR_SRC, PAIR_DST = "RELATION", "PAIR_SRC", "PAIR_DST"

#: how a value is read in a finer domain -> the domains that it may live in (one set of nodes may
#: serve both ends)
ENDS = {"src": (SRC, DST), "dst": (SRC, DST), "rel": (RELATION,), "pair_src": (PAIR_SRC,),
        "pair_dst": (PAIR_DST,)}
#: how a value is read -> the domain whose rows are read
DOMAIN_OF = {"src": SRC, "dst": DST, "rel": RELATION, "pair_src": PAIR_SRC, "pair_dst": PAIR_DST}
#: domain of an operation -> the ends that may be read in it; in other domains plain values only
READS = {EDGE: tuple(ENDS), PAIR_SRC: ("src", "rel"), PAIR_DST: ("dst", "rel")}

#: operation -> what it does, on values [rows, heads] (scores) or [rows, heads, width] (rows)
OPERATIONS = {
    "head_dot": "inner product of each head of a row with a parameter [heads, width]",
    "dot": "inner product of two rows per head",
    "add": "sum", "mul": "product", "scale": "product with a constant",
    "pick": "row of a parameter [rows, ..] at a value that is its number",
    "leaky_relu": "x where x > 0, else slope * x",
    "relu": "x where x > 0, else 0, of -inf too",
    "sigmoid": "1 / (1 + exp(-x))",
    "segment_softmax": "softmax over the edges that enter a node; no edges, no value",
    "dropout": "zero with probability p, else divided by 1 - p; the mask comes with the call",
    "aggregate": "sum over the edges that enter a node of weight [edges, heads] times row "
                 "[edges, heads, width]; with `per_head` weights for each head, "
                 "[edges, heads * per_head], it has rows [heads, per_head, width]",
    "raise_positive": "x + 1 where x > 0, else x",
    "add_product": "row [heads, .., width] plus another [heads * width] times a parameter [width]",
    "part": "channels `start` to `stop` of a row",
    "linear": "row [K] times matrix [K, N], or block by block where the matrix is [blocks, K, N]; "
              "with `heads` row [1, heads, K], each head times its own columns of the matrix, to "
              "[heads, N / heads]",
    "lookup": "row of a relation's table [nodes, N] at a node's number",
    "mix": "lookup in the sum of tables [bases, nodes, N] with a relation's coefficients [bases]",
    "fold": "product of each relation's matrix with a parameter's",
    "combine": "sum of bases with a relation's coefficients",
    "reduce": "sum or mean over the edges of one destination and relation, each times its weight "
              "[edges] if there is one",
    "collect": "sum over the relations of a destination, weighted if there is a weight",
    "per_basis": "sum over the relations of a destination of coefficients [bases] times row [K], "
                 "times the bases [bases, K, N]",
    "mean_sum": "sum over the relations of a destination of the mean over its edges, in one "
                "traversal; mean=False: the sum; weights as for `reduce`",
    "single": "row of the only edge that enters each destination, edges being in the order of "
              "their destinations",
    "attend": "a fused attention: the Program named in `attention` on the graph between two "
              "domains",
}
#: operations that make one row per destination, or per destination and relation, out of edges
_REDUCING = {"aggregate": DST, "collect": DST, "per_basis": DST, "mean_sum": DST, "single": DST,
             "reduce": PAIR_DST}


@dataclass(frozen=True)
class Op:
    """``out = kind(*args, **attrs)``. ``args`` name values, with an end such as ``@src`` where a
    value is read in a finer domain. ``domain``: where ``out`` lives; None: it follows from the
    arguments."""

    kind: str
    out: str
    args: tuple[str, ...]
    attrs: tuple[tuple[str, Any], ...] = ()
    domain: str | None = None

    def attr(self, name: str) -> Any:
        return dict(self.attrs)[name]

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute that may be missing."""
        return dict(self.attrs).get(name, default)

    def __str__(self) -> str:
        attrs = "".join(f", {k}={v.name if isinstance(v, Program) else v}" for k, v in self.attrs)
        where = f"  [{self.domain}]" if self.domain else ""
        return f"{self.out} = {self.kind}({', '.join(self.args)}{attrs}){where}"


@dataclass(frozen=True, eq=False)
class Program:
    """A layer's computation. ``inputs``: (name, domain) pairs; ``output``: the value of the result,
    on DST.

    Compared and hashed by identity, since memo keys hold Programs: build them by memoised
    functions.
    """

    name: str
    inputs: tuple[tuple[str, str], ...]
    ops: tuple[Op, ...]
    output: str

    def __post_init__(self) -> None:
        domains = dict(self.inputs)
        for op in self.ops:
            if op.kind not in OPERATIONS:
                raise ValueError(
                    f"{self.name}: unknown operation {op.kind!r}; known: {', '.join(OPERATIONS)}")
            for arg in op.args:
                name, _, end = arg.partition("@")
                if name not in domains:
                    raise ValueError(
                        f"{self.name}: {op} reads {name!r}, which nothing before it makes")
                if end and domains[name] not in ENDS.get(end, ()):
                    raise ValueError(f"{self.name}: {arg!r} reads an end of {name!r}, which "
                                     f"lives in {domains[name]}")
            domains[op.out] = domain = _domain(op, domains)
            _check_reads(self.name, op, domain)
        if domains.get(self.output) != DST:
            raise ValueError(f"{self.name}: the output {self.output!r} does not live in {DST}")

    @functools.cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.inputs)

    def has_input(self, name: str) -> bool:
        return name in self._names

    @functools.cached_property
    def domains(self) -> dict[str, str]:
        """The domain of every value."""
        domains = dict(self.inputs)
        for op in self.ops:
            domains[op.out] = _domain(op, domains)
        return domains

    @functools.cached_property
    def last_reads(self) -> tuple[tuple[str, ...], ...]:
        """The values that no operation after it reads, for each operation."""
        last = {name_of(arg): at for at, step in enumerate(self.ops) for arg in step.args}
        return tuple(tuple(name for name, place in last.items() if place == at)
                     for at in range(len(self.ops)))

    def __str__(self) -> str:
        inputs = ", ".join(f"{name}: {domain}" for name, domain in self.inputs)
        return "\n".join([f"{self.name}({inputs})"]
                         + [f"  {op}" for op in self.ops] + [f"  return {self.output}"])


def name_of(arg: str) -> str:
    """The value that an argument reads, without the end."""
    return arg.partition("@")[0]


def _domain(op: Op, known: dict[str, str]) -> str:
    if op.domain is not None:
        return op.domain
    if op.kind in _REDUCING:
        return _REDUCING[op.kind]
    domains = {EDGE if "@" in arg else known[arg] for arg in op.args}
    if EDGE in domains:
        return EDGE
    domains.discard(PARAM)
    return domains.pop() if len(domains) == 1 else PARAM


def _check_reads(name: str, op: Op, domain: str) -> None:
    if op.kind in _REDUCING or op.kind == "attend" or domain == EDGE:
        return  # these read edges, whatever domain they make
    for arg in op.args:
        end = arg.partition("@")[2]
        if end and end not in READS.get(domain, ()):
            raise ValueError(f"{name}: {op} lives in {domain}, where {arg!r} cannot be read")


def op(kind: str, out: str, *args: str, **attrs: Any) -> Op:
    return Op(kind, out, args, tuple(sorted(attrs.items())))
