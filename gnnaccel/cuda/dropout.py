"""What a kernel needs to draw dropout: probability and a place in torch's random stream."""
from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from gnnaccel.cuda import driver
from gnnaccel.cuda.layout import layout_for


@dataclass(frozen=True)
class Dropout:
    """Probability ``p`` and a Philox key. The kernels draw with seven rounds, keyed by place in the
    CSC and head."""

    p: float = 0.0
    seed: int = 0
    offset: int = 0

    @property
    def on(self) -> bool:
        return self.p > 0.0

    @functools.cached_property
    def args(self) -> tuple:
        """The four kernel parameters."""
        scale = 0.0 if self.p >= 1.0 else 1.0 / (1.0 - self.p)
        return np.float32(self.p), np.float32(scale), np.uint64(self.seed), np.uint64(self.offset)


OFF = Dropout()


def draw(p: float, device: torch.device) -> Dropout:
    """Dropout by the next `key` on ``device``. Callers must not capture it in a CUDA graph."""
    return Dropout(p, *key(device)) if p > 0.0 else OFF


def key(device: torch.device) -> tuple[int, int]:
    """Seed and offset: the next place of torch's default generator on ``device``.
    `torch.manual_seed` makes it repeat.

    On CUDA the generator's Philox offset is read and moved on the host, so nothing is launched and
    nothing waits. While a CUDA graph is captured the offset is fixed at capture, so replays repeat
    the numbers.
    """
    if device.type != "cuda":
        return int(torch.randint(0, 2**62, (1,), device="cpu").item()), 0
    generator = torch.cuda.default_generators[device.index if device.index is not None
                                              else torch.cuda.current_device()]
    offset = generator.get_offset()
    generator.set_offset(offset + 4)
    return generator.initial_seed() & 0xFFFFFFFFFFFFFFFF, offset


def factors(dropout: Dropout, edges: int, heads: int, device: torch.device) -> torch.Tensor:
    """[edges, heads] fp32 in CSC order: 0 or 1 / (1 - p), the very numbers the attention kernels
    draw (``src/dropout.cu``)."""
    out = torch.empty(edges, heads, device=device)
    defines = layout_for(heads, 1).defines() + (("OFF_T", "i64"), ("DROPOUT", "1"))
    driver.current().kernel("dropout", "factors", defines)(
        (-(-edges * heads // 256), 1), 256, 0,
        (np.int64(edges),) + dropout.args + (out.data_ptr(),))
    return out
