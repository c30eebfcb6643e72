"""The view of the stand-ins that PyG gets.

PyG looks for these packages when it is imported and then computes some things by them. Its results
must not depend on a stand-in, so `torch_geometric.typing` does not find any while it is imported,
and PyG goes on without, as before. With ``pyg=True`` it gets the classes of torch_sparse, so that
layers and data objects take a `SparseTensor`, but still computes nothing else by it.
"""
from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from gnnaccel.adapters.importhook import Handle, Loader, found_by_others, when_imported
from gnnaccel.adapters.patching import PatchSet
from gnnaccel.adapters.standins import finder

_TYPING = "torch_geometric.typing"
_MESSAGES = "torch_geometric.nn.conv.message_passing"
_TO_SPARSE = "torch_geometric.transforms.to_sparse_tensor"
_shown: set[str] = set()  # packages that PyG may see
_awaited: dict[str, Handle] = {}  # modules of PyG in which something is replaced
_patches = PatchSet()
_local = threading.local()


def imported() -> bool:
    """Whether PyG has looked for the packages already."""
    return _TYPING in sys.modules


def shown() -> frozenset[str]:
    """The stand-ins that PyG may see."""
    return frozenset(_shown)


def watch(show: bool) -> None:
    """Hide the stand-ins from PyG's import. ``show``: let it see torch_sparse."""
    if show:
        _shown.add("torch_sparse")
    if not imported() and TypingFinder not in sys.meta_path:
        sys.meta_path.insert(0, TypingFinder)
    _once_imported(_MESSAGES, _explain_layers)


def _leave() -> None:
    if TypingFinder in sys.meta_path:
        sys.meta_path.remove(TypingFinder)


def _once_imported(name: str, change: Callable[[], None]) -> None:
    if name not in _awaited:
        _awaited[name] = when_imported(name, change)


class TypingFinder:
    """Finds `torch_geometric.typing`, nothing else, with a loader that hides the stand-ins."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None
                  ) -> ModuleSpec | None:
        if name != _TYPING or getattr(_local, "busy", False):
            return None
        _local.busy = True
        try:
            spec = found_by_others(TypingFinder, name, path, target)
        finally:
            _local.busy = False
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec


class _Loader(Loader):
    """Loads `torch_geometric.typing`, and hides stand-ins meanwhile."""

    def exec_module(self, module: ModuleType) -> None:
        with _hidden(finder.active() - _shown):
            super().exec_module(module)
        if _shown & finder.active():
            # samplers and EdgeIndex would call functions of the real package's library
            module.__dict__["WITH_TORCH_SPARSE"] = False
            _once_imported(_TO_SPARSE, _let_transform)
        _leave()


@contextlib.contextmanager
def _hidden(names: frozenset[str]) -> Iterator[None]:
    """A block in which these cannot be imported, as they are None in `sys.modules`."""
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _let_transform() -> None:
    """Let `ToSparseTensor` make a `SparseTensor` unless it is told otherwise, as it does where
    torch_sparse is there."""
    _patches.set(sys.modules[_TO_SPARSE], "torch_geometric",
                 SimpleNamespace(typing=SimpleNamespace(WITH_TORCH_SPARSE=True)))


def _explain_layers() -> None:
    """Have layers say what to do with a `SparseTensor` where PyG does not know the class."""
    module = sys.modules[_MESSAGES]
    native = module.MessagePassing._check_input

    def _check_input(self, edge_index, size):
        if is_unknown(edge_index):
            raise ValueError(advice)
        return native(self, edge_index, size)

    # with the globals of PyG's module, where torch.jit.script looks for names of its source
    is_unknown, advice = _is_unknown, _ADVICE
    wrapper = FunctionType(_check_input.__code__, vars(module), closure=_check_input.__closure__)
    _patches.set(module.MessagePassing, "_check_input", functools.wraps(native)(wrapper))


def _is_unknown(edge_index: Any) -> bool:
    """Whether it is the stand-in's SparseTensor and PyG's is another class."""
    kind = type(edge_index)
    return kind.__module__ == "torch_sparse.tensor" and kind is not sys.modules[
        _TYPING].SparseTensor


_ADVICE = (
    "edge_index is a SparseTensor of gnnaccel's stand-in for torch_sparse, which PyG does not "
    "know. Pass edge_index.to_torch_sparse_csr_tensor(), or let PyG know it: call "
    "gnnaccel.standins('torch_sparse', pyg=True), or set GNNACCEL_STANDINS=torch_sparse,pyg, "
    "before torch_geometric is imported")
