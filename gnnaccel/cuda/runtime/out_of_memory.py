"""Memory that CUDA needs outside of torch's allocator: the code of a kernel, local memory of its
threads.

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
    """Result of ``call()``; where CUDA has no memory left for it, it is called again once torch's
    allocator has given back its unused memory. ``problem``: the exception of an earlier call, if
    there was one.

    Raises torch.cuda.OutOfMemoryError where there is no memory then either.
    """
    if problem is None:
        try:
            return call()
        except RuntimeError as error:
            problem = error
    if getattr(problem, "status", None) != _NO_MEMORY or capture.capturing():
        raise problem
    torch.cuda.empty_cache()
    try:
        return call()
    except RuntimeError as second:
        if getattr(second, "status", None) != _NO_MEMORY:
            raise
        raise torch.cuda.OutOfMemoryError(
            "CUDA out of memory: none is left outside of torch's allocator to load or launch a "
            "kernel of gnnaccel's") from second
