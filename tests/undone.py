"""Taking back what lasts for the rest of a process, after a test."""
from __future__ import annotations

import sys

from gnnaccel.adapters.dgl.sparse import finder as sparse_of_dgl
from gnnaccel.adapters.standins import finder, seen_by_pyg
from gnnaccel.dispatch.policy import config, names


def forget_names() -> None:
    """Forget the names of all layers."""
    names._names.clear()
    config.bump()


def no_standins() -> None:
    """Stand in for nothing any more, and hide nothing from PyG, which keeps what it has seen while
    it was imported. Modules that code has imported already stay there."""
    for name in list(sys.modules):
        if name.partition(".")[0] in finder._active and finder._is_ours(name):
            del sys.modules[name]
    finder._active.clear()
    if finder.StandinFinder in sys.meta_path:
        sys.meta_path.remove(finder.StandinFinder)
    seen_by_pyg._shown.clear()
    while seen_by_pyg._awaited:
        seen_by_pyg._awaited.popitem()[1].cancel()
    seen_by_pyg._patches.restore()
    seen_by_pyg._leave()


def no_sparse_of_dgl() -> None:
    """Stand in for ``dgl.sparse`` no more. Modules that code has imported already stay there."""
    if sparse_of_dgl.SparseFinder in sys.meta_path:
        sys.meta_path.remove(sparse_of_dgl.SparseFinder)
    if sparse_of_dgl._is_ours():
        import torch

        own = sparse_of_dgl.NAME
        for name in [name for name in sys.modules if name == own or name.startswith(own + ".")]:
            del sys.modules[name]
        vars(torch.ops).pop(sparse_of_dgl._SPACE, None)
        vars(sys.modules["dgl"]).pop("sparse", None)
