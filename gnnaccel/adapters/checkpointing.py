"""The configuration of calls that an activation checkpoint repeats in backward: that of forward.

``torch.utils.checkpoint`` compares what both save, and random numbers have to be the same. A
forward in a block of ``gnnaccel.enabled()`` is often differentiated after it, where the same layers
would run natively.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from gnnaccel.adapters.patching import PatchSet
from gnnaccel.dispatch.policy import config as configs
from gnnaccel.dispatch.policy.config import current

# the function behind torch.utils.checkpoint.checkpoint that keeps what is to be repeated
_KEEPS = "_checkpoint_without_reentrant_generator"


def install(patches: PatchSet) -> None:
    """Wrap both ways in which torch repeats a forward. Does nothing where this torch has none by
    that name."""
    from torch.utils import checkpoint

    places = ((checkpoint, _KEEPS, _keeping),
              (getattr(checkpoint, "CheckpointFunction", None), "forward", _reentrant))
    for owner, name, wrapped in places:
        if hasattr(owner, name):
            patches.set(
                owner, name, wrapped(getattr(owner, name)),
                "Runs what a checkpoint repeats in backward by the configuration under which it "
                "ran in forward, natively or not: both have to save the same tensors.",
                active="When backward runs under another configuration than forward did, as after "
                       "a block of `gnnaccel.enabled()`.",
                cost="A microsecond for each checkpoint. Where gnnaccel is not enabled in backward "
                     "any more, its replacements are put in again while a checkpoint is repeated, "
                     "which takes some milliseconds.")


def _keeping(native: Callable) -> Callable:
    @functools.wraps(native)
    def keep(fn: Callable, *args: Any, **kwargs: Any) -> Any:
        return native(_as_in_forward(fn), *args, **kwargs)

    return keep


def _reentrant(native: Callable) -> Any:
    @functools.wraps(native)
    def forward(ctx: Any, run_function: Callable, *args: Any) -> Any:
        return native(ctx, _as_in_forward(run_function), *args)

    return staticmethod(forward)


def _as_in_forward(function: Callable) -> Callable:
    """``function``, for which the configuration of now holds whenever it runs."""
    config = current()

    def run(*args: Any, **kwargs: Any) -> Any:
        if current() is config:
            return function(*args, **kwargs)
        with configs.override(None) if config is None else configs.block(config):
            return function(*args, **kwargs)

    return run
