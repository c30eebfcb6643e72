"""Stand-ins for torch_scatter, torch_sparse and torch_cluster where these are not installed.

Many scripts import these packages, which are built for one version of torch each. The stand-ins
have their functions, over torch's own operations. A real package is never covered.
"""
from __future__ import annotations

import warnings

from gnnaccel.adapters.dgl.sparse import finder as sparse_of_dgl
from gnnaccel.adapters.standins import finder, seen_by_pyg
from gnnaccel.adapters.standins.modules import PACKAGES
from gnnaccel.errors import HostLimitError
from gnnaccel.suggest import did_you_mean

_LATE = ("torch_geometric was imported before, so its layers do not take a SparseTensor of the "
         "stand-in for torch_sparse; ask for it with pyg=True before torch_geometric is imported, "
         "or pass adj.to_torch_sparse_csr_tensor() to the layers")


def standins(*names: str, pyg: bool = False) -> tuple[str, ...]:
    """Let ``import torch_scatter``, ``torch_sparse`` and ``torch_cluster`` work where these are not
    installed, and ``import dgl.sparse`` where DGL has no library for it.

    ``names``: which of these, ``"dgl.sparse"`` among them; the first three if none is given.
    ``pyg``: True lets PyG's layers, data objects and `ToSparseTensor` use the stand-in's
    `SparseTensor`; by default PyG goes on as if none of the packages was there. Returns the
    packages that are stood in for, without those that are installed. In effect for the rest of the
    process; call it before the imports.
    ``GNNACCEL_STANDINS=torch_scatter,torch_sparse,pyg`` does the same at ``import gnnaccel``.

    Raises ValueError for an unknown name, HostLimitError for ``pyg=True`` where torch_geometric was
    imported before.
    """
    _check(names)
    if pyg and _too_late():
        raise HostLimitError(_LATE)
    return _install(names, pyg)


def from_environment(words: tuple[str, ...]) -> None:
    """Install the stand-ins of `GNNACCEL_STANDINS`. Raises ValueError for an unknown name; warns
    where "pyg" comes too late."""
    if not words:
        return
    names = tuple(word for word in words if word != "pyg")
    _check(names, "environment variable GNNACCEL_STANDINS: ")
    show = "pyg" in words
    if show and _too_late():
        warnings.warn(f"gnnaccel: {_LATE}", RuntimeWarning, stacklevel=2)
        show = False
    _install(names, show)


def _check(names: tuple[str, ...], where: str = "") -> None:
    choices = (*PACKAGES, sparse_of_dgl.NAME)
    for name in names:
        if name not in choices:
            raise ValueError(f"{where}there is no stand-in for {name!r}; use one of "
                             f"{', '.join(choices)}.{did_you_mean(str(name), choices)}")


def _too_late() -> bool:
    return (seen_by_pyg.imported() and "torch_sparse" not in seen_by_pyg.shown()
            and not finder.exists("torch_sparse"))


def _install(names: tuple[str, ...], show: bool) -> tuple[str, ...]:
    packages = tuple(name for name in names if name in PACKAGES)
    stood_in = finder.activate(packages if names else tuple(PACKAGES))
    if stood_in:
        seen_by_pyg.watch(show and "torch_sparse" in stood_in)
    if sparse_of_dgl.NAME in names and sparse_of_dgl.activate():
        stood_in += (sparse_of_dgl.NAME,)
    return stood_in
