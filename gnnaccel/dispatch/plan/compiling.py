"""Whether kernels can run on a device at all, and whether those of a way to run are there.

Kernels are compiled when they are first asked about: now, side by side, or in the background while
the host's own code runs.

A way whose kernels were compiled on this machine before has a mark beside CuPy's cache. It is
loaded at once, in milliseconds, so that runs repeat each other bit for bit. Only kernels without a
mark are compiled in the background.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch

from gnnaccel._version import __version__
from gnnaccel.cuda.runtime import background, capture, driver, probe, sources
from gnnaccel.cuda.structures import structure
from gnnaccel.dispatch.policy import config as configs
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.run.autograd import checkpointed

PENDING = "GA408"

_states: dict[tuple, Reason | None] = {}  # by driver and key; None: compiled
#: plans by kernels that `ops.route.choose` made, by all that they depend on: what is compiled stays
chosen: dict[tuple, Any] = {}
_MOST_CHOSEN = 1024


def device_reason(device: str, config: Config) -> Reason | None:
    """Why no kernels run on devices of this type."""
    if config.backend == "torch":
        return reason("GA406", "backend='torch' was asked for")
    if driver.in_place:  # `driver.placed`, without its call
        return None
    if device != "cuda":
        return reason("GA401", f"the tensors are on the {device}, the kernels need a CUDA device")
    ready, text = driver.available()
    return None if ready else reason("GA402", f"the CUDA kernels cannot run: {text}")


def problem(key: Hashable, compile_: Callable[[], None], config: Config | None = None,
            later: Callable[[], None] | None = None) -> Reason | None:
    """Why the kernels that ``compile_`` gets cannot run; None where they are there.

    ``key``: all that decides which kernels those are. ``compile_`` raises CompileError (GA403).
    Where ``config`` (None: that which holds here) lets calls run natively meanwhile, kernels that
    this machine has not compiled before are compiled in the background (GA408). ``later`` gets
    those that calls of the same layer will probably need: they are compiled beside the program.
    """
    whole = id(driver.current()), key
    state = _states.get(whole, reason)
    if state is None or (state is not reason and state.code != PENDING):  # type: ignore[union-attr]
        return state  # type: ignore[return-value]
    config = configs.current() if config is None else config
    # a call of another size may need no new kernels
    if not may_run_natively(config) or (
            state is reason and (_marked(key) or driver.current().ready(compile_))):
        return _compiled(whole, key, compile_, later)
    if state is reason:
        _states[whole] = state = reason(PENDING)
        # each thread has a current device of its own
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
        background.submit(lambda: _in_background(whole, key, compile_, later, device))
    return state  # type: ignore[return-value]


def waiting() -> bool:
    """Whether some calls run natively for the moment, as their kernels are being compiled."""
    return any(state is not None and state.code == PENDING for state in list(_states.values()))


def choose(form: tuple, plan: Any) -> None:
    """Keep a plan in `chosen`."""
    if len(chosen) >= _MOST_CHOSEN:
        chosen.clear()
    chosen[form] = plan


def forget() -> None:
    """Ask again for all kernels, as another process would; for tests."""
    _states.clear()
    chosen.clear()


def may_run_natively(config: Config | None) -> bool:
    """Whether calls may run natively until their kernels are there, and by kernels from then on.

    False in a checkpoint, which must repeat a call the same way, and in a capture; and where the
    user asked for kernels, for the same bits, or to be told of native calls.
    """
    return (config is not None and config.first_use == "background" and config.backend == "auto"
            and config.when == "profitable" and config.on_fallback == "native"
            and config.decisions is None and not driver.placed() and not capture.capturing()
            and not checkpointed() and not torch.are_deterministic_algorithms_enabled())


def _compiled(whole: tuple, key: Hashable, compile_: Callable[[], None],
              later: Callable[[], None] | None) -> Reason | None:
    why, new = None, not driver.placed() and not _marked(key)
    if new:
        driver.current().ahead(structure.prepare)  # every graph needs these as well
        driver.current().together(compile_)
    try:
        compile_()
    except driver.CompileError as error:
        why = reason("GA403", _first_line(error))
    if new and why is None:
        _mark(key)
        if later is not None:
            driver.current().ahead(later)
    _states[whole] = why
    return why


def _in_background(whole: tuple, key: Hashable, compile_: Callable[[], None],
                   later: Callable[[], None] | None, device: int) -> None:
    """`_compiled` in another thread. ``device``: the current one of the asking thread; -1: none."""
    def with_structure() -> None:
        structure.prepare()
        compile_()

    try:
        with torch.cuda.device(device):
            _compiled(whole, key, with_structure, later)
    except Exception as error:  # noqa: BLE001 - nobody waits for this thread; calls tell of it
        _states[whole] = reason("GA403", f"{type(error).__name__}: {_first_line(error)}")
    with background.piece():  # a process that forks must not find the lock taken
        configs.renew()  # so that what was decided without these kernels is decided anew


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


# --- marks ----------------------------------------------------------------------------------------

def _marked(key: Hashable) -> bool:
    return _mark_of(key).exists()


def _mark(key: Hashable) -> None:
    where = _mark_of(key)
    with contextlib.suppress(OSError):  # a folder that cannot be written holds no kernels either
        where.parent.mkdir(parents=True, exist_ok=True)
        where.touch()


def _mark_of(key: Hashable) -> Path:
    text = f"{_environment(torch.cuda.current_device())} {key!r}"
    return _folder() / hashlib.sha256(text.encode()).hexdigest()[:32]


def _folder() -> Path:
    """The folder of marks, in CuPy's cache of kernels, so that they are removed together."""
    return Path(os.environ.get("CUPY_CACHE_DIR")
                or Path.home() / ".cupy" / "kernel_cache") / "gnnaccel"


@functools.cache
def _environment(device: int) -> str:
    """Versions, sources and device that kernels depend on besides their key, as a text."""
    cupy = map(probe.version_of, ("cupy-cuda13x", "cupy-cuda12x", "cupy"))
    versions = [version for version in cupy if version is not None]
    text = "".join(sources.source(family) for family in sources.families())
    text += sources.inline('#include "generated.cuh"\n')  # of families that are no files
    return (f"{__version__} {hashlib.sha256(text.encode()).hexdigest()} {versions} "
            f"{torch.version.cuda} {torch.cuda.get_device_capability(device)}")
