"""What a call does to the host beside its results: random numbers drawn there, and waits for the
device. A replay does neither.
"""
from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections.abc import Iterator

import torch


class Numbers:
    """The states of the generators that code on the host may draw from; not that of ``device``, if
    it is a GPU, which a CUDA graph moves itself."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._torch = None if device.type == "cpu" else torch.get_rng_state()
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()

    def drawn(self) -> bool:
        """Whether they have moved."""
        now = Numbers(self._device)
        return not (now._python == self._python and _equal(now._torch, self._torch)
                    and _plain(now._numpy) == _plain(self._numpy))

    def restore(self) -> None:
        """Give the generators these states again."""
        if self._torch is not None:
            torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _plain(state: tuple | None) -> tuple | None:
    return state and (state[0], state[1].tobytes(), *state[2:])


@contextlib.contextmanager
def waits(device: torch.device) -> Iterator[list]:
    """A block; gives a list that has an entry for each time it waited for the device."""
    waited: list = []
    if device.type != "cuda":
        yield waited
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waited
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for one in messages:
        if "synchronizing CUDA operation" in str(one.message):
            waited.append(one)
        elif "Synchronization debug mode" not in str(one.message):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
