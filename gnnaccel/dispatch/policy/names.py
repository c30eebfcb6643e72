"""Qualified names of layers, and the weak map by identity that keeps them.

Nothing is stored on a module, so copies, pickles and checkpoints are unaffected; and a copy has no
name until it is named itself.
"""
from __future__ import annotations

import sys
import weakref
from typing import Any, Generic, TypeVar

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


def forget_names() -> None:
    """Forget all names."""
    _names.clear()
    config.bump()
