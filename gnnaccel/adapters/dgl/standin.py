"""A stand-in for ``dgl.graphbolt`` where it cannot be loaded, so that the rest of DGL can.

``import dgl`` imports ``dgl.graphbolt``, which loads a library built for one version of torch and,
in DGL 2.1, modules that torchdata has dropped. DGL itself uses it for distributed sampling only.
The stand-in is for a torch without such a library, or a torchdata without these modules, and for
nothing else; errors of a complete installation are raised. The check looks at files: it imports
neither graphbolt nor torchdata.
"""
from __future__ import annotations

import importlib.util
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from gnnaccel.adapters.importhook import found_by_others
from gnnaccel.finder import NAME, GraphboltFinder

_LIBRARIES = {"linux": "libgraphbolt_pytorch_{}.so", "darwin": "libgraphbolt_pytorch_{}.dylib",
              "win32": "graphbolt_pytorch_{}.dll"}
# unindented: an import that must succeed
_IMPORT = re.compile(r"^(?:from|import)\s+(torchdata[\w.]*)", re.MULTILINE)


def find_spec(name: str, path: Any, target: ModuleType | None) -> ModuleSpec | None:
    """The stand-in's spec, or None where DGL's own module is to be found by the finders behind.

    ModuleNotFoundError for a module inside the stand-in.
    """
    if name != NAME:
        if not isinstance(getattr(getattr(sys.modules.get(NAME), "__spec__", None), "loader", None),
                          _Loader):
            return None
        raise ModuleNotFoundError(
            f"{name} is not there: "
            f"{sys.modules[NAME].__spec__.loader.missing}",  # type: ignore[union-attr]
            name=NAME)
    spec = found_by_others(GraphboltFinder, name, path, target)
    if spec is None or not spec.submodule_search_locations:  # DGL before 2.0 has none
        return None
    missing = _missing(Path(next(iter(spec.submodule_search_locations))))
    if missing is None:
        return None
    return ModuleSpec(name, _Loader(missing),  # type: ignore[arg-type]
                      origin="stand-in by gnnaccel", is_package=True)


class _Loader:
    """The loader of the stand-in. ``missing``: what DGL's own module lacks, and what to do about
    it."""

    def __init__(self, missing: str):
        self.missing = missing

    def create_module(self, spec: ModuleSpec) -> None:
        """None: an ordinary module."""

    def exec_module(self, module: Any) -> None:
        missing = self.missing

        def __getattr__(name: str) -> Any:
            raise AttributeError(f"dgl.graphbolt.{name} is not there: {missing}")

        class FusedCSCSamplingGraph:
            """The class by which dgl.distributed tests whether a partition is of graphbolt's kind.
            None is."""

            def __init__(self, *args: Any, **kwargs: Any):
                raise ImportError(f"dgl.graphbolt.FusedCSCSamplingGraph cannot be made: {missing}",
                                  name=NAME)

        module.__doc__ = f"Stands in for dgl.graphbolt: {missing}"
        module.__getattr__ = __getattr__
        FusedCSCSamplingGraph.__module__ = NAME
        FusedCSCSamplingGraph.__qualname__ = "FusedCSCSamplingGraph"
        module.FusedCSCSamplingGraph = FusedCSCSamplingGraph


def _missing(package: Path) -> str | None:
    """A sentence on what the graphbolt in this folder lacks and what to install; None when it is
    complete."""
    version = _torch_version()
    library = _library(version)
    modules = [] if library else sorted(name for name in _needed(package) if not _exists(name))
    if library:
        return (f"this DGL has no graphbolt library for torch {version} "
                f"({library}). The rest of DGL works. For graphbolt "
                "install a DGL that was built for this torch, or a torch that "
                "this DGL has a library for")
    if modules:
        return (f"the installed torchdata has no {', '.join(modules)}, which this "
                "DGL's graphbolt needs, or there is no "
                "torchdata. The rest of DGL works. For graphbolt install torchdata 0.9 or older")
    return None


def _torch_version() -> str:
    import torch  # DGL has imported it by now

    return torch.__version__.split("+", maxsplit=1)[0]


def _library(version: str) -> str | None:
    """The file name of the library that graphbolt would load and does not find; None if it is
    there."""
    from dgl._ffi import libinfo

    name = _LIBRARIES.get(sys.platform, _LIBRARIES["linux"]).format(version)
    return None if (Path(libinfo.find_lib_path()[0]).parent / "graphbolt" / name).exists() else name


def _needed(package: Path) -> set[str]:
    """The modules of torchdata without which graphbolt's own do not import."""
    return {name for file in package.rglob("*.py")
            for name in _IMPORT.findall(file.read_text(encoding="utf-8"))}


def _exists(name: str) -> bool:
    """Whether there is such a module. Imports none of it."""
    top, *rest = name.split(".")
    if name in sys.modules:
        return True
    spec = importlib.util.find_spec(top)
    folders = ([Path(folder) for folder in (spec.submodule_search_locations or ())]
               if spec is not None else [])
    return any((folder.joinpath(*rest) / "__init__.py").exists()
               or folder.joinpath(*rest).with_suffix(".py").exists()
               for folder in folders)
