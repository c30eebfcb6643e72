"""Inputs that callers write to between forward and backward, as in ``x += conv(x)``.

Backward of some operations reads rows that the host's code gathers from and does not need again.
torch refuses to go back once such rows were written to; with the host's code it would not. So these
operations get copies, where callers write. Who does is found out by torch's counts of writes: in
the first calls from a function of the user's all inputs are copied, later those that were written
to, and mostly none. The counts of a call are compared in its backward, or in the next call where
that comes first, as in a loop or an evaluation.
"""
from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnnaccel.cuda.runtime import capture

#: calls from a function until it is known which inputs it writes to: before the first backward, and
#: after that
_BEFORE, _AFTER = 64, 4
#: bytes of an input that is copied to find that out, whatever memory is free ...
_SMALL = 1 << 26
#: ... and the share of the free memory that a larger one may take
_SHARE = 0.25
#: places that one operation knows
_MOST = 1024
_LIBRARIES = {"gnnaccel", "torch", "torch_geometric", "dgl", *sys.stdlib_module_names} - {
    "__main__"}

#: by the id of a function's code: whether it is the user's, of none of the libraries
is_users: dict[int, bool] = {}
#: what is known of each operation's calls, by the id of the user's code, plus `Operation.apart`
of_operations: list[dict[int, Place]] = []


class Place:
    """A function of the user's that calls an operation. ``code``: the id of its code; ``left``:
    calls until it is known what it writes to; ``written``: the numbers of the inputs that were
    written to; ``last``: the last call, until it is compared."""

    __slots__ = ("code", "last", "left", "written")

    def __init__(self, code: int = 0) -> None:
        self.code, self.left, self.written = code, _BEFORE, set[int]()
        self.last: Watched | None = None

    def copies(self, inputs: Sequence[Tensor | None]
               ) -> tuple[list[Tensor | None], Watched | None]:
        """`copies` of a call from here."""
        given, made = list(inputs), dict[int, Tensor]()
        if self.last is not None:
            self.written.update(self.last.written())
        watched = Watched(self) if self.left else None
        self.left = max(0, self.left - 1)
        self.last = watched if self.left else None
        for at, t in enumerate(given):
            if t is None or not _may_be_written(t):
                continue
            if watched is not None and _fits(t):
                watched.add(at, t)
            elif at not in self.written:
                continue
            if id(t) not in made:
                made[id(t)] = t.clone()
            given[at] = made[id(t)]
        return given, watched


class Watched:
    """Counts of writes to the inputs of one call, as they were in forward."""

    __slots__ = ("counts", "place")

    def __init__(self, place: Place):
        self.place = place
        self.counts: list[tuple[int, Tensor, int]] = []

    def add(self, at: int, t: Tensor) -> None:
        counter = t.detach()
        counter.data = t.new_empty(0)  # counts the writes to t, without its memory
        self.counts.append((at, counter, t._version))

    def written(self) -> list[int]:
        """The numbers of the inputs that were written to since."""
        return [at for at, counter, then in self.counts if counter._version != then]

    def compare(self, grads: Any) -> None:
        """Note what was written to since, before backward."""
        place = self.place
        place.left = min(place.left, _AFTER)
        place.written.update(self.written())
        if place.last is self:
            place.last = None  # what is written to after backward needs no copies


def copies(places: dict[int, Place], code: Any, inputs: Sequence[Tensor | None], apart: int = 0
           ) -> tuple[Sequence[Tensor | None], Watched | None]:
    """The inputs, or copies of those that may be written to; and what to `watch`. ``places``: of
    one operation, by the id of the user's ``code``, plus ``apart``."""
    if not any([t is not None and t.requires_grad for t in inputs]):
        return inputs, None  # no backward comes
    place = places.get(id(code) + apart)
    if place is None:
        if len(places) >= _MOST:
            places.clear()
        place = places[id(code) + apart] = Place(id(code))
    return place.copies(inputs)


def watch(watched: Watched | None, results: Any) -> None:
    """Compare the counts once a gradient of the results arrives."""
    if watched is None:
        return
    for one in (results,) if isinstance(results, Tensor) else results:
        if one.grad_fn is not None:  # the node of all of them
            one.grad_fn.register_prehook(watched.compare)
            return


def _may_be_written(t: Tensor) -> bool:
    """Whether torch lets callers write to it: not to leaves that want gradients."""
    return t.is_floating_point() and not (t.is_leaf and t.requires_grad) and not t.is_inference()


def _fits(t: Tensor) -> bool:
    """Whether there is memory for a copy, which a CUDA graph would make again in each replay."""
    size = t.numel() * t.element_size()
    if size <= _SMALL or not t.is_cuda:
        return True
    if capture.capturing():
        return False
    free = torch.cuda.mem_get_info(t.device)[0] + (torch.cuda.memory_reserved(t.device)
                                                   - torch.cuda.memory_allocated(t.device))
    return size <= free * _SHARE


def _forget(gone: int) -> None:
    """Forget a function that is gone: another one may get its id."""
    is_users.pop(gone, None)
    for places in of_operations:
        for key in [key for key, place in list(places.items()) if place.code == gone]:
            places.pop(key, None)  # another thread may have


def learned(frame: Any) -> bool:
    """Whether the code of a frame is the user's, from now on in `is_users`."""
    code, name = frame.f_code, frame.f_globals.get("__name__") or ""
    users = is_users[id(code)] = name.partition(".")[0] not in _LIBRARIES
    weakref.finalize(code, _forget, id(code)).atexit = False
    return users
