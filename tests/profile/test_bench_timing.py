"""Timing: sane statistics and clean failures; nothing here asserts how fast anything is."""
from __future__ import annotations

import contextlib

import pytest
import torch

from gnnaccel.profile.bench import guard, timing

CPU = torch.device("cpu")


def sane(timed: timing.Timing) -> bool:
    return (0 < timed.min_ms <= timed.p10_ms <= timed.ms <= timed.p90_ms and timed.batches >= 3
            and timed.calls >= 1)


def test_measure_gives_sane_statistics():
    calls = []
    timed = timing.measure(lambda: calls.append(1), CPU, timing.QUICK)
    assert sane(timed)
    assert len(calls) > timed.calls * timed.batches


def test_rounds_alternate_and_enter_each_context_once_per_round():
    entered = []

    def context(name):
        @contextlib.contextmanager
        def enter():
            entered.append(name)
            yield

        return enter

    calls = {name: ((lambda: torch.ones(8).sum()), context(name)) for name in ("a", "b")}
    timed = timing.measure_rounds(calls, CPU, timing.QUICK, rounds=3)
    assert entered == ["a", "b"] * 3
    assert sane(timed["a"]) and sane(timed["b"])


def test_summary_orders_its_samples():
    timed = timing.summary([3.0, 1.0, 2.0, 5.0, 4.0], first_ms=9.0, calls=7)
    assert (timed.ms, timed.min_ms, timed.first_ms, timed.calls,
            timed.batches) == (3.0, 1.0, 9.0, 7, 5)


def test_memory_is_unknown_without_a_gpu():
    assert timing.peak_extra_bytes(lambda: torch.ones(8), CPU) is None


def test_slow_calls_are_still_sampled_three_times(monkeypatch):
    monkeypatch.setattr(timing, "_settle", lambda *_: timing._Size(1, 5e5))
    assert timing.measure(lambda: None, CPU, timing.Effort()).batches == 3


@pytest.mark.parametrize("problem, text", [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"), "out of memory"),
    (RuntimeError("grid too large\nand a long trace"), "RuntimeError: grid too large"),
    (KeyError(), "KeyError"),
])
def test_failures_become_text(problem, text):
    def fail():
        raise problem

    assert guard.guarded(fail, CPU) == (None, text)


def test_success_has_no_text():
    assert guard.guarded(lambda: 3, CPU) == (3, None)


def test_a_lost_device_ends_the_run(monkeypatch):
    def broken(_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(guard.timing, "synchronize", broken)
    with pytest.raises(guard.DeviceLost, match="ValueError: odd"):
        guard.guarded(lambda: (_ for _ in ()).throw(ValueError("odd")), CPU)
