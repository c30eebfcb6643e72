"""Watchers around exchanges of rows between processes, as `watch` has them around calls.

There are none unless somebody measures, and without them nothing is computed.
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
    _watchers = tuple(each for each in _watchers if each != watcher)


@contextlib.contextmanager
def around(exchange: Exchange) -> Iterator[None]:
    """A block in which the rows are sent; the watcher added last is the outermost."""
    with contextlib.ExitStack() as stack:
        for watcher in reversed(_watchers):
            stack.enter_context(watcher(exchange))
        yield
