"""Reporting a decided call of a layer, an aggregation inside one or a single operation: warnings
about native calls, and the records of forward and backward.
"""
from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.dispatch.observe import records
from gnnaccel.dispatch.plan.planner import Plan, Rejected
from gnnaccel.dispatch.policy import names
from gnnaccel.errors import FallbackError


class Subject(NamedTuple):
    """Facts of a call that do not depend on the decision. ``name``: the layer's class, or the
    operation; ``layer``: None of an operation; ``row``, ``out``: dtypes of the rows and of the
    result, None where the call was not understood."""

    host: str
    name: str
    layer: Any = None
    device: str = "cpu"
    row: torch.dtype | None = None
    out: torch.dtype | None = None


# --- native calls ---------------------------------------------------------------------------------

_warned: set[tuple[str, str]] = set()


def object_to(name: str, how: str, rejected: Rejected) -> None:
    """Say that ``name`` runs natively, once per cause (``how`` "warn"), or raise FallbackError
    ("raise")."""
    text = "; ".join(f"{candidate}: {r} ({r.hint})" for candidate, r in rejected)
    if how == "raise":
        raise FallbackError(f"{name} would run natively: {text}")
    # texts hold estimates, which change with sizes
    key = (name, " ".join(r.code for _, r in rejected))
    if key not in _warned:
        _warned.add(key)
        warnings.warn(f"gnnaccel: {name} runs natively: {text}", RuntimeWarning,
                      stacklevel=callers_level("gnnaccel", "torch"))


def callers_level(*packages: str) -> int:
    """The ``stacklevel`` that makes a warning point at the user's line: the first frame in none of
    these packages."""
    level, frame = 1, sys._getframe(1)
    while (frame.f_back is not None
           and frame.f_globals.get("__name__", "").partition(".")[0] in packages):
        level, frame = level + 1, frame.f_back
    return level


# --- records --------------------------------------------------------------------------------------

def forward(subject: Subject, plan: Plan, graph: dict[str, Any] | None, cache: str, spent: float,
            passes: dict[str, Any] | None = None) -> int:
    """Write the record of a decision; its number. ``graph``, ``cache``, ``passes``: as `records`
    has them; ``spent``: microseconds that the decision took."""
    record = records.new(
        graph=graph, cache=cache, passes=passes, overhead_us=spent, grad=torch.is_grad_enabled(),
        cost_us=_microseconds(plan.seconds), native_us=_microseconds(plan.native_seconds),
        kernel=plan.kernel,
        rejected=[dict(candidate=candidate, code=r.code, text=r.text, hint=r.hint)
                  for candidate, r in plan.rejected],
        **_fields(subject, plan))
    records.emit(record)
    return record["call"]


def told(subject: Subject, plan: Plan, graph: Any, spent: float, out: Any = None) -> None:
    """Write the record of a call over ``graph``, an `ops.graph.OpGraph` or None. ``out``: its
    result, a tensor or several; the first that is differentiated reports its backward."""
    number = forward(subject, plan, None if graph is None else graph.facts(),
                     "none" if graph is None else graph.cached, spent)
    for t in out if isinstance(out, (tuple, list)) else (out,):
        if isinstance(t, Tensor) and t.requires_grad:
            t.register_hook(on_backward(subject, plan, number))
            return


def on_backward(subject: Subject, plan: Plan, number: int) -> Callable[[Tensor], None]:
    """A hook of the result of the call that has this ``number``: it writes the record of its
    backward."""

    def hook(_: Tensor) -> None:
        if records.listening():
            # a backward that is itself recorded runs on torch operations
            kernel = ("torch backend" if plan.route == "cuda" and torch.is_grad_enabled()
                      else plan.kernel)
            records.emit(records.new(direction="backward", forward_call=number, grad=True,
                                     kernel=kernel, **_fields(subject, plan)))

    return hook


def _fields(subject: Subject, plan: Plan) -> dict[str, Any]:
    layer, device = subject.layer, subject.device
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return dict(host=subject.host, layer=subject.name, route=plan.route, storage=plan.storage,
                name=None if layer is None else names.name_of(layer),
                training=layer is not None and bool(layer.training),
                dtype=_text(subject.row), out_dtype=_text(subject.out), autocast=_text(autocast),
                deterministic=torch.are_deterministic_algorithms_enabled(),
                capturing=device == "cuda" and torch.cuda.is_current_stream_capturing())


def _microseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6


def _text(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
