"""Small pieces that every launcher needs."""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.layout import WARPS
from gnnaccel.cuda.structure import Rows

THREADS = 32 * WARPS


def pointer(t: Tensor | None) -> int:
    """A tensor's address, the null pointer for None."""
    return 0 if t is None else t.data_ptr()


def whole_blocks(chunks: int) -> int:
    """Chunk slots fill whole blocks, so that a block holds either chunks or rows."""
    return -(-chunks // WARPS) * WARPS


def split_args(graph: Rows, chunk_slots: int) -> tuple:
    """The four parameters by which a kernel finds its chunk."""
    split = graph.split
    return split.counters.data_ptr(), split.chunks.data_ptr(), np.int32(split.chunk_edges), np.int32(chunk_slots)


def merge_args(graph: Rows) -> tuple:
    return graph.split.counters.data_ptr(), graph.split.heavy.data_ptr()


class Workspace:
    """fp32 arrays of the given sizes in one allocation; `pointers` are null when nothing is needed."""

    def __init__(self, sizes: list[int], device: torch.device):
        total = sum(sizes)
        self.memory = torch.empty(total, device=device) if total else None
        base, self.pointers = pointer(self.memory), []
        for size in sizes:
            self.pointers.append(base if size else 0)
            base += 4 * size
