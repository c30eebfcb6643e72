"""A step of Adam over many tensors in one kernel (``src/adam.cu``)."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from gnnaccel.cuda.launch import Kernels

_KERNELS = Kernels("adam", (("FMAD", "0"),))
_TENSORS = 16  # of a launch
_THREADS = 256
_BLOCK = 4 * _THREADS  # numbers of a block
_int32, _int64 = np.int32, np.int64
_NONE = (0, 0, 0, 0, 0, np.int64(0), np.int32(2**31 - 1))  # no block begins there


class Numbers(NamedTuple):
    """What a step computes with; see the kernel. ``lr`` is negative."""

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
    filled = [one for one in tensors if one[0].numel()]
    for at in range(0, len(filled), _TENSORS):
        some, blocks, args = filled[at:at + _TENSORS], 0, list(scalars)
        for parameter, gradient, mean, square, most in some:
            count = parameter.numel()
            args += (parameter.data_ptr(), gradient.data_ptr(), mean.data_ptr(), square.data_ptr(),
                     0 if most is None else most.data_ptr(), _int64(count), _int32(blocks))
            blocks += -(-count // _BLOCK)
        args += _NONE * (_TENSORS - len(some))
        kernel((blocks, 1), _THREADS, 0, tuple(args))
