"""A step of Adam over many tensors in one kernel (``src/adam.cu``)."""
from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import Kernels, sent

_KERNELS = Kernels("adam", (("FMAD", "0"),))
_GIVEN = 16  # gradients whose addresses are arguments; those of more are sent
_THREADS = 256
_BLOCK = 4 * _THREADS  # numbers of a block
_int32 = np.int32


class Numbers(NamedTuple):
    """Numbers of a step; see the kernel. ``lr`` is negative."""

    lr: float
    root: float
    mix: float
    beta2: float
    rest: float
    eps: float
    decay: float
    keep: float
    maximize: bool


class _Sent:
    """Addresses on the device, sent anew where they changed, or the stream did, by whose order they
    are written before they are read."""

    __slots__ = ("_seen", "tensor")

    def __init__(self) -> None:
        self._seen: tuple | None = None
        self.tensor: Tensor | None = None

    def pointer(self, addresses: list[int], device: torch.device) -> int:
        """Where these ``addresses`` are."""
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        seen = stream, addresses
        if seen != self._seen or self.tensor is None:
            self.tensor = sent(addresses, torch.int64, device)
            self._seen = seen
        return self.tensor.data_ptr()


class Tensors:
    """Tensors that steps write: parameters, averages, averages of squares, and the largest of these
    where a step asks for them (else none). All are in fp32, contiguous, on one device, and as many
    numbers in each list as in the parameters. They are known by their addresses, so a step over
    them has to see to it that they live, and are where they were."""

    __slots__ = ("_words", "_device", "_blocks", "_count", "_table", "_gradients")

    def __init__(self, parameters: Sequence[Tensor], means: Sequence[Tensor],
                 squares: Sequence[Tensor], largest: Sequence[Tensor] = ()) -> None:
        sizes = [t.numel() for t in parameters]
        starts = [*accumulate((-(-size // _BLOCK) for size in sizes), initial=0)]
        self._device, self._count, self._blocks = parameters[0].device, len(sizes), starts.pop()
        self._words = [t.data_ptr() for each in (parameters, means, squares) for t in each]
        self._words += [t.data_ptr() for t in largest] or [0] * len(sizes)
        self._words += sizes + starts
        self._table, self._gradients = _Sent(), _Sent()

    def step(self, gradients: list[int], numbers: Numbers) -> None:
        """Write a step's results in place. ``gradients``: addresses, of each parameter's, which are
        of its size, in fp32 and contiguous."""
        *floats, maximize = numbers
        if len(gradients) > _GIVEN:
            place, given = self._gradients.pointer(gradients, self._device), [0] * _GIVEN
        else:
            place, given = 0, gradients + [0] * (_GIVEN - len(gradients))
        _KERNELS("adam")((self._blocks, 1), _THREADS, 0, (
            *map(np.float32, floats), _int32(maximize),
            self._table.pointer(self._words, self._device), _int32(self._count), place, *given))


def prepare() -> None:
    """Compile the kernel. Raises CompileError."""
    _KERNELS("adam")
