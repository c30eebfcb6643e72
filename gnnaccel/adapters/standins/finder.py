"""The import finder of the stand-ins, asked last, so that a real package always comes before."""
from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from gnnaccel.adapters.standins.modules import PACKAGES

_active: set[str] = set()  # packages that are stood in for


class StandinFinder:
    """Finds the packages in `_active` and their submodules."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None
                  ) -> ModuleSpec | None:
        package, _, submodule = name.partition(".")
        if package not in _active:
            return None
        modules = PACKAGES[package].modules
        if submodule and not _is_ours(package):
            return None  # a real package was found later
        if submodule and submodule not in modules:
            # another name than the module's, or "from package import x" drops the message
            raise ModuleNotFoundError(_missing(package, submodule), name=package)
        nested = not submodule or any(each.startswith(submodule + ".") for each in modules)
        return ModuleSpec(name, _Loader(package, submodule),  # type: ignore[arg-type]
                          origin="stand-in by gnnaccel", is_package=nested)


class _Loader:
    """Makes a stand-in: a package, or one of its submodules."""

    def __init__(self, package: str, submodule: str):
        self.package, self.submodule = package, submodule

    def create_module(self, spec: ModuleSpec) -> None:
        """None: an ordinary module."""

    def exec_module(self, module: Any) -> None:
        package, content = self.package, PACKAGES[self.package]

        def __getattr__(name: str) -> Any:
            raise AttributeError(_missing(package, name), name=name, obj=module)

        module.__doc__ = f"gnnaccel's stand-in for {module.__name__} {content.version}"
        module.__getattr__ = __getattr__
        names = content.names(self.submodule) if self.submodule else content.filled(module)
        module.__dict__.update(names)
        module.__all__ = list(names)


def _missing(package: str, name: str) -> str:
    return f"gnnaccel's stand-in for {package} has no {name}; {PACKAGES[package].hint(name)}"


def activate(names: tuple[str, ...]) -> tuple[str, ...]:
    """Stand in for those of ``names`` that cannot be found. Returns them."""
    absent = tuple(name for name in names if not exists(name))
    _active.update(absent)
    if absent and StandinFinder not in sys.meta_path:
        sys.meta_path.append(StandinFinder)
    return absent


def active() -> frozenset[str]:
    """The packages that are stood in for."""
    return frozenset(_active)


def exists(name: str) -> bool:
    """Whether there is a real package, importing none of it."""
    if name in sys.modules:
        return not _is_ours(name)
    spec = importlib.util.find_spec(name)
    return spec is not None and not isinstance(spec.loader, _Loader)


def _is_ours(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return isinstance(getattr(spec, "loader", None), _Loader)
