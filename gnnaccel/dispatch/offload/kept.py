"""The last result of a call in bands, which stays on the device as well for the call after it."""
from __future__ import annotations

import weakref

from torch import Tensor


class Kept:
    """One result at most: all ``rows`` on the host, and a copy on the device. Code that sees
    something happen to results between two calls lets go of it (`drop`)."""

    def __init__(self) -> None:
        self._held: tuple[weakref.ref[Tensor], int, Tensor] | None = None

    def __bool__(self) -> bool:
        return self._held is not None

    def put(self, rows: Tensor, close: Tensor) -> None:
        """Hold a result instead of the one before, until it is no longer used."""
        self._held = weakref.ref(rows, lambda gone: self.drop()), rows._version, close

    def take(self, among: list[Tensor]) -> tuple[Tensor, Tensor] | None:
        """The result and its copy on the device, if it is one of these, and unwritten. Nothing is
        held after that."""
        held, self._held = self._held, None
        if held is None:
            return None
        ref, version, close = held
        rows = next((t for t in among if t is ref()), None)
        return (rows, close) if rows is not None and rows._version == version else None

    def drop(self) -> None:
        """Hold nothing."""
        self._held = None
