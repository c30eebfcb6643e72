"""Parts of a user's functions in which gradients are turned off or on, while these are traced:
whole functions under `torch.no_grad` or `torch.enable_grad`, and blocks of the latter."""
from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.tracing.layer import conditions
from gnnaccel.adapters.tracing.rows.standins import Unseen

#: the code of a function that stands around one under such a context
_DECORATED = torch.no_grad()(lambda: None).__code__


def inside(function: Any) -> tuple[Any, Callable[[], Any]]:
    """The function around which a context stands, and what makes that; others as they are."""
    if getattr(function, "__code__", None) is not _DECORATED:
        return function, contextlib.nullcontext
    held = {name: cell.cell_contents
            for name, cell in zip(_DECORATED.co_freevars, function.__closure__)}
    context, inner = type(getattr(held.get("ctx_factory"), "__self__", None)), held.get("func")
    if context not in _STAND_INS or type(inner) is not types.FunctionType:
        raise Unseen
    return inner, _STAND_INS[context]


class EnableGrad(torch.enable_grad):
    """Stand-in for `torch.enable_grad`. A call for which gradients are off is native: the host
    would record what is inside all the same."""

    def __enter__(self) -> None:
        conditions.noted(_recorded, True)
        super().__enter__()


def _recorded(given: Any) -> Tensor:
    return torch.tensor(given.grad, device="cpu")


_STAND_INS: dict[Any, Callable[[], Any]] = {torch.no_grad: torch.no_grad,
                                            torch.enable_grad: EnableGrad}
