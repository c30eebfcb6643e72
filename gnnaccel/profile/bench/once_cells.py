"""Relational layers over graphs that come once: each call natively and through gnnaccel in turns.

Such calls are bound by the host, which events on a device would not show: they are timed one by
one, by the clock, with the wait for the device. On a CPU with one thread it is the clock of the
process, so that what else runs there does not count.
"""
from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch

from gnnaccel.adapters.pyg.bench.once import OnceLayer
from gnnaccel.profile.bench import accel
from gnnaccel.profile.bench import plan as plans
from gnnaccel.profile.bench import timing
from gnnaccel.profile.bench.guard import Budget, guarded
from gnnaccel.profile.bench.once_steps import OnceSize, OnceStep, once_step
from gnnaccel.profile.bench.result import Record
from gnnaccel.profile.bench.steps import MODES

TURNS = 7  # at least, unless fewer are asked for
# calls that stay native are remembered after a few: a stream of batches is what is measured
_WARM = {"native": 2, "gnnaccel": 5}
_SHARE = 6  # of the seconds that other cells take: there are many more of these


def records(layers: tuple[OnceLayer, ...], sizes: tuple[OnceSize, ...], device: torch.device,
            effort: timing.Effort, seed: int, budget: Budget) -> Iterator[Record]:
    """One record per size, layer and mode, small graphs first."""
    effort = plans.calm(effort) if device.type == "cpu" else effort
    for size in sizes:
        for layer in layers:
            for mode in MODES:
                if budget.spent:
                    return
                yield once_record(layer, size, device, mode, effort, seed)
            timing.release(device)


def once_record(layer: OnceLayer, size: OnceSize, device: torch.device, mode: str,
                effort: timing.Effort, seed: int = 0) -> Record:
    """``*_us`` are microseconds per call, ``ratio_*`` native's time over gnnaccel's, ``turns`` the
    calls of each. ``routes`` and ``reasons`` are those of gnnaccel's timed calls and of the layers
    inside them."""
    accel.clear_cache()
    values, error = guarded(lambda: _turns(once_step(layer, size, device, mode, seed), effort),
                            device)
    accel.clear_cache()
    return Record("once", size.name, layer.name, mode, device=device.type, values=values or {},
                  error=error)


def _turns(step: OnceStep, effort: timing.Effort) -> dict:
    samples: dict[str, list[float]] = {impl: [] for impl in accel.CONTEXTS}
    most, least = 2 * effort.batches, min(TURNS, 2 * effort.batches)
    # entered once: entering it may reset what calls had memoised
    with accel.CONTEXTS["gnnaccel"]():
        with accel.CONTEXTS["native"]():
            _calls(step, _WARM["native"])
        _calls(step, _WARM["gnnaccel"])
        accel.reset_routes()
        end = time.monotonic() + effort.seconds / _SHARE
        while (len(samples["native"]) < least
               or len(samples["native"]) < most and time.monotonic() < end):
            with accel.CONTEXTS["native"]():
                samples["native"].append(_call(step))
            samples["gnnaccel"].append(_call(step))
        return {**_statistics(samples["native"], samples["gnnaccel"]), **accel.routes()}


def _statistics(native: list[float], ours: list[float]) -> dict[str, float]:
    values: dict[str, float] = {"turns": len(native)}
    for name, of in (("least", min), ("median", statistics.median)):
        values |= {f"native_{name}_us": of(native), f"ours_{name}_us": of(ours),
                   f"ratio_{name}": of(native) / of(ours)}
    return values


def _calls(step: OnceStep, count: int) -> None:
    for _ in range(count):
        _call(step)


def _call(step: OnceStep) -> float:
    """One call over a new graph, whose copying is not timed, in microseconds."""
    clock = (time.process_time if step.device.type == "cpu" and torch.get_num_threads() == 1
             else time.perf_counter)
    step.renew()
    timing.synchronize(step.device)
    start = clock()
    step()
    timing.synchronize(step.device)
    return (clock() - start) * 1e6
