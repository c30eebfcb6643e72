"""Memory that CUDA needs outside of torch's allocator: the code of a kernel, what its threads keep
outside of registers.

torch's allocator keeps what tensors have freed, which may be all of a GPU.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import capture

# CUDA_ERROR_OUT_OF_MEMORY and cudaErrorMemoryAllocation, the ``status`` of CuPy's errors.
_NO_MEMORY = 2


def with_room(call: Callable[[], Any], problem: Exception | None = None) -> Any:
    """What ``call()`` gives; where CUDA has no memory left for it, when it is called again once
    torch's allocator has given back what it holds and nobody uses. ``problem``: what it raised
    before, if it was called.

    Raises torch.cuda.OutOfMemoryError where there is no memory then either.
    """
    if problem is None:
        try:
            return call()
        except RuntimeError as found:
            problem = found
    if getattr(problem, "status", None) != _NO_MEMORY or capture.capturing():
        raise problem
    torch.cuda.empty_cache()
    try:
        return call()
    except RuntimeError as again:
        if getattr(again, "status", None) != _NO_MEMORY:
            raise
        raise torch.cuda.OutOfMemoryError(
            "CUDA out of memory: none is left outside of torch's allocator to load or launch a "
            "kernel of gnnaccel's") from again
