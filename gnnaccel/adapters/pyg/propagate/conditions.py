"""Questions that a ``message`` asks about numbers, such as whether there are edges of a kind. The
trace goes one way; in each call the answer has to be the same, else the call is native. The host
asks the device as well."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters.pyg.propagate.expressed import notes
from gnnaccel.adapters.pyg.propagate.standins import Unseen
from gnnaccel.cuda import capture


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
        answers = torch.stack([one.make(given) for one in conditions]).tolist()
    return answers == [one.answer for one in conditions]
