"""Several messages as one, so that one kernel reads once what they share."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gnnaccel.adapters.tracing.expressed import Message, pieces_of
from gnnaccel.cuda.messages.expression import Expression, Input, Step
from gnnaccel.cuda.runtime.launch import layout_for
from gnnaccel.dispatch.generated.messages import MOST
from gnnaccel.dispatch.generated.tree import Leaf
from gnnaccel.dispatch.ops.aggregation import Reduce

#: numbers that a lane may hold of the rows and results of one edge
_MOST_NUMBERS = 96


def joined(messages: Sequence[Message], reduces: Sequence[Reduce]) -> tuple[Message, ...]:
    """One message with several results, where ``reduces`` are all sums or all means; the messages
    as they are for others, and where they read no rows in common, differ in shape, or take too many
    registers."""
    first = messages[0]
    if len(messages) == 1 or len(set(reduces)) > 1 or reduces[0] not in ("sum", "mean") or any(
        one.after is not None or one.expression.score is not None or one.expression.others
        or (one.shape, one.seen, one.turned) != (first.shape, first.seen, first.turned)
        for one in messages):
        return tuple(messages)
    whole = _joined(messages)
    rows, layout = _rows(whole), layout_for(*first.seen)
    if (rows == sum(map(_rows, messages)) or rows > MOST
        or (rows + len(messages)) * layout.packs * layout.vec > _MOST_NUMBERS):
        return tuple(messages)
    return (whole,)


def _rows(message: Message) -> int:
    return sum(one.mode == "row" for one in message.expression.inputs)


def _joined(messages: Sequence[Message]) -> Message:
    """One expression of all, in which equal values are computed once."""
    inputs: dict[tuple, tuple[Leaf, Input]] = {}
    numbers: dict[str, float] = {}
    steps: dict[tuple, None] = {}
    outs = []
    for one in messages:
        expression = one.expression
        keys: list[Any] = []  # of the values, by which equal ones are known
        for leaf, source in zip(one.leaves, expression.inputs):
            keys.append(leaf.key(source.mode))
            inputs.setdefault(keys[-1], (leaf, source))
        for number in one.numbers:
            keys.append(("number", repr(number)))
            numbers.setdefault(repr(number), number)
        for op, args in expression.steps:
            keys.append((op, *[keys[a] for a in args]))
            steps.setdefault(keys[-1])
        outs.append(keys[expression.out])
    named = (*inputs, *[("number", text) for text in numbers], *steps)
    place = {key: at for at, key in enumerate(named)}
    out, *others = [place[key] for key in outs]
    expression = Expression(
        tuple([source for _, source in inputs.values()]), len(numbers),
        tuple([Step(op, tuple([place[a] for a in args])) for op, *args in steps]), out,
        others=tuple(others))
    leaves = tuple([leaf for leaf, _ in inputs.values()])
    return Message(expression, leaves, tuple(numbers.values()), messages[0].shape,
                   messages[0].seen, turned=messages[0].turned, pieces=pieces_of(leaves))
