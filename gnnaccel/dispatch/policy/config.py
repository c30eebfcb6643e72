"""The user's options (`Config`) and where they hold (`current`).

There is one configuration of the process, set by ``enable()``, and on top of it, per context (so
per thread and per asyncio task), the one of the innermost ``enabled()`` or ``disabled()`` block.
Forward calls consult `current`; backward uses what its forward stored. On a GPU backward runs in
autograd's own threads, and checkpoints repeat forward calls there: for them the block of the thread
that called backward holds.

``Config.epoch`` identifies everything a decision depends on besides the call itself: the options
and the rules. Memo keys use it. It is equal for equal options as long as no rule changed, so that
entering the same ``enabled()`` block in every step of a loop finds its memos again; after any
change of a rule every configuration has a new, larger epoch. ``capture`` is no such option: calls
in a module that is captured are decided as elsewhere.
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any

from gnnaccel.dispatch.policy import pins, tuned
from gnnaccel.suggest import did_you_mean

CHOICES: dict[str, tuple[str, ...]] = {
    "backend": ("auto", "cuda", "torch"),
    "when": ("profitable", "supported"),
    "on_fallback": ("native", "warn", "raise"),
    "backward": ("caller", "workers"),
    "first_use": ("wait", "background"),
}
PASSES = ("compaction", "reordering")
PRECISIONS = ("fp32", "bf16", "int8")
DEFAULT_RECORDS = 1000
_EPOCHS_KEPT = 256


@dataclass(frozen=True)
class Config:
    """The options of ``enable()``; invalid values raise ValueError, so that no invalid Config
    exists.

    ``include`` and ``exclude`` hold strings and classes. ``records`` is how many records
    ``gnnaccel.records()`` keeps (0: none; True: 1000). ``log`` is None, True (human lines through
    the logger ``gnnaccel``) or the path of a JSONL file. ``precision``, ``block_precision``: a
    format out of `PRECISIONS` for the rows that layers gather, from the environment and from the
    innermost ``precision()`` block; ``enable()`` has no such option. ``passes``: which of `PASSES`
    relational Programs go through; None: all. ``backward``: the thread in which autograd works on a
    single GPU, see `gnnaccel.adapters.autograd`. ``first_use``: whether calls wait while their
    kernels are compiled for the first time, or run natively. ``decisions``: the path of a file of
    pinned decisions (`dispatch.pins`), held as what it contains; True: those that ``autotune``
    kept; None or False: none. ``compile``: whether layers inside ``torch.compile`` are operators
    that take the same ways as elsewhere. ``capture``: whether calls of modules that repeat are
    replayed as CUDA graphs. ``offload``: "auto", or the bytes of the GPU that a layer's call may
    take over rows in the host's memory; None or False: such calls run as they are. ``epoch`` and
    ``stamp`` (the rule generation at which the lists were given) are set by this module.
    """

    backend: str = "auto"
    when: str = "profitable"
    on_fallback: str = "native"
    backward: str = "caller"
    first_use: str = "background"
    include: tuple[str | type, ...] = ()
    exclude: tuple[str | type, ...] = ()
    records: int = 0
    log: None | bool | str = None
    passes: None | tuple[str, ...] = None
    decisions: None | pins.Decisions | tuned.Tuned = None
    compile: bool = False
    capture: bool = False
    offload: None | str | int = None
    precision: None | str = None
    block_precision: None | str = None
    epoch: int = field(default=0, compare=False)
    stamp: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            _check_choice(name, getattr(self, name), allowed)
        object.__setattr__(self, "include", _targets("include", self.include))
        object.__setattr__(self, "exclude", _targets("exclude", self.exclude))
        object.__setattr__(self, "records", _record_count(self.records))
        object.__setattr__(self, "log", _log_target(self.log))
        object.__setattr__(self, "passes", _passes(self.passes))
        object.__setattr__(self, "offload", _offload(self.offload))
        object.__setattr__(self, "decisions", _decisions(self.decisions))
        for name in ("compile", "capture"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} is not a switch; use True or "
                                 "False")
        for name in ("precision", "block_precision"):
            if getattr(self, name) is not None:
                _check_choice(name, getattr(self, name), PRECISIONS)


OPTIONS: tuple[str, ...] = tuple(f.name for f in fields(Config) if f.name not in ("epoch", "stamp"))


def _check_choice(name: str, seen: Any, allowed: tuple[str, ...]) -> None:
    if seen in allowed:
        return
    words = ", ".join(repr(word) for word in allowed)
    hint = did_you_mean(seen, allowed) if isinstance(seen, str) else ""
    raise ValueError(f"{name}={seen!r} is not known; use one of {words}.{hint}")


def _targets(name: str, seen: Any) -> tuple[str | type, ...]:
    """A tuple without duplicates. A single string or class stands for a list of one."""
    items = (seen,) if isinstance(seen, (str, type)) else seen
    if not isinstance(items, Iterable):
        raise ValueError(
            f"{name}={seen!r} is not a list; use a list of class names, layer names or classes")
    targets = tuple(dict.fromkeys(items))
    for item in targets:
        if not isinstance(item, (str, type)) or item == "":
            raise ValueError(
                f"{name} holds {item!r} of type {type(item).__name__}; it "
                "takes non-empty strings and classes "
                f"(for one layer object call gnnaccel.{name}(layer))"
            )
    return targets


def _passes(seen: Any) -> tuple[str, ...]:
    """The passes in the order of `PASSES`, without duplicates."""
    if seen is None:
        return PASSES
    items = (seen,) if isinstance(seen, str) else seen
    if not isinstance(items, Iterable):
        raise ValueError(f"passes={seen!r} is not a list; use a list out of "
                         f"{', '.join(PASSES)}, or None for all")
    names = tuple(items)
    for item in names:
        _check_choice("passes", item, PASSES)
    return tuple(name for name in PASSES if name in names)


def _decisions(seen: Any) -> None | pins.Decisions | tuned.Tuned:
    if seen is None or seen is False or isinstance(seen, (pins.Decisions, tuned.Tuned)):
        return seen or None
    if seen is True:
        return tuned.Tuned()
    if isinstance(seen, (str, os.PathLike)) and os.fspath(seen):
        return pins.read(seen)
    raise ValueError(f"decisions={seen!r} is not known; use the path of a file that log "
                     "--export wrote, or True for autotune's")


def _offload(seen: Any) -> None | str | int:
    if seen is None or seen is False or seen == "auto":
        return seen or None
    if isinstance(seen, int) and not isinstance(seen, bool) and seen > 0:
        return seen
    raise ValueError(f"offload={seen!r} is not known; use 'auto', or the bytes of the GPU that one "
                     "layer's call may take; False for none")


def _record_count(seen: Any) -> int:
    if isinstance(seen, bool):
        return DEFAULT_RECORDS if seen else 0
    if not isinstance(seen, int) or seen < 0:
        raise ValueError(
            f"records={seen!r} is not a count; use 0 for none or how many records to keep")
    return seen


def _log_target(seen: Any) -> None | bool | str:
    if seen is None or seen is False:
        return None
    if seen is True:
        return True
    if isinstance(seen, (str, os.PathLike)) and os.fspath(seen):
        path = os.fspath(seen)
        if isinstance(path, str):
            return path
    raise ValueError(
        f"log={seen!r} is not known; use True for the logger, the path of a JSONL file, or None")


class _Cell:
    """The configuration of one block, replaced in place when a rule changes."""

    __slots__ = ("config",)

    def __init__(self, config: Config | None) -> None:
        self.config = config


_LOCAL = "gnnaccel_override"  # among torch's thread locals
_lock = threading.RLock()
#: the process's configuration; with `held` and `cells` for ways that cannot afford `current`
of_process: Config | None = None
_override: ContextVar[_Cell | None] = ContextVar("gnnaccel_override", default=None)
_SILENT = _Cell(None)
#: lets `current` give None in this context until `end_silence` is given the result: for host code
#: that is native throughout
silence, end_silence = functools.partial(_override.set, _SILENT), _override.reset
_cells: list[_Cell] = []
#: the block that holds in this context, None outside of all; and the blocks that hold anywhere
held, cells = _override.get, _cells
#: whether a configuration that holds anywhere has ``compile``; read in code that Dynamo traces,
#: which then compiles anew when it changes. `gnnaccel.session` sets it
compiling = False
#: whether a configuration that holds anywhere has ``capture``. `gnnaccel.session` sets it
capturing = False
#: a block in which a configuration holds that held before, with all that it needs in place.
#: `gnnaccel.session` sets it
block: Callable[[Config], contextlib.AbstractContextManager[Any]]
_generation = 0
_last_epoch = 0
_renewed = 0  # the largest epoch that no longer holds
_epochs: dict[tuple[Config, int], int] = {}


def current() -> Config | None:
    """The configuration that holds here; None when gnnaccel is disabled here. Costs well under a
    microsecond."""
    cell = _override.get()
    if cell is None and _cells:
        cell = _of_backward()
    return of_process if cell is None else cell.config


def silenced() -> bool:
    """Whether `current` gives None here because of `silence`."""
    return _override.get() is _SILENT


def passes_on() -> tuple[str, ...]:
    """The passes that relational Programs go through here."""
    config = current()
    return PASSES if config is None else config.passes  # type: ignore[return-value]


def _of_backward() -> _Cell | None:
    """The block around the call of backward, in one of autograd's threads; else None. Context
    variables do not get there; torch brings the calling thread's locals along. (Tasks that take
    turns in one thread share these.)"""
    torch = sys.modules.get("torch")
    if (torch is None or torch._C._current_graph_task_id() == -1
        or not torch._C._is_key_in_tls(_LOCAL)):
        return None
    return torch._C._get_obj_in_tls(_LOCAL)


def _leave_for_backward(cell: _Cell | None) -> None:
    torch = sys.modules.get("torch")
    if torch is None:
        return
    remove = getattr(torch._C, "_remove_obj_from_tls", None)
    if cell is None and remove is not None:
        # an object still held when its thread ends is freed without the interpreter lock
        remove(_LOCAL)
    else:
        _stash(torch, _LOCAL, cell)
        if _stash_steals(torch):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(cell))


def _stash(torch: Any, key: str, value: Any) -> None:
    torch._C._stash_obj_in_tls(key, value)


@functools.cache
def _stash_steals(torch: Any) -> bool:
    """Whether this torch takes the caller's reference instead of one of its own, as 2.11 does; it
    gives it back either way."""
    probe = object()
    before = sys.getrefcount(probe)
    _stash(torch, _LOCAL + "_probe", probe)
    if sys.getrefcount(probe) > before:
        return False
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return True


def active() -> Config | None:
    """The configuration of the process, blocks left aside."""
    return of_process


def generation() -> int:
    """How many times a rule has changed."""
    return _generation


def epoch() -> int:
    """The largest epoch given so far."""
    return _last_epoch


def stale(epoch: int) -> bool:
    """Whether no configuration has this epoch any more, nor will have it again."""
    return epoch <= _renewed


def with_epoch(config: Config) -> Config:
    """``config`` with the epoch of its options under the present rules."""
    global _last_epoch
    with _lock:
        key = (replace(config, capture=False), config.stamp)
        if key not in _epochs:
            if len(_epochs) >= _EPOCHS_KEPT:
                _epochs.clear()
            _last_epoch += 1
            _epochs[key] = _last_epoch
        return replace(config, epoch=_epochs[key])


def set_active(config: Config | None) -> Config | None:
    """Make ``config`` the process's configuration (None: disabled). Returns it as stored, with its
    epoch."""
    global of_process
    with _lock:
        of_process = None if config is None else with_epoch(config)
        return of_process


@contextlib.contextmanager
def override(config: Config | None) -> Iterator[Config | None]:
    """A block in which `current` gives ``config`` (None: disabled) in this context only; yields it
    with its epoch."""
    with _lock:
        cell = _Cell(None if config is None else with_epoch(config))
        _cells.append(cell)
    outer, token = _override.get(), _override.set(cell)
    _leave_for_backward(cell)
    try:
        yield cell.config
    finally:
        _leave_for_backward(None if outer is _SILENT else outer)
        with _lock:
            _cells.remove(cell)
        _override.reset(token)


def bump() -> int:
    """Give every live configuration a new epoch, after a change of a rule. Returns the
    generation."""
    global _generation
    with _lock:
        _generation += 1
        renew()
        return _generation


def renew() -> None:
    """Give every live configuration a new epoch: earlier decisions no longer hold, because
    something besides rules and options has changed."""
    global of_process, _renewed
    with _lock:
        _epochs.clear()
        _renewed = _last_epoch
        if of_process is not None:
            of_process = with_epoch(of_process)
        for cell in _cells:
            if cell.config is not None:
                cell.config = with_epoch(cell.config)


def make(options: dict[str, Any], base: Config | None = None) -> Config:
    """``base`` (or the defaults) with ``options`` applied. ValueError for a wrong value, TypeError
    for a wrong name."""
    for name in options:
        if name not in OPTIONS:
            raise TypeError(f"unknown option {name!r}; options are "
                            f"{', '.join(OPTIONS)}.{did_you_mean(name, OPTIONS)}")
    changes = dict(options)
    if "include" in changes or "exclude" in changes:
        changes["stamp"] = generation()
    return replace(base if base is not None else Config(), **changes)
