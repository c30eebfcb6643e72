"""Modules of gnnaccel that run when something of them is first used, as in PEP 810.

``from gnnaccel.dispatch import router`` binds a module whose code has not run: ``router.routed``
runs it. So `gnnaccel.enable` loads what the patches need, and a call what that call needs.
Packages, and modules of which names are imported (``from gnnaccel.errors import GraphError``), run
at once.
"""
from __future__ import annotations

import sys
import threading
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_PREFIX = __package__ + "."


class Lazy(ModuleType):
    """A module whose code has not run to its end. It becomes a plain module when it has."""

    def __getattribute__(self, name: str) -> Any:
        # others of two underscores are the import system's, and there from the start
        if name == "__doc__" or not name.startswith("__"):
            run(self)  # waits for all of it where another thread runs it
        return ModuleType.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:  # of what is not there, such as __version__
        run(self)
        return ModuleType.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        run(self)  # else that would write over it later
        ModuleType.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        run(self)
        ModuleType.__delattr__(self, name)

    def __dir__(self) -> list[str]:
        run(self)
        return list(ModuleType.__dir__(self))


def run(module: ModuleType) -> None:
    """Run a module's code, if it has not run. Other threads wait for it."""
    if type(module) is not Lazy:
        return
    spec: Any = module.__spec__
    loader = spec.loader
    if not isinstance(loader, _Loader):  # another thread was faster
        return
    with loader.lock:
        if loader.running or type(module) is not Lazy:  # its own code asks for a name
            return
        loader.running = spec._initializing = True  # the latter as of a module being imported
        try:
            loader.of.exec_module(module)
        finally:
            loader.running = spec._initializing = False
        spec.loader = loader.of
        ModuleType.__setattr__(module, "__loader__", loader.of)
        ModuleType.__setattr__(module, "__class__", ModuleType)


class _Loader:
    """The loader ``of`` a module that is to run later. ``running``: whether it does now, in the
    thread that holds ``lock``."""

    def __init__(self, of: Any):
        self.of, self.lock, self.running = of, threading.RLock(), False

    def __getattr__(self, name: str) -> Any:  # the module's text, for debuggers and the like
        return getattr(self.of, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.of.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if any(not name.startswith("__") for name in vars(module)):  # `importlib.reload`
            self.of.exec_module(module)
        else:
            module.__class__ = Lazy


class LazyFinder:
    """Finds modules of gnnaccel, but for packages and for what is run as a script."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The module's spec with a loader that waits; None for all others."""
        if not name.startswith(_PREFIX) or name.endswith(".__main__"):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None and spec.submodule_search_locations is None:
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec


def install() -> None:
    """Ask this finder before the others; again is without effect."""
    if not any(finder is LazyFinder for finder in sys.meta_path):
        sys.meta_path.insert(0, LazyFinder)
