"""Timing calls and their memory, on a GPU by CUDA events and elsewhere by the clock.

A sample is a *batch* of back-to-back calls, long enough for the timer to resolve; its value is the
time per call. Work that the CPU launches slower than the GPU runs it is thereby charged at the
CPU's pace, as in a training loop.
"""
from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from gnnaccel.cuda.runtime import driver


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure: ``batches`` samples of ``batch_ms`` each, stopping near ``seconds``
    (never under 3).

    A call whose first run takes more than ``patience_s``, the compiling of kernels left aside, is
    not run again: that run is its time.
    """

    batches: int = 20
    batch_ms: float = 5.0
    seconds: float = 1.5
    patience_s: float = math.inf


QUICK = Effort(batches=3, batch_ms=1.0, seconds=0.1)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds per call. ``first_ms`` is the very first call: compilation and structure
    building are in it."""

    ms: float
    p10_ms: float
    p90_ms: float
    min_ms: float
    first_ms: float
    calls: int
    batches: int


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(call: Callable[[], object], device: torch.device, effort: Effort) -> Timing:
    """Warm up, then time ``call``. Its return value is dropped at once, as memory held would count
    against the next."""
    return measure_rounds({"": (call, contextlib.nullcontext)}, device, effort, rounds=1)[""]


def measure_rounds(calls: Mapping[str, tuple[Callable, Callable]], device: torch.device,
                   effort: Effort, rounds: int = 4) -> dict[str, Timing]:
    """Time several calls in turns, so that a drifting clock or a busy machine falls on all of them
    alike.

    ``calls`` maps a name to (call, context): each turn runs inside ``context()``, entered once per
    turn and warmed up again, because entering it may reset what a call had memoised.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    first: dict[str, float] = {}
    size: dict[str, _Size | None] = {}
    share = max(1, math.ceil(effort.batches / rounds))
    for _ in range(rounds):
        for name, (call, context) in calls.items():
            with context():
                if name not in first:
                    before, _ = driver.compile_seconds()
                    first[name] = _once(call, device)
                    waited = first[name] / 1e3 - (driver.compile_seconds()[0] - before)
                    size[name] = (None if waited > effort.patience_s
                                  else _settle(call, device, effort))
                elif size[name]:
                    _once(call, device), _once(call, device)
                if fits := size[name]:
                    samples[name] += _batches(call, device, fits,
                                              _affordable(share, fits, effort, rounds))
    return {name: summary(values or [first[name]], first[name], fits.calls if values
                          and (fits := size[name]) else 1)
            for name, values in samples.items()}


def summary(samples: list[float], first_ms: float, calls: int) -> Timing:
    """Statistics of per-call samples in milliseconds."""
    ordered = sorted(samples)

    def at(share: float) -> float:
        return ordered[round(share * (len(ordered) - 1))]

    return Timing(statistics.median(ordered), at(0.1), at(0.9), ordered[0], first_ms, calls,
                  len(ordered))


def peak_extra_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Device memory ``call`` needs at its peak beyond what was live before it, in bytes; None
    without a GPU."""
    live = live_bytes(device)
    if live is None:
        return None
    torch.cuda.reset_peak_memory_stats(device)
    call()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - live


def live_bytes(device: torch.device) -> int | None:
    """Device memory in use by tensors now, in bytes; None without a GPU."""
    if device.type != "cuda":
        return None
    gc.collect()
    synchronize(device)
    return torch.cuda.memory_allocated(device)


def release(device: torch.device) -> None:
    """Give unused cached memory back, so that one cell's peak or failure does not starve the
    next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclasses.dataclass(frozen=True)
class _Size:
    calls: int
    batch_ms: float


def _once(call: Callable, device: torch.device) -> float:
    """One call in milliseconds by the clock, the device's work included."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def _settle(call: Callable, device: torch.device, effort: Effort) -> _Size:
    """Warm up after a first call; returns how many calls make a batch."""
    estimate = _once(call, device)
    for _ in range(3):
        if estimate < 100.0:
            estimate = min(estimate, _once(call, device))
    calls = max(1, math.ceil(effort.batch_ms / max(estimate, 1e-4)))
    if calls > 1:
        # Short calls: one batch for nothing, so that clocks have risen and allocators have settled.
        _batches(call, device, _Size(calls, calls * estimate), 1)
    return _Size(calls, calls * estimate)


def _affordable(wanted: int, size: _Size, effort: Effort, rounds: int) -> int:
    least = max(1, math.ceil(3 / rounds))
    return max(least, min(wanted, int(effort.seconds * 1e3 / rounds / max(size.batch_ms, 1e-3))))


def _batches(call: Callable, device: torch.device, size: _Size, count: int) -> list[float]:
    # As timeit does: a collection in the middle of a batch is nobody's cost in particular.
    collecting = gc.isenabled()
    gc.disable()
    try:
        timed = _batch_events if device.type == "cuda" else _batch_clock
        return [timed(call, device, size.calls) for _ in range(count)]
    finally:
        if collecting:
            gc.enable()


def _batch_clock(call: Callable, device: torch.device, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) * 1e3 / calls


def _batch_events(call: Callable, device: torch.device, calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls
