"""Calls that come before the one that is judged, in another mode.

What gnnaccel keeps of a function or a class lives as long as the process. Once the first call of all
has made an entry, later ones find it, so what only a first call gets wrong shows in one case of a
process at most. Half of the cases therefore begin as in a new process (`forget`), and half begin with
a call whose results nobody looks at (`drawn`), of the host's own layer as well, which may keep
something of it itself.
"""

from __future__ import annotations

import random
import sys
from types import CodeType, FunctionType

import torch
from torch import nn

from .graphs import Case
from .modes import MODES, Mode, once

#: modes of an earlier call, in the case's own precision
BEFORE = [name for name, mode in MODES.items() if mode.dtype is None and name != "compiled"]


def drawn(seed: int) -> tuple[bool, str | None]:
    """Whether a case begins as in a new process, and the mode of an earlier call, if it has one."""
    r = random.Random(f"earlier {seed}")
    new = r.random() < 0.5
    return new, r.choice(BEFORE) if r.random() < 0.5 else None


def forget() -> None:
    """Drop what is kept of functions and classes, as if this process had not called them yet."""
    from gnnaccel.dispatch.policy.names import IdentityMap

    for name, module in list(sys.modules.items()):
        if name.startswith("gnnaccel."):
            for value in list(vars(module).values()):
                if type(value) is IdentityMap:
                    for key, (owner, _) in value.entries.copy().items():  # objects may go
                        if isinstance(owner(), (CodeType, FunctionType, type)):
                            value.entries.pop(key, None)


def call(module: nn.Module, case: Case, mode: Mode, device: torch.device, seed: int) -> None:
    """A call of ``module`` in ``mode``, which may raise. What is trained is afterwards as before."""
    trained = [(p, p.requires_grad) for p in module.parameters()]
    training = module.training
    module.train(mode.train)
    if not mode.parameters:
        module.requires_grad_(False)
    try:
        once(module, case, mode, device, seed)
    finally:
        module.train(training)
        for parameter, was in trained:
            parameter.requires_grad_(was)
