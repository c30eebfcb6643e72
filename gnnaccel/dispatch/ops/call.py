"""`OpCall`: one call of an operation, understood, with the ways in which it can be run."""
from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.plan import compiling
from gnnaccel.dispatch.policy.reasons import Reason, reason


class Kernel(NamedTuple):
    """A way by kernels. ``key``: decides which kernels these are; ``compile`` gets them, or raises
    CompileError."""

    name: str
    key: Hashable
    compile: Callable[[], None]
    run: Callable[[], Any]


@dataclass(frozen=True)
class OpCall:
    """Call of an operation. ``plain`` runs it on torch operations; ``kernel``: by kernels, or why
    not; ``graph``: None if there is none; ``gains``: ``plain`` is faster than the host's code."""

    device: torch.device
    dtype: torch.dtype
    plain: Callable[[], Any]
    kernel: Kernel | Reason = field(default_factory=lambda: reason("GA208",
                                                                   "no kernel computes this form"))
    graph: OpGraph | None = None
    gains: bool = False


def compile_reason(kernel: Kernel) -> Reason | None:
    """Why the kernels of this way cannot run now; see `compiling.problem`."""
    return compiling.problem(kernel.key, kernel.compile)
