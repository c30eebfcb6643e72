"""Replacing attributes of a host's classes and modules, and restoring them exactly."""
from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gnnaccel.errors import PatchError
from gnnaccel.near import did_you_mean

_ABSENT = object()
_lock = threading.RLock()
# (id of owner, name) of everything replaced now, by whichever set; the sets keep the owners alive
_replaced: set[tuple[int, str]] = set()


@dataclass(frozen=True)
class Patch:
    """One replacement. ``original`` is what stood in the owner's own ``__dict__``, or _ABSENT if it was inherited."""

    owner: Any
    name: str
    original: Any
    new: Any

    @property
    def path(self) -> str:
        owner = self.owner
        prefix = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
        return f"{prefix}.{self.name}"


class PatchSet:
    """Attributes replaced together and restored together."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []

    def set(self, owner: Any, name: str, new: Any) -> None:
        """Replace ``owner.name``, of a class or module, by ``new``.

        PatchError when this or another set has replaced it already, or when ``owner`` has no such attribute.
        """
        with _lock:
            patch = Patch(owner, name, vars(owner).get(name, _ABSENT), new)
            if not hasattr(owner, name):
                raise PatchError(f"{patch.path} does not exist, so it cannot be replaced; this host version differs "
                                 f"from those tested.{did_you_mean(name, dir(owner))}")
            self._put(patch)

    def add(self, owner: Any, name: str, new: Any) -> None:
        """Give ``owner``, a class or module, the attribute ``name``, which it lacks. PatchError when it has it."""
        with _lock:
            patch = Patch(owner, name, _ABSENT, new)
            if hasattr(owner, name):
                raise PatchError(f"{patch.path} exists, so it cannot be added; this host version differs from those tested")
            self._put(patch)

    def _put(self, patch: Patch) -> None:
        if (id(patch.owner), patch.name) in _replaced:
            raise PatchError(f"{patch.path} is replaced already; restore it first")
        setattr(patch.owner, patch.name, patch.new)
        _replaced.add((id(patch.owner), patch.name))
        self._patches.append(patch)

    def restore(self) -> list[str]:
        """Put everything back as it was, latest first.

        An attribute that somebody else has replaced in the meantime keeps theirs, with one warning; returns the paths
        of those.
        """
        drifted = []
        with _lock:
            while self._patches:
                patch = self._patches.pop()
                _replaced.discard((id(patch.owner), patch.name))
                if vars(patch.owner).get(patch.name, _ABSENT) is not patch.new:
                    drifted.append(patch.path)
                else:
                    _put_back(patch)
        if drifted:
            warnings.warn(f"gnnaccel left {', '.join(drifted)} alone: replaced by somebody else after gnnaccel. To "
                          "get the original back, undo theirs before gnnaccel.disable()", RuntimeWarning, stacklevel=2)
        return drifted

    def undo(self, owner: Any, name: str) -> None:
        """Put ``owner.name`` alone back, if this set has replaced it and nobody else has since."""
        with _lock:
            for patch in self._patches:
                if patch.owner is owner and patch.name == name and vars(owner).get(name, _ABSENT) is patch.new:
                    self._patches.remove(patch)
                    _replaced.discard((id(owner), name))
                    _put_back(patch)
                    return

    def holds(self, owner: Any, name: str) -> bool:
        """Whether this set has replaced ``owner.name``."""
        with _lock:
            return any(patch.owner is owner and patch.name == name for patch in self._patches)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """A block in which everything is as it was before, but for what somebody else has replaced since."""
        with _lock:
            taken = [patch for patch in self._patches if vars(patch.owner).get(patch.name, _ABSENT) is patch.new]
        for patch in taken:
            _put_back(patch)
        try:
            yield
        finally:
            for patch in taken:
                setattr(patch.owner, patch.name, patch.new)

    def names(self) -> list[str]:
        """Dotted paths of what is replaced now, in the order of replacement."""
        return [patch.path for patch in self._patches]

    def __len__(self) -> int:
        return len(self._patches)

    def __iter__(self) -> Iterator[Patch]:
        """What is replaced now, in the order of replacement."""
        return iter(tuple(self._patches))


def _put_back(patch: Patch) -> None:
    if patch.original is _ABSENT:
        delattr(patch.owner, patch.name)
    else:
        setattr(patch.owner, patch.name, patch.original)
