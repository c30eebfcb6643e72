"""Where no gradient arrives in a message: below comparisons."""
from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.cuda.expression import CHANNEL_SUM
from gnnaccel.dispatch.generated.tree import Call, Leaf, Make, Tree

#: operations of which no gradient reaches the arguments, or just the first
_NOTHING = frozenset(("gt", "lt", "ge", "le", "eq", "ne", "and", "or", "not", "float"))
_TEST = "where"
#: a gradient of 0 stays 0 on the way through these, whatever their arguments
_HARMLESS = frozenset(("add", "sub", "neg", "abs", "relu", CHANNEL_SUM))


def cut(tree: Tree) -> Tree:
    """The same, with leaves of their own, without gradients, below comparisons.

    So what is only compared has no gradient, as with torch. What is used elsewhere too is read a
    second time where the gradient would not stay 0 on its way: that of a square root of 0 is
    infinite, and times 0 it is NaN.
    """
    reached = _reached(tree)
    cut_off: dict[int, Leaf] = {}  # by what they are views of
    made: dict[tuple[int, str], Tree] = {}

    def of_leaf(leaf: Leaf, way: str) -> Leaf:
        if way == "open" or (way == "harmless" and id(leaf.base) in reached):
            return leaf
        found = without_gradient(leaf, cut_off.get(id(leaf.base)))
        cut_off.setdefault(id(leaf.base), found)
        return found

    def of(part: Tree, way: str) -> Tree:
        """``way``: what the part is below: nothing ("open"), a comparison and operations that are
        "harmless", or others ("harmful")."""
        key = id(part), way
        if key not in made:
            if isinstance(part, Leaf):
                made[key] = of_leaf(part, way)
            elif isinstance(part, Call):
                made[key] = Call(part.op, tuple([of(arg, _way(part.op, k, way))
                                                 for k, arg in enumerate(part.args)]))
            else:
                made[key] = part
        return made[key]

    return of(tree, "open")


def _way(op: str, k: int, above: str) -> str:
    """The way to argument ``k`` of an operation that is reached by ``above``."""
    if op in _NOTHING or (op == _TEST and k == 0):
        return "harmless"
    return above if above == "open" or op in _HARMLESS else "harmful"


def _reached(tree: Tree) -> set[int]:
    """Of leaves that a gradient reaches, the ids of what they are views of."""
    found, seen, left = set(), set(), [tree]
    while left:
        part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Leaf):
            found.add(id(part.base))
        elif isinstance(part, Call) and part.op not in _NOTHING:
            left += part.args[part.op == _TEST:]
    return found


def without_gradient(leaf: Leaf, base: Leaf | None) -> Leaf:
    """The same numbers without a gradient. ``base``: what they are then a view of, if anything."""
    return Leaf(leaf.end, make_without_gradient(leaf.make), leaf.tail, leaf.names,
                tuple(map(make_without_gradient, leaf.roots)), base, leaf.blocks)


def make_without_gradient(make: Make) -> Make:
    """Makes the same without gradients."""

    def made(given: dict) -> Tensor:
        with torch.no_grad():
            return make(given).detach()

    return made
