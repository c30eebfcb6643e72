"""The import finder of ``dgl.sparse`` where DGL has no library for it: DGL's own Python, over our
functions. It is asked before the others, since DGL's package is there and fails when it is
imported.
"""
from __future__ import annotations

import ast
import importlib.util
import sys
from importlib import metadata
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "dgl.sparse"
_SPACE, _LOADS = "dgl_sparse", "load_dgl_sparse"


class SparseFinder:
    """The finder of ``dgl.sparse`` alone; its submodules are DGL's own files."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None
                  ) -> ModuleSpec | None:
        if name != NAME:
            return None
        folder = _folder()
        if folder is None or has_library(folder):
            return None
        file = folder / "sparse" / "__init__.py"
        return importlib.util.spec_from_file_location(
            name, file, loader=_Loader(name, str(file)),
            submodule_search_locations=[str(file.parent)])


class _Loader(SourceFileLoader):
    """The loader that runs DGL's own file without the call that loads the library."""

    def get_code(self, fullname: str) -> Any:
        # not the original's, which caches what it compiles next to DGL's file
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        tree.body = [statement for statement in tree.body if not _loads(statement)]
        return compile(tree, path, "exec")

    def exec_module(self, module: ModuleType) -> None:
        import torch

        from gnnaccel.adapters.dgl.sparse import functions

        setattr(torch.ops, _SPACE, functions)
        super().exec_module(module)


def _loads(statement: ast.stmt) -> bool:
    return (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
            and getattr(statement.value.func, "id", "") == _LOADS)


def activate() -> bool:
    """Stand in for ``dgl.sparse`` from now on, if DGL is installed and has no library for this
    torch. Imports neither. Returns whether it stands in."""
    if NAME in sys.modules and not _is_ours():
        return False
    folder = _folder()
    if folder is None or not (folder / "sparse").is_dir() or has_library(folder):
        return False
    if SparseFinder not in sys.meta_path:
        sys.meta_path.insert(0, SparseFinder)
    return True


def _is_ours() -> bool:
    spec = getattr(sys.modules.get(NAME), "__spec__", None)
    return isinstance(getattr(spec, "loader", None), _Loader)


def _folder() -> Path | None:
    """DGL's folder, found without importing it."""
    spec = importlib.util.find_spec("dgl")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def has_library(folder: Path) -> bool:
    """Whether DGL, in this folder, has a sparse library for the installed torch."""
    version, versions = libraries(folder)
    return version in versions


def libraries(folder: Path) -> tuple[str, list[str]]:
    """The version of torch, and those that DGL, in this folder, has a sparse library for."""
    torch = sys.modules.get("torch")
    version = metadata.version("torch") if torch is None else str(torch.__version__)
    versions = [file.stem.rsplit("_", 1)[1]
                for file in (folder / "dgl_sparse").glob("*dgl_sparse_pytorch_*")]
    return version.partition("+")[0], sorted(versions)
