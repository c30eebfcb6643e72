"""A step of Adam over many tensors in one kernel (``src/adam.cu``)."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from gnnaccel.cuda.launch import Kernels

_KERNELS = Kernels("adam", (("FMAD", "0"),))
_TENSORS = 16  # tensors of a launch
_THREADS = 256
_BLOCK = 4 * _THREADS  # numbers of a block
_int32, _int64 = np.int32, np.int64
_NONE = (0, 0, 0, 0, 0, np.int64(0), np.int32(2**31 - 1))  # no block begins there


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


def prepare() -> None:
    """Compile the kernel. Raises CompileError."""
    _KERNELS("adam")


def step(tensors: Sequence[tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]],
         numbers: Numbers) -> None:
    """Write a step's results in place. ``tensors``: parameter, gradient, average, average of
    squares, and the largest of these or None; all in fp32, contiguous, of one size."""
    *floats, maximize = numbers
    scalars = (*map(np.float32, floats), np.int32(maximize))
    kernel = _KERNELS("adam")
    nonempty = [entry for entry in tensors if entry[0].numel()]
    for start in range(0, len(nonempty), _TENSORS):
        batch, blocks, args = nonempty[start:start + _TENSORS], 0, list(scalars)
        for parameter, gradient, mean, square, largest in batch:
            count = parameter.numel()
            args += (parameter.data_ptr(), gradient.data_ptr(), mean.data_ptr(), square.data_ptr(),
                     0 if largest is None else largest.data_ptr(), _int64(count), _int32(blocks))
            blocks += -(-count // _BLOCK)
        args += _NONE * (_TENSORS - len(batch))
        kernel((blocks, 1), _THREADS, 0, tuple(args))
