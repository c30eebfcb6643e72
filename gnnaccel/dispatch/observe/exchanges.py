"""Standing around exchanges of rows between processes, as `watch` does around calls.

Nobody stands there unless somebody measures, and then nothing is computed for it.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch


class Exchange(NamedTuple):
    """Rows that this process is about to send. ``layer``: for which, a module or a name;
    ``backward``: whether they are gradients; ``bytes``: sent to other processes; ``device``: where
    the rows are."""

    layer: Any
    backward: bool
    bytes: int
    device: torch.device


Watcher = Callable[[Exchange], contextlib.AbstractContextManager[None]]

_watchers: tuple[Watcher, ...] = ()  # replaced, never changed in place


def add(watcher: Watcher) -> None:
    """Enter ``watcher(exchange)``, a context manager, around every exchange."""
    global _watchers
    _watchers = (*_watchers, watcher)


def remove(watcher: Watcher) -> None:
    """The opposite of `add`."""
    global _watchers
    _watchers = tuple(known for known in _watchers if known != watcher)


@contextlib.contextmanager
def around(exchange: Exchange) -> Iterator[None]:
    """A block in which the rows are sent; the watcher added last is the outermost."""
    with contextlib.ExitStack() as stack:
        for watcher in reversed(_watchers):
            stack.enter_context(watcher(exchange))
        yield
