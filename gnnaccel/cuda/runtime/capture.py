"""CUDA graphs: is torch's current stream being captured, and into which; loading kernels meanwhile.

A captured graph is replayed after the caller has written other numbers into the same memory. So
results that depend on the contents of memory have to be computed within the capture, and none from
before may be used.
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch



class _Here(threading.local):
    """``held``: in a `still` block of this thread, the structures from before that its captures
    use; None elsewhere."""

    held: list[Any] | None = None


here = _Here()
UNKNOWN = -1  # the number of a capture of which the driver cannot be asked
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

_cuda = torch.cuda


def _on_a_stream_that_is() -> bool:
    # torch's own function takes 1.7 us, as it looks for a context first; the default stream
    # cannot be captured
    return _cuda._initialized and _raw_stream(_device()) != 0 and _is_capturing()


#: whether torch's current stream is being captured; for the way of every call
capturing: Callable[[], bool] = bool
if torch.backends.cuda.is_built():
    _raw_stream, _device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
    _is_capturing, capturing = torch._C._cuda_isCurrentStreamCapturing, _on_a_stream_that_is


def current() -> int:
    """The number of the capture that torch's current stream is in; 0 for none.

    No other capture in this process has the same number.
    """
    return _number() if capturing() else 0


def _number() -> int:
    library = _library()
    if library is None:
        return UNKNOWN
    status, number = ctypes.c_int(), ctypes.c_uint64()
    stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))
    failed = library.cuStreamGetCaptureInfo_v2(stream, ctypes.byref(status), ctypes.byref(number),
                                               None, None, None)
    return UNKNOWN if failed else number.value


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The CUDA driver, if it can be asked."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    return (driver if hasattr(driver, "cuStreamGetCaptureInfo_v2")
            and hasattr(driver, "cuThreadExchangeStreamCaptureMode") else None)


def stream(device: torch.device) -> int:
    """The handle of torch's current stream on a device, 0 where there are no streams."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def finish(device: torch.device) -> None:
    """Wait for the current stream, so that readers on any stream find structures finished. Not
    while it is being captured, when nothing can be waited for."""
    if device.type == "cuda" and not _cuda.is_current_stream_capturing():
        _cuda.current_stream(device).synchronize()


@contextlib.contextmanager
def still() -> Iterator[list[Any]]:
    """A block of a caller who replays captures only while edges are the same tensors, unwritten.
    Captures within it may use structures that are there already. Gives the list of these, which
    the caller has to keep for the replays.

    Random keys lie in memory on the device within the block, so that each replay draws new ones.
    """
    outer, here.held = here.held, []
    try:
        yield here.held
    finally:
        here.held = outer


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """A block in which this thread may load kernels although a stream is being captured, by this
    thread or by another.

    Torch allocates memory during captures in the same way.
    """
    library = _library()
    if library is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
