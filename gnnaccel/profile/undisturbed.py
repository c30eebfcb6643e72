"""Running a model on the side: afterwards random numbers, buffers, modes and attributes are as if
it had not run."""
from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parameter import UninitializedParameter

from gnnaccel.dispatch.policy.names import require_model

_TABLES = ("_parameters", "_buffers", "_modules")


class RandomState:
    """Where the generators stand: torch's (of every GPU, once CUDA is in use), Python's and
    NumPy's."""

    def __init__(self) -> None:
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def moved(self) -> bool:
        """Whether a random number was drawn since, by torch or by Python's generator."""
        now = RandomState()
        return not (torch.equal(now._torch, self._torch) and now._python == self._python
                    and len(now._cuda) == len(self._cuda)
                    and all(map(torch.equal, now._cuda, self._cuda)))


def capturing() -> bool:
    """Whether a CUDA graph is being captured here."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def repeatable() -> bool:
    """Whether a call can be repeated here: neither within a backward pass nor within a capture."""
    return torch._C._current_graph_task_id() == -1 and not capturing()


@contextlib.contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """A block in which ``model`` may run, and its tables of parameters and buffers be filled with
    others. Buffers inside are copies. Afterwards every module has the very attributes, parameters
    and buffers that it had, and the generators stand where they stood. What a forward changes
    inside Python containers of its own is not seen."""
    generators = RandomState()
    saved = [_saved(module) for module in model.modules()
             if not isinstance(module, torch.jit.ScriptModule)]
    try:
        copies: dict[int, Any] = {}
        for module, _, tables in saved:
            for name, buffer in tables["_buffers"].items():
                if buffer is not None:
                    module._buffers[name] = copies.setdefault(id(buffer), buffer.clone())
        yield
    finally:
        for module, attributes, tables in saved:
            _restore(module, attributes, tables)
        generators.restore()


def _saved(module: torch.nn.Module) -> tuple[torch.nn.Module, dict[str, Any], dict[str, dict]]:
    own = module.__dict__
    return module, dict(own), {table: dict(own[table]) for table in _TABLES}


def _restore(module: torch.nn.Module, attributes: dict[str, Any], tables: dict[str, dict]) -> None:
    own = module.__dict__
    for name in own.keys() - attributes.keys():
        del own[name]
    own.update(attributes)
    for table, entries in tables.items():
        if not _same(own[table], entries):
            own[table].clear()
            own[table].update(entries)


def _same(table: dict[str, Any], entries: dict[str, Any]) -> bool:
    """Equality by identity: tensors are compared elementwise otherwise."""
    return (list(table) == list(entries)
            and all(table[name] is value for name, value in entries.items()))


def check_model(model: torch.nn.Module, what: str) -> None:
    """TypeError for what is no model; ValueError for one with parameters that its first call will
    make: that would change it."""
    require_model(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"{what}: parameter {name!r} of {type(model).__name__} is not "
                             "initialised yet, and the first call would do that. Call the model "
                             "once on a batch of yours first")
