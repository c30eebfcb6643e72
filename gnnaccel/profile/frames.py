"""Which record belongs to which call, and what to call its layer.

Calls of one thread lie on a stack; a record belongs to the innermost that has none.
"""
from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from gnnaccel.dispatch.observe.records import Record
from gnnaccel.dispatch.observe.watch import Visit
from gnnaccel.dispatch.policy import names
from gnnaccel.dispatch.policy.names import IdentityMap, qualified_name


class Naming:
    """Layers by the names given to them, else by those they have in the model that runs, else by a
    number among those of their class, such as "GATConv #2".

    A layer that its model holds under two names is "convs.0 = last"; the layer of a second
    model that has the name of a first one's is "convs.0 #2".
    """

    def __init__(self) -> None:
        self._numbers: IdentityMap[int] = IdentityMap()
        self._per_class: dict[str, int] = {}
        self._holders: dict[str, weakref.ref] = {}  # of names that models have for their layers

    def of(self, layer: Any) -> str:
        """``layer``: a module, or an operation's own name."""
        if isinstance(layer, str):
            return layer
        given = qualified_name(layer)
        if given is not None:
            return given
        found = names.found(layer)
        if found.name is not None:
            return self._told_apart(" = ".join((found.name, *found.others)), layer)
        name, number = type(layer).__name__, self._numbers.get(layer)
        if number is None:
            number = self._per_class[name] = self._per_class.get(name, 0) + 1
            self._numbers.set(layer, number)
        return f"{name} #{number}"

    def _told_apart(self, name: str, layer: Any) -> str:
        """``name``, with a number where another living layer goes by it."""
        for number in itertools.count(1):
            numbered = name if number == 1 else f"{name} #{number}"
            holder = self._holders.get(numbered)
            held = None if holder is None else holder()
            if held is None:
                self._holders[numbered] = weakref.ref(layer)
            if held is None or held is layer:
                break
        return numbered


def who(name: str | None, layer: str) -> str:
    """A layer for a reader, with its class where the name does not begin with it."""
    return layer if not name else name if name.startswith(layer) else f"{name} ({layer})"


class Frame:
    """A call that is running. ``record``: of its decision, once made; ``outer``: the call inside
    which it runs."""

    __slots__ = ("visit", "outer", "record")

    def __init__(self, visit: Visit, outer: Frame | None):
        self.visit, self.outer = visit, outer
        self.record: Record | None = None


class Frames(threading.local):
    """The calls that run in this thread, one inside the other."""

    def __init__(self) -> None:
        self._stack: list[Frame] = []

    @contextlib.contextmanager
    def inside(self, visit: Visit) -> Iterator[Frame]:
        frame = Frame(visit, self._stack[-1] if self._stack else None)
        self._stack.append(frame)
        try:
            yield frame
        finally:
            self._stack.pop()

    def sink(self, record: Record) -> None:
        """A sink for `dispatch.records`."""
        self.takes(record)

    def takes(self, record: Record) -> bool:
        """Give the record to its call; False for a forward that no call here is waiting for."""
        if record["direction"] != "forward":
            return True
        if not self._stack or self._stack[-1].record is not None:
            return False
        self._stack[-1].record = record
        return True
