"""When one process fails, all end, and the cause is printed once.

A process that raises writes so into the store of torch.distributed. A thread of every other process
looks there each half second, says who failed, and ends its process: the main thread may wait for
rows that never come. The process that raised waits a moment until the others know, so that none of
them takes the lost connection for the cause.
"""
from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_FAILED, _KNOWN = "gnnaccel/failed", "gnnaccel/known"
#: seconds between two looks, and limit of seconds until the others know
LOOK, PATIENCE = 0.5, 10.0
#: seconds for which those that did not fail stay, so that a launcher sees the one that did first
_AFTER = 8.0


class Watch:
    """Watches the other processes of a group from here on, until `stop`. ``store``: of
    `torch.distributed`, which all of them reach."""

    def __init__(self, store: Any, rank: int, world: int, name: str,
                 end: Callable[[int], Any] = os._exit):
        self._store = dist.PrefixStore(name, store)
        self._rank, self._world, self._end = rank, world, end
        self._over = threading.Event()
        self.failed = False  #: whether this process does
        self._thread = threading.Thread(target=self._look, name="gnnaccel-watch", daemon=True)
        if world > 1:
            self._thread.start()

    def caused_elsewhere(self, error: BaseException) -> bool:
        """Whether ``error`` is only a consequence of another process's failure."""
        if self._world == 1 or self._over.is_set():
            return False
        # the connection may be lost before the other's word is seen
        return self._other_failed() or (isinstance(error, (RuntimeError, ConnectionError))
                                        and self._wait(self._other_failed, 2 * LOOK))

    def tell(self) -> None:
        """Tell the others that this process fails, and wait a moment until they know."""
        self.failed = True
        if self._world == 1 or self._over.is_set():
            return
        self._over.set()
        try:
            self._store.set(_FAILED, str(self._rank))
            self._wait(lambda: self._store.add(_KNOWN, 0) >= self._world - 1, PATIENCE)
        except RuntimeError:
            pass  # nobody can be told: the process that held the store is gone

    def wait_for_end(self) -> None:
        """Wait, after another process has failed, for the thread that ends this one."""
        self._thread.join()

    def stop(self) -> None:
        """Stop watching."""
        self._over.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def leave(self) -> None:
        """End this process after another has failed."""
        rank = self._store.get(_FAILED).decode()
        sys.stderr.write(f"gnnaccel: rank {self._rank} ends because rank {rank} failed\n")
        sys.stderr.flush()
        sys.stdout.flush()
        self._store.add(_KNOWN, 1)
        time.sleep(_AFTER)
        self._end(1)

    def _look(self) -> None:
        while not self._over.wait(LOOK):
            if self._other_failed():
                return self.leave()

    def _other_failed(self) -> bool:
        try:
            return self._store.check([_FAILED])
        except RuntimeError:  # the process that held the store is gone
            return False

    @staticmethod
    def _wait(done: Callable[[], bool], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if done():
                return True
            time.sleep(0.05)
        return False

