"""Cuts a message where no gradient arrives: below comparisons."""
from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.cuda.messages.expression import CHANNEL_SUM
from gnnaccel.dispatch.generated.tree import Call, Leaf, Make, Tree, leaves

#: operations of which no gradient reaches the arguments, or just the first
_NOTHING = frozenset(("gt", "lt", "ge", "le", "eq", "ne", "and", "or", "not", "float"))
_TEST = "where"
#: a gradient of 0 stays 0 on the way through these, whatever their arguments
_HARMLESS = frozenset(("add", "sub", "neg", "abs", "relu", CHANNEL_SUM))


def cut(tree: Tree) -> Tree:
    """The tree with leaves of their own, without gradients, below comparisons.

    A value that is only compared then has no gradient, as with torch. A leaf that is used elsewhere
    too is read a second time where the gradient would not stay 0 on its way: that of a square root
    of 0 is infinite, and times 0 it is NaN.
    """
    reached = _reached(tree)
    cut_off: dict[int, Leaf] = {}  # detached leaves by the ids of their bases
    copies: dict[tuple[int, str], Tree] = {}

    def of_leaf(leaf: Leaf, way: str) -> Leaf:
        if way == "open" or (way == "harmless" and id(leaf.base) in reached):
            return leaf
        detached = without_gradient(leaf, cut_off.get(id(leaf.base)))
        cut_off.setdefault(id(leaf.base), detached)
        return detached

    def of(part: Tree, way: str) -> Tree:
        """``way``: the place of the part: below nothing ("open"), below a comparison and operations
        that are "harmless", or below others ("harmful")."""
        key = id(part), way
        if key not in copies:
            if isinstance(part, Leaf):
                copies[key] = of_leaf(part, way)
            elif isinstance(part, Call):
                copies[key] = Call(part.op, tuple([of(arg, _way(part.op, k, way))
                                                   for k, arg in enumerate(part.args)]))
            else:
                copies[key] = part
        return copies[key]

    return of(tree, "open")


def _way(op: str, k: int, above: str) -> str:
    """The way to argument ``k`` of an operation that is reached by ``above``."""
    if op in _NOTHING or (op == _TEST and k == 0):
        return "harmless"
    return above if above == "open" or op in _HARMLESS else "harmful"


def _reached(tree: Tree) -> set[int]:
    """Ids of the bases of all leaves that a gradient reaches."""
    return {id(leaf.base) for leaf in leaves(
        tree, lambda call: () if call.op in _NOTHING else call.args[call.op == _TEST:])}


def without_gradient(leaf: Leaf, base: Leaf | None) -> Leaf:
    """A leaf of the same numbers without a gradient. ``base``: its base, if it is a view."""
    return Leaf(leaf.end, make_without_gradient(leaf.make), leaf.tail, leaf.names,
                tuple(map(make_without_gradient, leaf.roots)), base, leaf.blocks)


def make_without_gradient(make: Make) -> Make:
    """``make`` without gradients: its result is detached."""

    def made(given: dict) -> Tensor:
        with torch.no_grad():
            return make(given).detach()

    return made
