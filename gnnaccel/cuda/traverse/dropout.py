"""Parameters of kernels that draw dropout: probability and a place in torch's random stream."""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gnnaccel.cuda.runtime import capture, driver
from gnnaccel.cuda.runtime.launch import layout_for


@dataclass(frozen=True)
class Dropout:
    """Probability ``p`` and a Philox key, as `key` gives it. The kernels draw with seven rounds,
    keyed by place in the CSC and head."""

    p: float = 0.0
    seed: int | torch.Tensor = 0
    offset: int = 0

    @functools.cached_property
    def on(self) -> bool:
        return self.p > 0.0

    @functools.cached_property
    def args(self) -> tuple:
        """The four kernel parameters."""
        scale = 0.0 if self.p >= 1.0 else 1.0 / (1.0 - self.p)
        return np.float32(self.p), np.float32(scale), *key_args((self.seed, self.offset))


OFF = Dropout()
Key = tuple["int | torch.Tensor", int]
#: an offset that says: seed and offset lie in memory, at the address that is the seed
IN_MEMORY = 2**64 - 1


def draw(p: float, device: torch.device) -> Dropout:
    """Dropout by the next `key` on ``device``."""
    return Dropout(p, *key(device)) if p > 0.0 else OFF


def key(device: torch.device) -> Key:
    """Seed and offset: the next place of torch's default generator on ``device``.
    `torch.manual_seed` makes it repeat.

    On CUDA the generator's Philox offset is read and moved on the host, so nothing is launched and
    nothing waits. Numbers that are fixed when a CUDA graph is captured would repeat in all of its
    replays. Within a capture both are therefore drawn on the device, int64 [2] in the place of the
    seed, and so they are in a `capture.still` block, whose replays are compared with calls.
    """
    if capture.here.held is not None or capture.capturing():
        return torch.randint(-2**63, 2**63 - 1, (2,), dtype=torch.int64, device=device), IN_MEMORY
    if device.type != "cuda":
        return int(torch.randint(0, 2**62, (1,), device="cpu").item()), 0
    generator = torch.cuda.default_generators[device.index if device.index is not None
                                              else torch.cuda.current_device()]
    offset = generator.get_offset()
    generator.set_offset(offset + 4)
    return generator.initial_seed() & 0xFFFFFFFFFFFFFFFF, offset


def key_args(key: Key) -> tuple[Any, Any]:
    """The two kernel parameters, u64."""
    seed, offset = key
    return np.uint64(seed if isinstance(seed, int) else seed.data_ptr()), np.uint64(offset)


def factors(dropout: Dropout, edges: int, heads: int, device: torch.device) -> torch.Tensor:
    """[edges, heads] fp32 in CSC order: 0 or 1 / (1 - p), the very numbers the attention kernels
    draw (``src/dropout.cu``)."""
    out = torch.empty(edges, heads, dtype=torch.float32, device=device)
    defines = layout_for(heads, 1).defines() + (("OFF_T", "i64"), ("DROPOUT", "1"))
    driver.current().kernel("dropout", "factors", defines)(
        (-(-edges * heads // 256), 1), 256, 0,
        (np.int64(edges),) + dropout.args + (out.data_ptr(),))
    return out
