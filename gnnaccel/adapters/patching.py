"""Replacement of attributes of a host's classes and modules, and their exact restoration."""
from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gnnaccel.errors import PatchError
from gnnaccel.suggest import did_you_mean

_ABSENT = object()
_lock = threading.RLock()
# replacements that hold now, by the owner's id and the name: the set that did it, which keeps the
# owner alive, and the patch
_replaced: dict[tuple[int, str], tuple[PatchSet, Patch]] = {}


@dataclass(frozen=True, eq=False)
class Patch:
    """One replacement. ``original`` is the former value in the owner's own ``__dict__``, or _ABSENT
    if it was inherited. ``why`` says in a sentence what for; of torch's own functions ``active``
    and ``cost`` say when the replacement does anything, and what it costs (docs/patches.md)."""

    owner: Any
    name: str
    original: Any
    new: Any
    why: str = ""
    active: str = ""
    cost: str = ""

    @property
    def path(self) -> str:
        owner = self.owner
        prefix = (f"{owner.__module__}.{owner.__qualname__}"
                  if isinstance(owner, type) else owner.__name__)
        return f"{prefix}.{self.name}"


class PatchSet:
    """Attributes replaced together and restored together."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []
        self._aside: list[Patch] = []  # patches that are taken back for a while

    def set(self, owner: Any, name: str, new: Any, why: str = "", *, active: str = "",
            cost: str = "") -> None:
        """Replace ``owner.name``, of a class or module, by ``new``. ``why``, ``active`` and
        ``cost`` as in `Patch`.

        A value that somebody else has put in the place of an earlier replacement since is the one
        that `restore` puts back. PatchError when this or another set has replaced it and that still
        stands, or when ``owner`` has no such attribute.
        """
        with _lock:
            patch = Patch(owner, name, vars(owner).get(name, _ABSENT), new, why, active, cost)
            if not hasattr(owner, name):
                raise PatchError(f"{patch.path} does not exist, so it cannot be replaced; "
                                 "this host version differs "
                                 f"from those tested.{did_you_mean(name, dir(owner))}")
            self._put(patch)

    def add(self, owner: Any, name: str, new: Any, why: str = "") -> None:
        """Give ``owner``, a class or module, the attribute ``name``, which it lacks. PatchError
        when it has it."""
        with _lock:
            patch = Patch(owner, name, _ABSENT, new, why)
            if hasattr(owner, name):
                raise PatchError(f"{patch.path} exists, so it cannot be added; this host "
                                 "version differs from those tested")
            self._put(patch)

    def _put(self, patch: Patch) -> None:
        key = id(patch.owner), patch.name
        entry = _replaced.get(key)
        if entry is not None:
            owner, before = entry
            if before in owner._aside:  # and will be there again in a moment
                return
            if patch.original is before.new:
                raise PatchError(f"{patch.path} is replaced already; restore it first")
            owner._patches.remove(before)
        setattr(patch.owner, patch.name, patch.new)
        _replaced[key] = self, patch
        self._patches.append(patch)

    def restore(self) -> list[str]:
        """Put everything back as it was, latest first.

        An attribute that somebody else has replaced in the meantime keeps theirs, with one warning.
        Returns the paths of these.
        """
        drifted = []
        with _lock:
            while self._patches:
                patch = self._patches.pop()
                del _replaced[id(patch.owner), patch.name]
                if patch in self._aside:
                    continue
                if vars(patch.owner).get(patch.name, _ABSENT) is not patch.new:
                    drifted.append(patch.path)
                else:
                    _put_back(patch)
        if drifted:
            warnings.warn(f"gnnaccel left {', '.join(drifted)} alone: replaced by "
                          "somebody else after gnnaccel. To "
                          "get the original back, undo theirs before gnnaccel.disable()",
                          RuntimeWarning, stacklevel=2)
        return drifted

    def undo(self, owner: Any, name: str) -> None:
        """Put ``owner.name`` alone back, if this set has replaced it and nobody else has since."""
        with _lock:
            for patch in self._patches:
                if (patch.owner is owner and patch.name == name
                    and vars(owner).get(name, _ABSENT) is patch.new):
                    self._patches.remove(patch)
                    del _replaced[id(owner), name]
                    _put_back(patch)
                    return

    def holds(self, owner: Any, name: str) -> bool:
        """Whether this set has replaced ``owner.name``."""
        with _lock:
            return any(patch.owner is owner and patch.name == name for patch in self._patches)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """A block in which everything is as it was before, but for attributes that somebody else
        has replaced since. An attribute that is restored meanwhile, in another thread, or replaced
        by somebody else, stays as it then is."""
        with _lock:
            patches = [patch for patch in self._patches
                       if vars(patch.owner).get(patch.name, _ABSENT) is patch.new]
            self._aside += patches
            for patch in patches:
                _put_back(patch)
        try:
            yield
        finally:
            with _lock:
                for patch in patches:
                    self._aside.remove(patch)
                    if (patch in self._patches
                        and vars(patch.owner).get(patch.name, _ABSENT) is patch.original):
                        setattr(patch.owner, patch.name, patch.new)

    def names(self) -> list[str]:
        """Dotted paths of the attributes replaced now, in the order of replacement."""
        return [patch.path for patch in self._patches]

    def __len__(self) -> int:
        return len(self._patches)

    def __iter__(self) -> Iterator[Patch]:
        """The patches that hold now, in the order of replacement."""
        return iter(tuple(self._patches))


def _put_back(patch: Patch) -> None:
    if patch.original is _ABSENT:
        delattr(patch.owner, patch.name)
    else:
        setattr(patch.owner, patch.name, patch.original)
