"""Work beside the program: kernels are compiled in threads of their own.

NVRTC leaves the interpreter lock free, so the program goes on meanwhile. A process that forks or
ends waits for the kernels that are being compiled at that moment.
"""
from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence

#: threads while a call waits, where there are more cores: a layer has about as many kernels
_MOST = 12
#: threads beside a program that goes on; each takes some of the speed of the core it shares
_BESIDE = 4


class Stopped(BaseException):
    """Raised in a thread of this module when the process ends; not an error of its work."""


class _Workers:
    """The threads of this process. ``pieces``: a lock per thread, held while it compiles."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.pieces: list[threading.Lock] = []
        self.lock = threading.Lock()
        self.open = 0
        self.stopping = False

    def submit(self, work: Callable[[], None], most: int) -> None:
        """Queue ``work``; ``most``: threads that there may be for it."""
        with self.lock:
            self.open += 1
            if self.open > len(self.pieces) < most:
                piece = threading.Lock()
                self.pieces.append(piece)
                threading.Thread(target=self._run, args=(piece,), daemon=True,
                                 name="gnnaccel: compiling").start()
        self.queue.put(work)

    def _run(self, piece: threading.Lock) -> None:
        _here.piece = piece
        while True:
            work = self.queue.get()
            try:
                work()
            except Stopped:
                return
            finally:
                with self.lock:
                    self.open -= 1


_here = threading.local()
_workers = _Workers()


def submit(work: Callable[[], None]) -> None:
    """Run ``work`` in a thread of this module, after earlier submissions. It must not raise."""
    _workers.submit(work, _beside())


def share(works: Sequence[Callable[[], None]]) -> None:
    """Run all ``works``, which must not raise, in this thread and those of this module. Returns
    when all have ended."""
    queue, ended = list(reversed(works)), threading.Semaphore(0)

    def some() -> None:
        while queue:
            try:
                work = queue.pop()
            except IndexError:  # another thread took the last one
                return
            try:
                work()
            finally:
                ended.release()

    # a thread of this module waits for nobody else
    most = _most() if getattr(_here, "piece", None) is None else _beside()
    for _ in range(min(len(works) - 1, most)):
        _workers.submit(some, most)
    some()
    for _ in works:
        ended.acquire()


def _most() -> int:
    """Threads that compile at once while a call waits. One core is left to the program."""
    return min(_MOST, max(1, (os.cpu_count() or 1) - 1))


def _beside() -> int:
    """Threads that compile at once while the program goes on."""
    return min(_BESIDE, max(1, (os.cpu_count() or 1) // 4))


def pending() -> int:
    """Number of pieces of work that wait or run."""
    return _workers.open


@contextlib.contextmanager
def piece() -> Iterator[None]:
    """A block that is not to be cut off by a fork or by the end of the process: the compiling of
    one kernel. Raises Stopped when the process ends. Of no effect in other threads."""
    lock = getattr(_here, "piece", None)
    if lock is None:
        yield
        return
    with lock:
        if _workers.stopping:
            raise Stopped
        yield


def _stop() -> None:
    _workers.stopping = True
    for lock in list(_workers.pieces):
        lock.acquire()


def _before_fork() -> None:
    _workers.lock.acquire()
    for lock in _workers.pieces:
        lock.acquire()


def _in_parent() -> None:
    for lock in _workers.pieces:
        lock.release()
    _workers.lock.release()


def _in_child() -> None:
    global _workers
    _workers = _Workers()


atexit.register(_stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
