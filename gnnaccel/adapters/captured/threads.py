"""Threads that call modules. While one captures, torch lets no other draw random numbers on the
device, so a capture is made where no other thread would, and those that come meanwhile wait.
"""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_PATIENCE = 5.0  # seconds: the captured call may itself wait for the other thread
_callers: set[threading.Thread] = set()
_lock, _capturing = threading.Lock(), threading.RLock()


class Here(threading.local):
    """State of a thread. ``inside``: it is in a call that is looked after already. A thread that
    asks for the first time is a caller of modules from then on."""

    inside = False

    def __init__(self) -> None:
        thread = threading.current_thread()
        # a thread of autograd's works for a caller, which may be the one that captures
        if type(thread).__name__ != "_DummyThread":
            if _capturing.acquire(timeout=_PATIENCE):
                _capturing.release()
            called()


def called() -> None:
    """Note that this thread calls modules."""
    with _lock:
        _callers.add(threading.current_thread())


def alone() -> bool:
    """Whether no other living thread has called modules."""
    here = threading.current_thread()
    with _lock:
        _callers.difference_update([one for one in _callers if not one.is_alive()])
        return _callers <= {here}


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """A block that captures."""
    with _capturing:
        yield


here = Here()
_callers.clear()  # the thread that imports this need not call modules
