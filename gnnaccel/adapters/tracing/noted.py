"""What is noted while a message is traced."""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from gnnaccel.adapters.tracing.rows.standins import Unseen

Result = TypeVar("Result")


class Notes:
    """What is noted while a message is traced. ``effects``: those that it has, in their order;
    ``devices``: those that it names, where its rows are: each may be a function of the arguments of
    a call; ``conditions``: what it asked about numbers, as of `conditions.noted`; both None where
    nobody would look at them again; ``arguments``: of the call at hand, where anybody would;
    ``dtype``: torch's default, where the message asked for it; ``born``: how many stand-ins for
    rows were made; ``own``: the numbers of those that the user gets, from birth a tensor of their
    own, of which others are made; ``late``: of those that turned out to be such; ``alone``: of
    those of which nothing else is made; ``wholes``: as of `node_values.Steps`."""

    dtype: torch.dtype | None = None
    wholes = False

    def __init__(self, arguments: dict | None = None, own: frozenset[int] = frozenset()):
        self.effects: list[Any] = []
        self.devices: list[Any] | None = None if arguments is None else []
        self.conditions: list[Any] | None = None if arguments is None else []
        self.arguments = arguments
        self.born, self.own = 0, own
        self.late: set[int] = set()
        self.alone: set[int] = set()


class _Thread(threading.local):
    """``notes``: those of the message that this thread traces."""

    notes: Notes | None = None


_thread = _Thread()


def notes() -> Notes:
    """Those of the message that is traced."""
    if _thread.notes is None:
        raise Unseen
    return _thread.notes


def born() -> tuple[int, bool]:
    """The number of rows that are made now, and whether they are a tensor of their own."""
    notes = _thread.notes
    if notes is None:
        return 0, False
    notes.born += 1
    return notes.born, notes.born in notes.own


def note_effect(effect: Any) -> None:
    """Note what is computed once in each call."""
    if _thread.notes is not None:
        _thread.notes.effects.append(effect)


def note_device(named: Any) -> None:
    """Note a device that has to be the one of the rows."""
    devices = notes().devices
    if devices is None:
        raise Unseen
    devices.append(named)


def followed(run: Callable[[], Result], arguments: dict | None = None) -> tuple[Result, Notes]:
    """What ``run`` gives, which traces a message of a call with these arguments, and what was
    noted. Where the user gets rows of the edges, it runs again, for each of them: a run is the same
    up to where these are made, and from there on the others are made of what the user gets."""
    own, alone = frozenset[int](), set[int]()
    while True:
        with _following(arguments, own) as notes:
            result = run()
        alone |= notes.alone
        late = notes.late - alone
        if not late and own.isdisjoint(alone):
            return result, notes
        # of those that are alone one at a time is tried, before any that is made later
        own = own - alone if not own.isdisjoint(alone) else own | {min(late)}


@contextlib.contextmanager
def _following(arguments: dict | None, own: frozenset[int]) -> Iterator[Notes]:
    """A block in which a message is traced. It serves calls with and without gradients, which are
    on in it, so that it shows where the message turns them off itself."""
    before, _thread.notes = _thread.notes, Notes(arguments, own)
    try:
        with torch.enable_grad():
            yield _thread.notes
    finally:
        _thread.notes = before


def of_wholes() -> bool:
    """Whether what is traced is given all nodes together."""
    return _thread.notes is not None and _thread.notes.wholes


def default_dtype() -> torch.dtype:
    """torch's default dtype, for the message that is traced."""
    dtype = torch.get_default_dtype()
    if _thread.notes is not None:
        _thread.notes.dtype = dtype
    return dtype
