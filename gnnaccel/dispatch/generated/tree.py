"""Messages as trees of pointwise operations, while they are traced, and the expression that
kernels are written for."""
from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnaccel.cuda.messages.expression import Expression, Input, Step

Make = Callable[[Any], Tensor]  # from the arguments of a call


Tail = tuple[int, ...]


class Leaf:
    """Rows of a tensor at one end of the edges, as `cuda.messages.expression.ENDS` calls it.

    ``make`` computes them, one row for each node or edge, or just one of parameters; ``tail``: the
    shape of a row; ``blocks``: where it is not 0, the channels are so many blocks, a row has
    a number for each, and ``tail`` says nothing; ``names``: the arguments of the call, and values
    written for each edge, of which they are made; ``roots``: the tensors, likewise; ``base``: the
    same for leaves that are views of each other; ``pieces``: leaves that were cut out of it, for
    whoever cuts; ``cut``: whether it is such a leaf, whose rows lie within those of another.
    """

    __slots__ = ("_base", "blocks", "cut", "end", "make", "names", "pieces", "roots", "tail")

    def __init__(self, end: str, make: Make, tail: Tail, names: frozenset[Any],
                 roots: tuple[Make, ...], base: Any = None, blocks: int = 0, cut: bool = False):
        self.end, self.make, self.tail, self.names, self.roots = end, make, tail, names, roots
        self.cut = cut
        # None for the leaf itself: held by itself it would keep parameters until garbage is
        # collected
        self._base, self.blocks = base, blocks
        self.pieces: dict[Any, Any] = base.pieces if isinstance(base, Leaf) else {}

    @property
    def base(self) -> Any:
        return self if self._base is None else self._base

    def key(self, mode: str) -> tuple:
        """Equal for views of the same rows that are the same over the channels of a message."""
        if mode != "row" or self.blocks:
            return "input", id(self.base), mode
        tail = self.tail
        while tail and tail[0] == 1:
            tail = tail[1:]
        return "input", id(self.base), mode, tail

    def viewed(self, tail: Tail, blocks: int = 0) -> Leaf:
        """The leaf in another shape of as many numbers."""
        return Leaf(self.end, self.make, tail, self.names, self.roots, self.base, blocks, self.cut)


class Number(NamedTuple):
    value: float


class Call(NamedTuple):
    """Operation on parts of the tree; ``op``: one of `cuda.messages.expression.OPERATIONS`."""

    op: str
    args: tuple[Any, ...]


Tree = Leaf | Number | Call

#: stands for an operation on a message and a score: the message, weighted by the softmax of the
#: score over the edges that enter a node. It becomes no step of an expression.
WEIGHTED = "weighted"

#: The operations on torch tensors, for what is computed before the kernels and where a backward is
#: itself recorded.
BY_TORCH: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in (
        "square", "reciprocal", "abs", "sign", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt",
        "sin", "cos", "erf", "sigmoid", "tanh", "relu", "maximum", "minimum", "where")},
    # operators, as these take a number in the first place, too
    **{name: getattr(operator, name) for name in (
        "add", "sub", "mul", "neg", "gt", "lt", "ge", "le", "eq", "ne", "pow")},
    "div": operator.truediv,
    "leaky_relu": F.leaky_relu, "elu": F.elu, "silu": F.silu, "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "softplus": F.softplus,
    "clamp_min": lambda x, least: torch.clamp(x, min=least),
    "clamp_max": lambda x, most: torch.clamp(x, max=most),
    "and": torch.logical_and, "or": torch.logical_or, "not": torch.logical_not,
    "float": lambda x: x.float()}


def another(tree: Tree) -> Tree:
    """A tree that computes the same, of rows that are others for the user."""
    if isinstance(tree, Leaf):
        return tree.viewed(tree.tail, tree.blocks)
    return Call(*tree) if isinstance(tree, Call) else tree


def leaves(tree: Tree,
           below: Callable[[Call], tuple] = operator.attrgetter("args")) -> list[Leaf]:
    """All leaves, from left to right; a leaf of a part that is used twice, once. ``below``: the
    arguments of an operation that count."""
    distinct: dict[int, Leaf] = {}
    seen: set[int] = set()
    stack = [tree]
    while stack:
        part = stack.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Leaf):
            distinct[id(part)] = part
        elif isinstance(part, Call):
            stack += reversed(below(part))
    return list(distinct.values())


