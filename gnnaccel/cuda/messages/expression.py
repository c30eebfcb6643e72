"""Expressions that generated kernels compute at each edge and channel: pointwise operations, each
with its text in CUDA C and that of its derivatives."""
from __future__ import annotations

import functools
from typing import NamedTuple

#: where an input has its rows: at the source, at the destination, at the edge, or one row for all
ENDS = ("j", "i", "e", "p")
#: how an input lies over the channels: a number for each, for each head, or one for all
MODES = ("row", "head", "one")


#: the operation that is not pointwise: the sum over the channels of each head, of which all
#: channels of the head get the result
CHANNEL_SUM = "channel_sum"


class Input(NamedTuple):
    """Input of an expression; ``end``: one of `ENDS`; ``mode``: one of `MODES`."""

    end: str
    mode: str


class Step(NamedTuple):
    """An operation of `OPERATIONS`, or a `CHANNEL_SUM`, on values: inputs, then numbers, then
    earlier steps, counted from 0."""

    op: str
    args: tuple[int, ...]


class Expression(NamedTuple):
    """A message. ``numbers``: count of numbers that are the same for all edges, with no gradient;
    ``out``: the value that is the message; ``score``: the value whose softmax over the edges that
    enter a node is multiplied with it, if there is one: the same for all channels of a head;
    ``others``: the values of further messages, each reduced for itself. These have no score."""

    inputs: tuple[Input, ...]
    numbers: int
    steps: tuple[Step, ...]
    out: int
    score: int | None = None
    others: tuple[int, ...] = ()

    @property
    def outs(self) -> tuple[int, ...]:
        """The values of all messages."""
        return (self.out, *self.others)

    def only(self, places: tuple[int, ...]) -> Expression:
        """The same with none but the messages at these places of `outs`."""
        out, *others = [self.outs[at] for at in places]
        return self._replace(out=out, others=tuple(others))

    @property
    def first(self) -> int:
        """The value that the first step makes."""
        return len(self.inputs) + self.numbers

    def made_of(self, value: int) -> set[int]:
        """Values that ``value`` is made of, and itself; not those that only its sums over channels
        are made of."""
        values, stack = set(), [value]
        while stack:
            k = stack.pop()
            if k not in values:
                values.add(k)
                if k >= self.first and self.steps[k - self.first].op != CHANNEL_SUM:
                    stack += self.steps[k - self.first].args
        return values

    @property
    def used(self) -> frozenset[int]:
        """The values that the messages and the score are made of."""
        return _used(self)

    @property
    def scored_by_head(self) -> bool:
        """Whether the score is made of numbers for each head alone, and its operations make nothing
        else."""
        assert self.score is not None
        score = self.made_of(self.score)
        others = self.made_of(self.out).union(
            *(self.made_of(self.steps[k - self.first].args[0]) for k in self.sums))
        return (all(source.mode != "row" for k, source in enumerate(self.inputs) if k in score)
                and not any(k >= self.first for k in score & others))

    @property
    def sums(self) -> tuple[int, ...]:
        """The values that are sums over channels."""
        return tuple(k for k, step in enumerate(self.steps, self.first) if step.op == CHANNEL_SUM)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the values in the kernels."""
        return _names(self)

    def __str__(self) -> str:
        """Formula, in which long parts have their names in the kernels."""
        return _formula(self)


@functools.lru_cache(maxsize=512)
def _names(of: Expression) -> tuple[str, ...]:
    counts: dict[str, int] = {}
    names = []
    for source in of.inputs:
        names.append(f"{source.end}{counts.setdefault(source.end, 0)}")
        counts[source.end] += 1
    return (*names, *(f"n{k}" for k in range(of.numbers)), *(f"v{k}" for k in range(len(of.steps))))


@functools.lru_cache(maxsize=512)
def _used(of: Expression) -> frozenset[int]:
    used = {*of.outs, *(() if of.score is None else (of.score,))}
    for k, step in reversed([*enumerate(of.steps, of.first)]):
        if k in used:
            used.update(step.args)
    return frozenset(used)


@functools.lru_cache(maxsize=512)
def _formula(of: Expression) -> str:
    names = of.names
    texts = list(names[:of.first])
    for op, args in of.steps:
        parts = [texts[a] if len(texts[a]) <= _LONG else names[a] for a in args]
        sign = _SIGNS.get(op)
        texts.append(f"({parts[0]} {sign} {parts[1]})" if sign else f"{op}({', '.join(parts)})")
    if of.score is not None:
        return f"softmax({texts[of.score]}) * {texts[of.out]}"
    return ", ".join([texts[out] for out in of.outs])


class Operation(NamedTuple):
    """``value``: a C expression of the arguments {0}, {1}, ...; ``slopes``: for each argument its
    gradient for a gradient {g} of the value, None if it has none; {y} is the value. ``type``: of
    the value."""

    value: str
    slopes: tuple[str | None, ...]
    type: str = "float"


_LONG = 60  # characters of a part of a formula
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "gt": ">", "lt": "<", "ge": ">=",
          "le": "<=", "eq": "==", "ne": "!=", "pow": "**"}


def _test(sign: str) -> Operation:
    return Operation(f"{{0}} {sign} {{1}}", (None, None), "bool")


#: Operations by name. At corners of functions, and of NaN, each does as torch's does. Products are
#: rounded (`__fmul_rn`) before anything is added to them, as torch's are: differences that are zero
#: for torch would else be a rounding error, and the derivative at a corner another one.
OPERATIONS: dict[str, Operation] = {
    "add": Operation("{0} + {1}", ("{g}", "{g}")),
    "sub": Operation("{0} - {1}", ("{g}", "-{g}")),
    "mul": Operation("__fmul_rn({0}, {1})", ("{g} * {1}", "{g} * {0}")),
    "div": Operation("{0} / {1}", ("{g} / {1}", "-{g} * ({y} / {1})")),
    "neg": Operation("-{0}", ("-{g}",)),
    "square": Operation("__fmul_rn({0}, {0})", ("2.f * {g} * {0}",)),
    "reciprocal": Operation("1.f / {0}", ("-{g} * {y} * {y}",)),
    "abs": Operation("fabsf({0})", ("{g} * sign({0})",)),
    "sign": Operation("sign({0})", ("0.f",)),
    "exp": Operation("expf({0})", ("{g} * {y}",)),
    "expm1": Operation("expm1f({0})", ("{g} * ({y} + 1.f)",)),
    "log": Operation("logf({0})", ("{g} / {0}",)),
    "log1p": Operation("log1pf({0})", ("{g} / ({0} + 1.f)",)),
    "sqrt": Operation("sqrtf({0})", ("{g} / (2.f * {y})",)),
    "rsqrt": Operation("1.f / sqrtf({0})", ("-0.5f * {g} * {y} * {y} * {y}",)),
    "sin": Operation("sinf({0})", ("{g} * cosf({0})",)),
    "cos": Operation("cosf({0})", ("-{g} * sinf({0})",)),
    "erf": Operation("erff({0})", ("{g} * 1.1283791671f * expf(-{0} * {0})",)),
    "sigmoid": Operation("sigmoid({0})", ("{g} * ((1.f - {y}) * {y})",)),
    "tanh": Operation("tanhf({0})", ("{g} * (1.f - {y} * {y})",)),
    "relu": Operation("{0} <= 0.f ? 0.f : {0}", ("{0} <= 0.f ? 0.f : {g}",)),
    "leaky_relu": Operation("{0} > 0.f ? {0} : __fmul_rn({0}, {1})",
                            ("{0} > 0.f ? {g} : {g} * {1}", None)),
    "elu": Operation("{0} > 0.f ? {0} : __fmul_rn({1}, expm1f({0}))",
                     ("{0} > 0.f ? {g} : {g} * {1} * expf({0})", None)),
    "silu": Operation("__fmul_rn({0}, sigmoid({0}))",
                      ("{g} * (sigmoid({0}) * (1.f + {0} * (1.f - sigmoid({0}))))",)),
    "gelu": Operation("gelu({0})", ("{g} * gelu_slope({0})",)),
    "gelu_tanh": Operation("gelu_tanh({0})", ("{g} * gelu_tanh_slope({0})",)),
    "softplus": Operation("{0} * {1} > {2} ? {0} : log1pf(expf({0} * {1})) / {1}",
                          ("{0} * {1} > {2} ? {g} : {g} * sigmoid({0} * {1})", None, None)),
    "clamp_min": Operation("{0} < {1} ? {1} : {0}", ("{0} >= {1} ? {g} : 0.f", None)),
    "clamp_max": Operation("{0} > {1} ? {1} : {0}", ("{0} <= {1} ? {g} : 0.f", None)),
    "pow": Operation("powf({0}, {1})",
                     ("{1} == 0.f ? 0.f : {g} * ({1} * powf({0}, {1} - 1.f))", None)),
    "maximum": Operation("{0} != {0} || {0} > {1} ? {0} : {1}",
                         ("{0} < {1} ? 0.f : {0} == {1} ? 0.5f * {g} : {g}",
                          "{0} > {1} ? 0.f : {0} == {1} ? 0.5f * {g} : {g}")),
    "minimum": Operation("{0} != {0} || {0} < {1} ? {0} : {1}",
                         ("{0} > {1} ? 0.f : {0} == {1} ? 0.5f * {g} : {g}",
                          "{0} < {1} ? 0.f : {0} == {1} ? 0.5f * {g} : {g}")),
    "where": Operation("{0} ? {1} : {2}", (None, "{0} ? {g} : 0.f", "{0} ? 0.f : {g}")),
    "gt": _test(">"), "lt": _test("<"), "ge": _test(">="), "le": _test("<="), "eq": _test("=="),
    "ne": _test("!="),
    "and": Operation("{0} && {1}", (None, None), "bool"),
    "or": Operation("{0} || {1}", (None, None), "bool"),
    "not": Operation("!{0}", (None,), "bool"),
    "float": Operation("{0} ? 1.f : 0.f", (None,)),
}
