"""Messages that are multiplied with a softmax over neighbours, as one expression with a score."""
from __future__ import annotations

import math

from gnnaccel.adapters.tracing.expressed import Message, Softmax, expressed, reshaped
from gnnaccel.adapters.tracing.rows.standins import Unseen
from gnnaccel.dispatch.generated.messages import MOST
from gnnaccel.dispatch.generated.tree import WEIGHTED, Call, Leaf, Number, Tree, leaves


def weighted(tree: Tree, shape: tuple[int, ...]) -> Message | None:
    """The message of this ``shape`` that a tree computes, if it is a product with a softmax that
    has a number for each head, or one for all, and kernels can be written for it."""
    factors = _factored(tree)
    if factors is None or not all(shape):
        return None
    leaf, factor = factors
    softmax: Softmax = leaf.make  # type: ignore[assignment]
    count, numbers = softmax.count, math.prod(shape)
    by_head = count == 1 or (numbers > count and leaf.blocks == count) or (
        len(leaf.tail) == len(shape) and leaf.tail == (*shape[:-1], 1) and shape[-1] > 1)
    if not by_head or isinstance(factor, Number) or any(map(_of_softmax, leaves(factor))):
        return None
    try:
        score = reshaped(reshaped(softmax.tree, softmax.tail, (count, 1)),
                         (count, numbers // count), shape)
        message = expressed(Call(WEIGHTED, (factor, score)), shape, None if count == 1 else count)
    except Unseen:
        return None
    return message if message is not None and _fits(message) else None


def _factored(tree: Tree) -> tuple[Leaf, Tree] | None:
    """The softmax that a tree is a product with, and the other factor."""
    if isinstance(tree, Leaf):
        softmax = tree.make if type(tree.make) is Softmax and tree.make.end == "i" else None
        return None if softmax is None else (tree, Number(1.0))
    if not isinstance(tree, Call) or tree.op not in ("mul", "div", "neg"):
        return None
    for at, arg in enumerate(tree.args[:1 if tree.op == "div" else 2]):
        factors = _factored(arg)
        if factors is not None:
            leaf, factor = factors
            if tree.op == "mul" and isinstance(factor, Number) and factor.value == 1.0:
                return leaf, tree.args[1 - at]
            return leaf, Call(tree.op, (*tree.args[:at], factor, *tree.args[at + 1:]))
    return None


def _of_softmax(leaf: Leaf) -> bool:
    return any(isinstance(one, Softmax) for one in leaf.names)


def _fits(message: Message) -> bool:
    expr = message.expression
    rows = sum(one.mode == "row" for one in expr.inputs)
    return expr.scored_by_head and rows <= MOST and len(expr.inputs) <= 2 * MOST
