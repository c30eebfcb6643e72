"""Dropout off in a whole process, so that two runs of a script compute the same."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

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
