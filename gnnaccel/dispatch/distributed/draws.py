"""Random numbers of the shares of one call, which is divided over processes or over time."""
from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor


class Draws:
    """Numbers that each share draws by itself. They follow from the states of the generators when
    this was made, so a share that runs ``within`` a second time draws the same."""

    def __init__(self, device: torch.device):
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[
                device.index if device.index is not None else torch.cuda.current_device()])
        self._before = self._states()
        self._drawn = [False] * len(self._generators)

    @contextlib.contextmanager
    def within(self, share: int) -> Iterator[None]:
        """A block that draws the numbers of a share; after it generators are as before it."""
        held = self._states()
        for generator, state in zip(self._generators, self._before):
            digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=7).digest()
            generator.manual_seed(int.from_bytes(digest, "little") + share)
        seeded = self._states()
        try:
            yield
        finally:
            for at, generator in enumerate(self._generators):
                self._drawn[at] |= not torch.equal(generator.get_state(), seeded[at])
                generator.set_state(held[at])

    def end(self) -> None:
        """Advance the generators after the last share, alike in all processes, so that later draws
        differ."""
        for generator, drawn in zip(self._generators, self._drawn):
            if drawn:
                torch.rand(1, generator=generator, dtype=torch.float32, device=generator.device)

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]
