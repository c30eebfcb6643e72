"""Layers whose weights were made inside of a checkpoint. The call that made them went natively, and
so must its repetition in backward, when they are there: both have to save the same tensors."""
from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import UninitializedParameter

from gnnaccel.dispatch.memory.checkpoints import checkpointed
from gnnaccel.dispatch.policy.names import IdentityMap
from gnnaccel.dispatch.policy.reasons import Reason, reason

_made: IdentityMap[bool] = IdentityMap()


def note(layer: Any, native: bool) -> None:
    """Of a call that goes ``native`` or not."""
    if (native and checkpointed()
        and any(isinstance(p, UninitializedParameter) for p in layer.parameters())):
        _made.set(layer, True)
    elif made_here(layer) and torch._C._current_graph_task_id() == -1:
        _made.set(layer, False)  # the next forward call: as ever


def made_here(layer: Any) -> bool:
    """Whether a call that is under way is such a one, or its repetition."""
    return bool(_made.entries) and bool(_made.get(layer))


def repeated_reason(layer: Any) -> Reason | None:
    """Why a call that may be such a repetition goes native."""
    if not made_here(layer) or torch._C._current_graph_task_id() == -1:
        return None
    return reason("GA209", "a checkpoint repeats the call that made the weights")
