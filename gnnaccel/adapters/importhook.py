"""Callbacks for the moment when a module has been imported, now or later.

A finder at the head of ``sys.meta_path`` lets the other finders find the module and wraps the
loader for that one import; nothing of it stays on the module. The finder leaves when nothing is
awaited any more.

A package that imports the awaited submodule halfway through its own ``__init__`` is not usable at
that point, so a module counts as imported when its parents are complete, too. If the import was
already under way when `when_imported` was called (in another thread, or further up the stack), its
end cannot be seen; it is noticed by `poll` and at the next import of anything new.

Finders run under a lock of the import system's, loaders under one of their module's. Whoever holds
a lock of ours may be importing and wait for one of these. So nothing is called back by a finder,
and by the loader of a module that is not awaited only where the callback's lock is free.
"""
from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Protocol


class Lock(Protocol):
    """A lock that one thread may take several times."""

    def acquire(self, blocking: bool = True) -> bool: ...
    def release(self) -> None: ...


class Handle:
    """An awaited import. ``lock`` is what the callback waits for."""

    def __init__(self, name: str, callback: Callable[[], None], lock: Lock | None) -> None:
        self.name = name
        self.lock = lock
        self._callback: Callable[[], None] | None = callback

    @property
    def pending(self) -> bool:
        """Whether the import is still awaited."""
        with _lock:
            return self in _pending

    def cancel(self) -> None:
        """Do not call back. Without effect when the call has been made or is being made."""
        with _lock:
            _take([self])

    def _call(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


_OURS = f"{__package__.partition('.')[0]}."

_lock = threading.RLock()
_pending: list[Handle] = []


def when_imported(name: str, callback: Callable[[], None], lock: Lock | None = None) -> Handle:
    """Call ``callback()`` once module ``name`` is imported: right away if it is, otherwise when its
    import is complete.

    The callback runs in the importing thread, before the ``import`` statement returns; its errors
    come out of the statement. It is called at most once; an import that fails is awaited anew.
    ``lock``: what the callback takes and other threads may hold while they import.
    """
    handle = Handle(name, callback, lock)
    with _lock:
        ready = _ready(name)
        if not ready:
            _pending.append(handle)
            if _finder not in sys.meta_path:
                sys.meta_path.insert(0, _finder)
    if ready:
        handle._call()
    return handle


def poll() -> None:
    """Call back for modules whose import was not noticed."""
    _call_ready()


def _take(handles: Sequence[Handle]) -> None:
    """Await these no longer. Call it with the lock held."""
    for handle in handles:
        if handle in _pending:
            _pending.remove(handle)
    # an interpreter that is ending has no list of finders any more
    if not _pending and _finder in (sys.meta_path or ()):
        sys.meta_path.remove(_finder)


def _lineage(name: str) -> list[str]:
    """The module's parents, outermost first, and itself."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _ready(name: str, finished: str | None = None) -> bool:
    """Whether ``name`` and its parents are imported completely. ``finished`` has run, though the
    import system is not done."""
    return all(step == finished and step in sys.modules or _complete(step)
               for step in _lineage(name))


def _complete(name: str) -> bool:
    module = sys.modules.get(name)
    # importlib keeps _initializing on the spec while a module's body runs, for its own check of
    # circular imports
    return (module is not None
            and not getattr(getattr(module, "__spec__", None), "_initializing", False))


def _call_ready(finished: str | None = None) -> None:
    with _lock:
        ready = [handle for handle in _pending if _ready(handle.name, finished)]
        _take(ready)
    if finished is not None and ready:
        _bind(finished)
    _call_all(ready)


def _call_free() -> None:
    """Call back for modules whose import was not noticed. Those whose lock another thread holds are
    awaited on, and all are while modules of ours are being imported: callbacks need these whole."""
    with _lock:
        ready = [handle for handle in _pending if _ready(handle.name)]
    if ready and not all(_complete(name) for name in list(sys.modules) if name.startswith(_OURS)):
        return
    for handle in ready:
        if handle.lock is None or handle.lock.acquire(blocking=False):
            try:
                with _lock:
                    awaited = handle in _pending
                    _take([handle])
                if awaited:
                    handle._call()
            finally:
                if handle.lock is not None:
                    handle.lock.release()


def _call_all(handles: list[Handle]) -> None:
    """Call each, even if one before it raises."""
    if handles:
        try:
            handles[0]._call()
        finally:
            _call_all(handles[1:])


def _bind(name: str) -> None:
    """Make the module an attribute of its parent, as the import system will in a moment; callbacks
    may rely on it."""
    parent, _, child = name.rpartition(".")
    if parent and not hasattr(sys.modules[parent], child):
        setattr(sys.modules[parent], child, sys.modules[name])


class _Finder:
    """A finder that gives the specs of the other finders, with a loader that tells when it is
    done."""

    def __init__(self) -> None:
        self._local = threading.local()

    def find_spec(self, name: str, path: Any = None,
                  target: ModuleType | None = None) -> ModuleSpec | None:
        with _lock:
            awaited = any(name in _lineage(handle.name) for handle in _pending)
            # or an import has ended that was under way when it was asked for
            if not awaited and (name.startswith(_OURS)
                                or not any(_ready(handle.name) for handle in _pending)):
                return None
        busy = self._local.__dict__.setdefault("busy", set())
        if name in busy:  # another finder of this kind may ask all finders in turn
            return None
        busy.add(name)
        try:
            spec = found_by_others(_finder, name, path, target)
        finally:
            busy.discard(name)
        # a namespace package has no loader yet
        if spec is not None and hasattr(spec.loader, "exec_module"):
            # it hands on all that it lacks
            spec.loader = _Telling(  # type: ignore[assignment]
                spec.loader, name if awaited else None)
        return spec


def found_by_others(finder: Any, name: str, path: Any,
                    target: ModuleType | None) -> ModuleSpec | None:
    """The spec that the finders but this one give."""
    for candidate in list(sys.meta_path):
        find = None if candidate is finder else getattr(candidate, "find_spec", None)
        spec = None if find is None else find(name, path, target)
        if spec is not None:
            return spec
    return None


class Loader:
    """A loader that stands in for another during one import."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._loader, attribute)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        create = getattr(self._loader, "create_module", None)
        return None if create is None else create(spec)

    def exec_module(self, module: ModuleType) -> None:
        # hand over to the real loader for good: reload, pickling of the spec and resources must not
        # meet this one
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)


class _Telling(Loader):
    """A loader that tells when it is done; None for the name of a module that is not awaited."""

    def __init__(self, loader: Any, name: str | None) -> None:
        super().__init__(loader)
        self._name = name

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if self._name is None:
            _call_free()
        else:
            _call_ready(finished=self._name)


_finder = _Finder()
