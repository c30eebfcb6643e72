"""Questions that a ``message`` asks about numbers, such as whether there are edges of a kind, or
whether a tensor of one number is larger than another. The trace goes one way; in each call the
answer has to be the same, else the call is native. The host asks the device as well."""
from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters.tracing.attention.traced import Param
from gnnaccel.adapters.tracing.noted import notes
from gnnaccel.adapters.tracing.rows.specials import UP_TO_LAST, Special
from gnnaccel.adapters.tracing.rows.standins import NUMBERS, Unseen
from gnnaccel.cuda.runtime import capture


class Condition(NamedTuple):
    """One truth value, ``make`` of the arguments of a call, and the ``answer`` that was given."""

    make: Callable[[Any], Tensor]
    answer: bool


def noted(make: Callable[[Any], Tensor], answer: bool | None = None) -> bool:
    """The answer to a question, which is noted: the one expected, or that of the call at hand."""
    now = notes()
    if now.conditions is None or now.arguments is None or capture.capturing():
        raise Unseen
    if answer is None:
        with torch.no_grad():
            answer = bool(make(now.arguments))
    now.conditions.append(Condition(make, answer))
    return answer


def hold(conditions: tuple[Condition, ...], given: Any) -> bool:
    """Whether all answers are the same in a call."""
    if not conditions:
        return True
    if capture.capturing():
        return False
    with torch.no_grad():
        truths = [one.make(given) for one in conditions]
        # those of a tensor that the layer has elsewhere than its rows are asked alone
        together = len({one.device for one in truths}) == 1
        answers = torch.stack(truths).tolist() if together else list(map(bool, truths))
    return answers == [one.answer for one in conditions]


def more_than_ids(last: Special) -> bool:
    """Whether there are as many nodes as ids name up to the ``last``; where there are fewer, the
    call is native."""
    if last.name != UP_TO_LAST + "i":
        raise Unseen
    return noted(lambda given: given.graph.edge_index.amax() < given.graph.num_dst, True)


class Compared:
    """Stand-in for what a comparison of one number gives, of which no more is asked than whether it
    is true."""

    def __init__(self, make: Callable[[Any], Tensor]):
        self.make = make

    def __bool__(self) -> bool:
        return noted(self.make)

    def _refuses(self, *args: Any) -> Any:
        raise Unseen

    __eq__ = __ne__ = _refuses
    __str__ = __repr__ = __format__ = _refuses
    __hash__ = object.__hash__


def _compared(compare: Callable[[Any, Any], Any], one: Param, other: Any) -> Any:
    if type(other) not in NUMBERS or one.meta.numel() != 1:
        return NotImplemented
    # to ask of rows is to compute them: what keeps statistics or draws numbers would do so twice
    if one.names and notes().effects:
        raise Unseen

    def make(given: Any) -> Tensor:
        return compare(one.make(given), other).reshape(())

    return Compared(make)


def _comparing(compare: Callable[[Any, Any], Any]) -> Callable[[Param, Any], Any]:
    return lambda one, other: _compared(compare, one, other)


for _compare in (operator.gt, operator.ge, operator.lt, operator.le):
    setattr(Param, f"__{_compare.__name__}__", _comparing(_compare))
