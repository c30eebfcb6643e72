"""What stands for `torch.einsum` while a ``message`` is traced: where it multiplies rows channel by
channel, and may add up over the last dimension."""
from __future__ import annotations

import functools
import operator
from typing import Any

from gnnaccel.adapters.pyg.propagate.node_values import NodeValue
from gnnaccel.adapters.pyg.propagate.row_count import ROWS
from gnnaccel.adapters.pyg.propagate.standins import Unseen
from gnnaccel.adapters.pyg.propagate.traced import Param, Value


def einsum(equation: Any, *operands: Any) -> Any:
    """As torch has it, of operands whose axes are in the same order as those of the result."""
    if type(equation) is not str or len({_dtype(one) for one in operands}) != 1:
        raise Unseen
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    inside = dict.fromkeys("".join(terms))
    summed = [axis for axis in inside if axis not in out]
    axes = out + "".join(summed)
    if not out or len(summed) > 1 or len(terms) != len(operands) or not axes.isalpha() or any(
        axis not in inside for axis in out):
        raise Unseen
    if len(set(axes)) < len(axes) or all(isinstance(one, Param) for one in operands):
        raise Unseen
    found = functools.reduce(operator.mul, [_aligned(one, term, axes)
                                            for one, term in zip(operands, terms)])
    return found.sum(-1) if summed else found


def _dtype(operand: Any) -> Any:
    """Unseen of results of an ``aggregate``: torch goes on with these, maybe under autocast."""
    if not isinstance(operand, Value) or isinstance(operand, NodeValue) or (
        not operand.meta.is_floating_point()):
        raise Unseen
    return operand.meta.dtype


def _aligned(operand: Any, term: str, axes: str) -> Any:
    """The operand with an axis for each of ``axes``; a parameter has none for the rows."""
    if isinstance(operand, Param):
        axes = axes[1:]
    elif operand.meta.shape[0] != ROWS or term[:1] != axes[0]:
        raise Unseen
    # in this order, each once
    if operand.meta.dim() != len(term) or term != "".join(axis for axis in axes if axis in term):
        raise Unseen
    for at, axis in enumerate(axes):
        if axis not in term:
            operand = operand.unsqueeze(at)
    return operand
