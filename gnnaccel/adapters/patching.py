"""Replacement of attributes of a host's classes and modules, and their exact restoration."""
from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gnnaccel.errors import PatchError
from gnnaccel.suggest import did_you_mean

_ABSENT = object()
_FEW = 256  # more than the hosts' own classes and modules need, about
_lock = threading.RLock()
# replacements that hold now, by the owner's id and the name: the set that did it, and the patch,
# whose owner may be gone
_replaced: dict[tuple[int, str], tuple[PatchSet, Patch]] = {}


@dataclass(frozen=True, eq=False)
class Patch:
    """One replacement. ``held`` refers to the owner weakly, as classes may come and go by the
    thousand, and ``key`` is its place in `_replaced`. ``original`` is the former value in the
    owner's own ``__dict__``, or _ABSENT if it was inherited. ``why`` says in a sentence what for;
    of torch's own functions ``active`` and ``cost`` say when the replacement does anything, and
    what it costs (docs/patches.md); ``stays``: as of `PatchSet.set`."""

    held: weakref.ref
    key: tuple[int, str]
    path: str
    name: str
    original: Any
    new: Any
    why: str = ""
    active: str = ""
    cost: str = ""
    stays: bool = False

    @classmethod
    def of(cls, owner: Any, name: str, original: Any, new: Any, *texts: Any) -> Patch:
        """The patch of ``owner.name``; ``texts``: `why`, `active`, `cost` and `stays`."""
        prefix = (f"{owner.__module__}.{owner.__qualname__}"
                  if isinstance(owner, type) else owner.__name__)
        return cls(weakref.ref(owner), (id(owner), name), f"{prefix}.{name}", name, original, new,
                   *texts)

    @property
    def owner(self) -> Any:
        """The class or module; None where it is gone."""
        return self.held()


class PatchSet:
    """Attributes replaced together and restored together."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []
        self._aside: list[Patch] = []  # patches that are taken back for a while
        self._most = _FEW  # patches after which those of owners that are gone are dropped

    @staticmethod
    def alone() -> contextlib.AbstractContextManager[Any]:
        """A block in which no other thread replaces anything, or puts it back."""
        return _lock

    def set(self, owner: Any, name: str, new: Any, why: str = "", *, active: str = "",
            cost: str = "", stays: bool = False) -> None:
        """Replace ``owner.name``, of a class or module, by ``new``. ``why``, ``active`` and
        ``cost`` as in `Patch`; ``stays``: others put theirs around it as a matter of course, within
        which it may stay for good.

        A value that somebody else has put in the place of an earlier replacement since is the one
        that `restore` puts back. PatchError when this or another set has replaced it and that still
        stands, or when ``owner`` has no such attribute.
        """
        with _lock:
            patch = Patch.of(owner, name, vars(owner).get(name, _ABSENT), new, why, active, cost,
                             stays)
            if not hasattr(owner, name):
                raise PatchError(f"{patch.path} does not exist, so it cannot be replaced; "
                                 "this host version differs "
                                 f"from those tested.{did_you_mean(name, dir(owner))}")
            self._put(patch)

    def add(self, owner: Any, name: str, new: Any, why: str = "") -> None:
        """Give ``owner``, a class or module, the attribute ``name``, which it lacks. PatchError
        when it has it."""
        with _lock:
            patch = Patch.of(owner, name, _ABSENT, new, why)
            if hasattr(owner, name):
                raise PatchError(f"{patch.path} exists, so it cannot be added; this host "
                                 "version differs from those tested")
            self._put(patch)

    def _put(self, patch: Patch) -> None:
        entry = _replaced.get(patch.key)
        if entry is not None:
            owner, before = entry
            if before in owner._aside:  # and will be there again in a moment
                return
            if before.owner is not None and patch.original is before.new:
                raise PatchError(f"{patch.path} is replaced already; restore it first")
            owner._patches.remove(before)
        setattr(patch.held(), patch.name, patch.new)
        _replaced[patch.key] = self, patch
        self._patches.append(patch)
        if len(self._patches) > self._most:
            self._drop_gone()

    def _drop_gone(self) -> None:
        for patch in [patch for patch in self._patches if patch.owner is None]:
            self._patches.remove(patch)
            del _replaced[patch.key]
        self._most = max(_FEW, 2 * len(self._patches))

    def restore(self) -> list[str]:
        """Put everything back as it was, latest first.

        An attribute that somebody else has replaced in the meantime keeps theirs, with one warning.
        Returns the paths of these.
        """
        drifted = []
        with _lock:
            while self._patches:
                patch = self._patches.pop()
                del _replaced[patch.key]
                owner = patch.owner
                if owner is None or patch in self._aside:
                    continue
                if vars(owner).get(patch.name, _ABSENT) is not patch.new:
                    drifted += [] if patch.stays else [patch.path]
                else:
                    _put_back(owner, patch)
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
                    del _replaced[patch.key]
                    _put_back(owner, patch)
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
            patches = [(owner, patch) for owner, patch in self._living()
                       if vars(owner).get(patch.name, _ABSENT) is patch.new]
            self._aside += [patch for _, patch in patches]
            for owner, patch in patches:
                _put_back(owner, patch)
        try:
            yield
        finally:
            with _lock:
                for owner, patch in patches:
                    self._aside.remove(patch)
                    if (patch in self._patches
                        and vars(owner).get(patch.name, _ABSENT) is patch.original):
                        setattr(owner, patch.name, patch.new)

    def _living(self) -> list[tuple[Any, Patch]]:
        """The patches of owners that are there, with these."""
        pairs = [(patch.owner, patch) for patch in self._patches]
        return [(owner, patch) for owner, patch in pairs if owner is not None]

    def names(self) -> list[str]:
        """Dotted paths of the attributes replaced now, in the order of replacement."""
        return [patch.path for _, patch in self._living()]

    def __len__(self) -> int:
        return len(self._living())

    def __iter__(self) -> Iterator[Patch]:
        """The patches that hold now, in the order of replacement."""
        return iter([patch for _, patch in self._living()])


def _put_back(owner: Any, patch: Patch) -> None:
    if patch.original is _ABSENT:
        delattr(owner, patch.name)
    else:
        setattr(owner, patch.name, patch.original)


def by_layer(chosen: Callable[[Any], bool], theirs: Callable, others: Callable) -> Callable:
    """A method that is ``theirs`` for the ``chosen`` layers and for all ``others`` that one."""
    from gnnaccel.dispatch.uncompiled import kept_apart

    @kept_apart
    @functools.wraps(theirs)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (theirs if chosen(self) else others)(self, *args, **kwargs)

    return method
