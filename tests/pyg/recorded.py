"""A stand-in for CUDA graphs on a CPU: torch operations are written down, and run again in place.

Kernels of gnnaccel are not seen, and its layers run natively while operations are written down.
"""
from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gnnaccel.adapters.captured import graphs, modules


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **(kwargs or {}))
        self.steps.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out in self.steps:
            given = {id(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            memory = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs))
                      if isinstance(t, torch.Tensor)}
            new = _uncounted(func, args, kwargs)
            for held, made in zip(tree_leaves(out), tree_leaves(new)):
                if (isinstance(held, torch.Tensor) and id(held) not in given
                    and held.untyped_storage().data_ptr() not in memory):
                    held.copy_(made)


def _uncounted(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation whose writes torch does not count, as those of a CUDA graph."""
    with contextlib.ExitStack() as stack:
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, torch.Tensor) and not t.is_inference():
                stack.enter_context(_unsafe_preserve_version_counter(t))
        return func(*args, **kwargs)


def record(work: Any, pool: Any, device: torch.device) -> tuple:
    tape = Tape()
    try:
        with tape:
            found = work()
    except RuntimeError as problem:
        raise graphs.Refused(f"it cannot be captured: {problem}") from None
    return tape.replay, found


@pytest.fixture
def recorded(monkeypatch: Any) -> Any:
    """Modules on the CPU are captured by `record`; `counts.summary` begins at zero."""
    monkeypatch.setattr(graphs, "record", record)
    monkeypatch.setattr(graphs, "memory_pool", lambda device: None)
    monkeypatch.setattr(graphs, "on_the_side", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(modules, "DEVICES", {"cpu"})
    modules.reset()
    yield
    modules.reset()
