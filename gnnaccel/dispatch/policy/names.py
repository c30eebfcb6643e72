"""Qualified names of layers, and the weak map by identity that keeps them.

Nothing is stored on a module, so copies, pickles and checkpoints are unaffected; and a copy has no
name until it is named itself.

In records and reports a layer has the name given by ``name_layers``, else the qualified name in the
model which is running, such as ``convs.0``. The model is found on the stack: the outermost module
whose method (``forward``, or another such as ``encode``) is running and which holds the layer. The
stack is searched once per layer, at its first record, so calls that nobody listens to pay nothing.
Names found so are for readers only: rules match the names that were given. Layers of two models may
have the same name.
"""
from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from inspect import CO_OPTIMIZED
from typing import Any, Generic, NamedTuple, TypeVar

from gnnaccel.dispatch.policy import config

V = TypeVar("V")


class IdentityMap(Generic[V]):
    """Values for objects, by identity and weakly: an entry goes when its object does.

    An object that its own value refers to, as a class by its functions, would never go: ``most``
    is how many entries such a map keeps, the oldest going first.

    A WeakKeyDictionary asks for ``__hash__`` and ``__eq__``, which a user's module may define
    otherwise.
    """

    _ref: Any = weakref.ref  # class of the references to the objects

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        # entries by id; public for lookups that cannot afford a call
        self.entries: dict[int, tuple[weakref.ref, V]] = {}

    def get(self, owner: Any) -> V | None:
        """The value for this very object, or None."""
        entry = self.entries.get(id(owner))
        return entry[1] if entry is not None and entry[0]() is owner else None

    def set(self, owner: Any, value: V) -> None:
        """Keep ``value`` for as long as ``owner`` lives."""
        key = id(owner)
        entries = self.entries

        def forget(ref: weakref.ref) -> None:
            # the id may belong to a new object by now
            entry = entries.get(key)
            if entry is not None and entry[0] is ref:
                del entries[key]

        if self._most is not None and key not in entries and len(entries) >= self._most:
            for oldest in list(entries)[:1]:
                entries.pop(oldest, None)
        entries[key] = (self._ref(owner, forget), value)

    def values(self) -> list[V]:
        return [value for _, value in list(self.entries.values())]

    def clear(self) -> None:
        self.entries.clear()

    def __len__(self) -> int:
        return len(self.entries)


_names: IdentityMap[str] = IdentityMap()
_originals: IdentityMap[weakref.ref] = IdentityMap()


def is_module(target: Any) -> bool:
    """Whether it is a ``torch.nn.Module``. Does not import torch: without it there is no module."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(target, torch.nn.Module)


def require_model(model: Any) -> Any:
    """``model`` itself. TypeError when it is not a ``torch.nn.Module``."""
    if not is_module(model):
        raise TypeError(f"model is {model!r} of type {type(model).__name__}; pass the "
                        "torch.nn.Module with the layers")
    return model


def name_layers(model: Any, prefix: str = "") -> int:
    """Let records and rules call the modules inside ``model`` by their qualified names, such as
    ``convs.0``.

    ``model`` itself is called ``prefix``, or stays without a name when there is none. A module
    named before gets the new name. Returns how many modules have a name through this call.
    TypeError when ``model`` is not a ``torch.nn.Module``.
    """
    require_model(model)
    changed = False
    count = 0
    for name, module in model.named_modules(prefix=prefix):
        if not name:
            continue
        count += 1
        if _names.get(module) != name:
            _names.set(module, name)
            changed = True
    if changed:
        config.bump()  # patterns and names in rules may match differently now
    return count


def stand_for(layer: Any, module: Any) -> None:
    """Let ``layer``, which gnnaccel made and no model holds, go by the name of ``module``."""
    _originals.set(layer, weakref.ref(module))


def original(layer: Any) -> Any:
    """The module that ``layer`` stands for, or itself."""
    ref = _originals.get(layer)
    return layer if ref is None else ref() or layer


def qualified_name(layer: Any) -> str | None:
    """The name given by `name_layers`, or None."""
    return _names.get(original(layer))


def known_names() -> set[str]:
    """Every name given to a module that is still alive."""
    return set(_names.values())


# --- names for readers ----------------------------------------------------------------------------

#: modules that hold the user's model and call it; names begin below them
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")


class Found(NamedTuple):
    """Names of one layer. ``name``: None if no running module holds the layer; ``others``: further
    names of it in the same model."""

    name: str | None = None
    others: tuple[str, ...] = ()


_found: IdentityMap[Found] = IdentityMap()
_lock = threading.RLock()


def name_of(layer: Any) -> str | None:
    """The layer's name for a reader, or None. To be asked while the layer's call runs."""
    return qualified_name(layer) or found(layer).name


def found(layer: Any) -> Found:
    """The names that the running model has for ``layer``, as found at its first record."""
    module = original(layer)
    entry = _found.get(module)
    if entry is None:
        with _lock:
            entry = _derived(module)
            _found.set(module, entry)
    return entry


def forget() -> None:
    """Forget all names found on the stack."""
    with _lock:
        _found.clear()


def _derived(module: Any) -> Found:
    for model in reversed(list(_running())):
        if type(model).__name__ in _WRAPPERS:
            continue
        inside = [name for name, one in model.named_modules(remove_duplicate=False)
                  if one is module and name]
        if inside:
            return Found(inside[0], tuple(inside[1:]))
    return Found()


def _running() -> Iterator[Any]:
    """The modules whose methods run in this thread, the innermost first."""
    frame = sys._getframe(1)
    last = None
    while frame is not None:
        code = frame.f_code
        if code.co_flags & CO_OPTIMIZED and code.co_varnames[:1] == ("self",):
            this = frame.f_locals.get("self")
            if this is not last and is_module(this):
                last = this
                yield this
        frame = frame.f_back  # type: ignore[assignment]
