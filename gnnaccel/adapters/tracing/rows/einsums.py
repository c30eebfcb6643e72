"""Stand-in for `torch.einsum` while a ``message`` is traced: where it gives a row of each row.

Where it multiplies rows channel by channel, and may add up over the last dimension, it is a product
of such; other sums torch computes."""
from __future__ import annotations

import functools
import operator
import string
from typing import Any

import torch

from gnnaccel.adapters.tracing.attention.traced import Param, Value
from gnnaccel.adapters.tracing.nodes.node_values import NodeValue
from gnnaccel.adapters.tracing.rows.piles import Pile
from gnnaccel.adapters.tracing.rows.products import product
from gnnaccel.adapters.tracing.rows.standins import Unseen


def einsum(equation: Any, *operands: Any) -> Any:
    """`torch.einsum` where the rows are the first axis of all operands that have it."""
    if type(equation) is not str or len({_dtype(one) for one in operands}) != 1:
        raise Unseen
    if len(operands) == 1 and type(operands[0]) in (tuple, list):
        operands = tuple(operands[0])
    operands = tuple([one.joined() if type(one) is Pile else one for one in operands])
    inputs, arrow, out = _spelled(equation.replace(" ", ""), operands).partition("->")
    equation = f"{inputs}->{out}"
    terms = inputs.split(",")
    input_axes = dict.fromkeys("".join(terms))
    if not out or len(terms) != len(operands) or not (out + "".join(terms)).isalpha() or any(
        axis not in input_axes for axis in out):
        raise Unseen
    if all(isinstance(one, Param) for one in operands):
        return operands[0].operate("einsum", torch.einsum, (equation, *operands), {})
    if any(not _has_rows_first(one, term, out[0]) for one, term in zip(operands, terms)):
        raise Unseen
    summed = [axis for axis in input_axes if axis not in out]
    axes = out + "".join(summed)
    if len(summed) > 1 or any(not _in_order(term, axes) for term in terms):
        return product(functools.partial(torch.einsum, equation), operands)
    result = functools.reduce(operator.mul, [_aligned(one, term, axes)
                                             for one, term in zip(operands, terms)])
    return result.sum(-1) if summed else result


def _spelled(equation: str, operands: tuple) -> str:
    """The equation with letters in place of "...", which stand for as many axes of each operand."""
    inputs, _, out = equation.partition("->")
    counts = {one.meta.dim() - len(term) + 3 for term, one in zip(inputs.split(","), operands)
              if "..." in term and isinstance(one, Value)}
    if len(counts) != 1:
        return equation
    letters = "".join(sorted(set(string.ascii_letters) - set(equation))[:counts.pop()])
    return equation.replace("...", letters)


def _dtype(operand: Any) -> Any:
    """The dtype; Unseen for results of an ``aggregate``, as torch may use autocast on these."""
    if not isinstance(operand, Value) or isinstance(operand, NodeValue) or (
        not operand.meta.is_floating_point()):
        raise Unseen
    return operand.meta.dtype


def _has_rows_first(operand: Any, term: str, rows: str) -> bool:
    """Whether the axis ``rows`` is the first of this operand; a parameter has none for them."""
    return operand.meta.dim() == len(term) and (
        rows not in term if isinstance(operand, Param)
        else term[0] == rows and rows not in term[1:])


def _in_order(term: str, axes: str) -> bool:
    """Whether the axes are in this order, each once."""
    return len(set(axes)) == len(axes) and term == "".join(axis for axis in axes if axis in term)


def _aligned(operand: Any, term: str, axes: str) -> Any:
    """The operand with an axis for each of ``axes``; a parameter has none for the rows."""
    for at, axis in enumerate(axes[1:] if isinstance(operand, Param) else axes):
        if axis not in term:
            operand = operand.unsqueeze(at)
    return operand