def folded(tree: Tree, leaf: Callable[[Leaf], Any], number: Callable[[Number], Any],
           call: Callable[[str, tuple], Any]) -> Any:
    """Result for a tree, each part computed once: of an operation from its name and the results of
    its arguments."""
    return _fold(tree, {}, leaf, number, call)


def _fold(part: Tree, made: dict[int, Any], leaf: Callable, number: Callable,
          call: Callable) -> Any:
    """`folded`; ``made``: results of parts. Not a closure that calls itself, which would keep
    tensors until Python looks for cycles."""
    if id(part) not in made:
        if isinstance(part, Leaf):
            made[id(part)] = leaf(part)
        elif isinstance(part, Number):
            made[id(part)] = number(part)
        else:
            made[id(part)] = call(part.op, tuple([_fold(arg, made, leaf, number, call)
                                                  for arg in part.args]))
    return made[id(part)]


def mapped(tree: Tree, function: Callable[[Leaf], Leaf]) -> Tree:
    """The tree with each leaf replaced."""
    return folded(tree, function, lambda number: number, Call)


def computed(tree: Tree, given: Any) -> Any:
    """Value, by torch operations, of a tree whose leaves are at one end, or parameters. Of a leaf
    that has its shape it is the tensor itself, whose gradient users may ask for."""

    if type(tree) is Leaf:  # most are leaves
        return rows_of(given, tree)
    return _by_torch(tree, partial(rows_of, given))


def of_one(tree: Tree, rows: Tensor) -> Any:
    """Value, by torch operations, of a tree whose only leaf has these rows."""
    return _by_torch(tree, lambda leaf: rows)


def of_leaves(tree: Tree, rows: dict[int, Tensor]) -> Any:
    """Value, by torch operations, of a tree whose leaves have ``rows``, by their ids."""
    return _by_torch(tree, lambda leaf: rows[id(leaf)])


def _by_torch(tree: Tree, leaf: Callable[[Leaf], Tensor]) -> Any:
    return folded(tree, leaf, lambda number: number.value, lambda op, args: BY_TORCH[op](*args))


def rows_of(given: Any, leaf: Leaf) -> Tensor:
    """[rows, *tail]: the rows of a leaf, or [1, *tail] of a parameter."""
    t = leaf.make(given)
    shape = (1 if leaf.end == "p" else t.shape[0], *leaf.tail)
    return t if t.shape == shape else t.reshape(shape)


def expression(tree: Tree,
               mode: Callable[[Leaf], str]) -> tuple[Expression, list[Leaf], tuple[float, ...]]:
    """The tree with equal parts computed once, its inputs in the order of the expression, and its
    numbers. ``mode``: how a leaf lies over the channels of the message."""
    numbered: dict[tuple, int] = {}  # parts, as they are met; equal ones have equal keys
    inputs: dict[tuple, Leaf] = {}
    numbers: dict[tuple, float] = {}
    steps: list[tuple] = []

    def of_leaf(leaf: Leaf) -> int:
        key = leaf.key(mode(leaf))
        inputs.setdefault(key, leaf)
        return numbered.setdefault(key, len(numbered))

    def of_number(number: Number) -> int:
        key = ("number", repr(number.value))
        numbers.setdefault(key, number.value)
        return numbered.setdefault(key, len(numbered))

    def of_call(op: str, args: tuple[int, ...]) -> int:
        key = (op, *args)
        if key not in numbered:
            numbered[key] = len(numbered)
            steps.append(key)
        return numbered[key]

    trees = tree.args if isinstance(tree, Call) and tree.op == WEIGHTED else (tree,)
    results = [folded(part, of_leaf, of_number, of_call) for part in trees]
    place = {numbered[key]: k for k, key in enumerate((*inputs, *numbers, *steps))}
    expr = Expression(tuple(Input(leaf.end, key[2]) for key, leaf in inputs.items()), len(numbers),
                      tuple(Step(key[0], tuple(place[a] for a in key[1:])) for key in steps),
                      *[place[out] for out in results])  # type: ignore[arg-type]  # at most two
    return expr, list(inputs.values()), tuple(numbers.values())
