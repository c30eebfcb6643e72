"""How a script's process is made to run otherwise: dropout off, so that two runs compute the same;
and steps natively, enabled and captured in turns, so that all have the same core and the same data.
One run of a process may be slower throughout than the next by half."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from gnnaccel import adapters, session
from gnnaccel.dispatch.policy import config as configs
from gnnaccel.profile.bench.script_child import BLOCK, CAPTURE, ENABLED, NATIVE

#: what the functions of ``torch.nn.functional`` call; with "_" behind their names they write in
#: place
_FUNCTIONS = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")


def switch_dropout_off() -> None:
    """``torch.dropout``, ``torch.nn.functional.dropout`` and their kin return what they are given,
    and modules that are made from here on get 0 for the probabilities that they keep: as ``p`` in
    torch's own, in others under any name with "drop" in it. Not reached: a number that a layer's
    ``message`` itself hands to ``dropout``, which kernels of messages take as it is, and edges or
    nodes that a script leaves out by its own random numbers. TorchScript cannot compile a dropout
    that is off."""
    for name in _FUNCTIONS:
        for found in (name, f"{name}_"):
            for place in (torch, torch._VF):
                setattr(place, found, _idle(getattr(place, found)))
    assign: Callable = torch.nn.Module.__setattr__

    @functools.wraps(assign)
    def assign_without(module: Any, name: str, value: Any) -> None:
        assign(module, name, 0.0 if _is_probability(module, name, value) else value)

    torch.nn.Module.__setattr__ = assign_without  # type: ignore[method-assign, assignment]


def _idle(function: Callable) -> Callable:
    def not_training(x: Any, p: float, train: bool) -> Any:
        return function(x, p, False)

    return not_training


def _is_probability(module: torch.nn.Module, name: str, value: Any) -> bool:
    return type(value) is float and ("drop" in name or name == "p" and isinstance(
        module, torch.nn.modules.dropout._DropoutNd))


class Turns:
    """Switches between the ways after each block of steps, and begins natively; ``ways``: of each
    step so far. Captured steps have turns where the script uses a GPU."""

    def __init__(self) -> None:
        self.ways: list[str] = []
        self._way, self._order = NATIVE, [ENABLED]
        self._aside = contextlib.ExitStack()
        self._made: dict[str, Any] = {}

    def stepped(self) -> None:
        self.ways.append(self._way)
        if len(self.ways) % BLOCK:
            return
        if not self._order:
            self._order = [NATIVE, ENABLED] + [CAPTURE] * torch.cuda.is_initialized()
            if len(self.ways) // BLOCK // len(self._order) % 2:
                self._order.reverse()
        self._put(self._order.pop(0))

    def _put(self, way: str) -> None:
        self._aside.close()
        if not self._made:  # all that the script uses is imported by now
            for one in (CAPTURE, ENABLED):
                session.enable(first_use="wait", capture=one == CAPTURE)
                self._made[one] = configs.active()
        if way == NATIVE:
            self._aside.enter_context(adapters.aside())
            configs.set_active(None)
        else:
            session.again(self._made[way])
        self._way = way
