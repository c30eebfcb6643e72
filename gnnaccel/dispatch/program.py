"""`Program`: what a layer computes, with no host and no kernel in it (Hector's inter-operator level, arXiv 2301.06284).

A Program is a list of operations over named values. Each value lives in a domain: SRC and DST (one row per node), EDGE,
or PARAM. A node value is read on edges by naming the end: ``"x@src"``, ``"x@dst"``. Host adapters state their layers as
Programs; backends interpret them (`torch_backend`) or recognise them as something they have a fused kernel for
(`patterns`). Programs are frozen, so they serve as memo keys.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

SRC, DST, EDGE, PARAM = "SRC", "DST", "EDGE", "PARAM"

#: operation -> what it does, on values [rows, heads] (scores) or [rows, heads, width] (rows)
OPERATIONS = {
    "head_dot": "inner product of each head of a row with a parameter [heads, width]",
    "dot": "inner product of two rows per head",
    "add": "sum", "mul": "product", "scale": "product with a constant",
    "leaky_relu": "x where x > 0, else slope * x", "sigmoid": "1 / (1 + exp(-x))",
    "segment_softmax": "softmax over the edges that enter a node; no edges, no value",
    "dropout": "zero with probability p, else divided by 1 - p; the mask comes with the call",
    "aggregate": "sum over the edges that enter a node of weight [edges, heads] times row [edges, heads, width]",
}


@dataclass(frozen=True)
class Op:
    """``out = kind(*args, **attrs)``. ``args`` name values, with ``@src`` or ``@dst`` where a node value meets edges."""

    kind: str
    out: str
    args: tuple[str, ...]
    attrs: tuple[tuple[str, Any], ...] = ()

    def attr(self, name: str) -> Any:
        return dict(self.attrs)[name]

    def __str__(self) -> str:
        attrs = "".join(f", {k}={v}" for k, v in self.attrs)
        return f"{self.out} = {self.kind}({', '.join(self.args)}{attrs})"


@dataclass(frozen=True, eq=False)
class Program:
    """``inputs``: (name, domain) pairs; ``ops`` in order; ``output``: the value that is the result, on DST.

    Compared and hashed by identity, since memo keys hold Programs: build them by memoised functions.
    """

    name: str
    inputs: tuple[tuple[str, str], ...]
    ops: tuple[Op, ...]
    output: str

    def __post_init__(self) -> None:
        known = dict(self.inputs)
        for op in self.ops:
            if op.kind not in OPERATIONS:
                raise ValueError(f"{self.name}: unknown operation {op.kind!r}; known: {', '.join(OPERATIONS)}")
            for arg in op.args:
                name, _, end = arg.partition("@")
                if name not in known:
                    raise ValueError(f"{self.name}: {op} reads {name!r}, which nothing before it makes")
                if end and known[name] not in (SRC, DST):
                    raise ValueError(f"{self.name}: {arg!r} reads an end of {name!r}, which lives in {known[name]}")
            known[op.out] = _domain(op, known)
        if known.get(self.output) != DST:
            raise ValueError(f"{self.name}: the output {self.output!r} does not live in {DST}")

    @functools.cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.inputs)

    def has_input(self, name: str) -> bool:
        return name in self._names

    def __str__(self) -> str:
        inputs = ", ".join(f"{name}: {domain}" for name, domain in self.inputs)
        return "\n".join([f"{self.name}({inputs})"] + [f"  {op}" for op in self.ops] + [f"  return {self.output}"])


def _domain(op: Op, known: dict[str, str]) -> str:
    if op.kind == "aggregate":
        return DST
    domains = {EDGE if "@" in arg else known[arg] for arg in op.args}
    if EDGE in domains:
        return EDGE
    domains.discard(PARAM)
    return domains.pop() if len(domains) == 1 else PARAM


def op(kind: str, out: str, *args: str, **attrs: Any) -> Op:
    return Op(kind, out, args, tuple(sorted(attrs.items())))
