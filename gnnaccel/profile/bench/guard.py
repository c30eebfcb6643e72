"""Failures are results: they are recorded as text, and the next cell starts from a clean device."""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

from gnnaccel.profile.bench import timing

OUT_OF_MEMORY = "out of memory"

T = TypeVar("T")


class DeviceLost(RuntimeError):
    """The device answers every call with an error (after an illegal access, say): nothing more can
    be measured."""


class Budget:
    """Wall-clock seconds from now on; a cell is started only while some are left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    @property
    def spent(self) -> bool:
        return self.left <= 0


def guarded(call: Callable[[], T], device: torch.device) -> tuple[T | None, str | None]:
    """(call's value, None), or (None, what went wrong). Raises DeviceLost when the device is beyond
    use."""
    value = error = None
    try:
        value = call()
    except Exception as problem:  # noqa: BLE001 - the report says whatever a cell raises
        error = describe(problem)
    # Only here, past the except block, is the failed call's traceback gone, and with it the tensors
    # of its frames.
    if error:
        _recover(device, error)
    return value, error


def describe(problem: BaseException) -> str:
    """An exception in one line."""
    kind = type(problem).__name__
    text = str(problem).strip()
    if "OutOfMemory" in kind or "out of memory" in text[:200].lower():
        return OUT_OF_MEMORY
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # A compiler's complaint stands below a headline that only says what was being compiled.
    complaint = next((f" ... {line[:150]}" for line in lines[1:] if "error:" in line), "")
    return f"{kind}: {lines[0][:200]}{complaint}" if lines else kind


def _recover(device: torch.device, error: str) -> None:
    try:
        timing.synchronize(device)
        timing.release(device)
    except RuntimeError as problem:
        raise DeviceLost(error) from problem
