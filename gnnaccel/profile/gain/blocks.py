"""`gain`: one step of the caller's, natively and with gnnaccel, in blocks that take turns."""
from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from gnnaccel import env, session
from gnnaccel.dispatch.observe import counters
from gnnaccel.dispatch.policy import config as configs
from gnnaccel.errors import GnnaccelError
from gnnaccel.profile.gain.looking import Look, kept
from gnnaccel.profile.gain.verdict import Gain, Layer, Side

_WARM = 3  # steps of each way before one is timed: kernels are compiled, structures built
_PAIRS = 5  # blocks of each way
_LOOKED = 3  # steps under a report, each way


def gain(step: Callable[[], Any], seconds: float = 10.0) -> Gain:
    """How much faster ``step()`` is with gnnaccel, in this process.

    ``step``: does one step, such as one of training, without arguments; its result is not used. It
    is run natively and enabled, in blocks that take turns (native first, then enabled first, and so
    on), for about ``seconds`` in all, at least some twenty times. Around every block the device
    is waited for. Afterwards a few more steps are looked at layer by layer. The result has the
    median of the blocks of either way and their spread, peak memory of the GPU, what layers gained
    and what kept others native: ``print()`` it, or take ``as_dict()``.

    Steps of training train: the model is afterwards as many steps further. Losses are not compared,
    since each step begins where the last one ended; `gnnaccel.compare` tells whether results are
    the same. Works with ``enable()``, under its options, and without; `stats` counts none of it.
    Raises TypeError where ``step`` cannot be called, ValueError for ``seconds`` that are not above
    0, GnnaccelError while the environment variable GNNACCEL says off; whatever ``step`` raises
    comes through.
    """
    if not callable(step):
        raise TypeError(f"step is {step!r} of type {type(step).__name__}; pass a function without "
                        "arguments that does one step")
    if not seconds > 0:
        raise ValueError(f"seconds={seconds!r} is not above 0")
    if env.switch() is False:
        raise GnnaccelError("the environment variable GNNACCEL says off, so there is nothing to "
                            "compare; unset it")
    with counters.uncounted():
        return _gain(step, seconds)


def _gain(step: Callable[[], Any], seconds: float) -> Gain:
    ways: dict[bool, Callable[[], Any]] = {
        True: _native, False: functools.partial(session.enabled, first_use="wait")}
    for native in (True, False):
        with ways[native]():
            _block(step, _WARM)
            taken = _block(step, 1)[0]
    count = max(1, int(seconds / (2 * _PAIRS) / max(taken / 1e3, 1e-6)))
    found: dict[bool, list[tuple[float, int | None]]] = {True: [], False: []}
    for pair in range(_PAIRS):
        for native in (True, False) if pair % 2 == 0 else (False, True):
            with ways[native]():
                found[native].append(_block(step, count))
    sides = {native: Side([ms for ms, _ in blocks], count * _PAIRS,
                          memory_bytes=max((peak for _, peak in blocks if peak), default=None))
             for native, blocks in found.items()}
    return _looked_at(step, Gain("step", sides[True], sides[False]))


def _native() -> contextlib.AbstractContextManager:
    """Patches are out where nobody enabled gnnaccel, else switched off."""
    return contextlib.nullcontext() if configs.current() is None else session.disabled()


def _block(step: Callable[[], Any], count: int) -> tuple[float, int | None]:
    """Milliseconds of a step, and the peak of the GPU's memory."""
    cuda = torch.cuda.is_initialized()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(count):
        step()
    if cuda:
        torch.cuda.synchronize()
    ms = (time.perf_counter() - start) * 1e3 / count
    return ms, torch.cuda.max_memory_allocated() if cuda else None


def _looked_at(step: Callable[[], Any], found: Gain) -> Gain:
    look = Look()
    for native in (False, True):
        look.begin(native)
        try:
            for _ in range(_LOOKED):
                step()
        finally:
            look.end()
    seen = look.as_dict()
    found.layers = [Layer(**one) for one in seen["layers"]]
    stats = {one["code"]: {"reasons": {one["code"]: one["calls"]}} for one in seen["fallbacks"]}
    found.kept, found.to_try = kept(stats, seen["fallbacks"]), seen["advice"]
    return found
