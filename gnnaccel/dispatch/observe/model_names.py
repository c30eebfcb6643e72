"""Names of layers in records and reports: the name given by ``name_layers``, else the qualified
name in the model which is running, such as ``convs.0``.

The model is found on the stack: the outermost module whose method (``forward``, or another such as
``encode``) is running and which holds the layer. The stack is searched once per layer, at its first
record, so calls that nobody listens to pay nothing. Names found here are for readers only: rules
match the names that were given. Layers of two models may have the same name. Nothing is stored on a
module, and all is held weakly.
"""
from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from inspect import CO_OPTIMIZED
from typing import Any, NamedTuple

from gnnaccel.dispatch.policy import names
from gnnaccel.dispatch.policy.names import IdentityMap

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
    return names.qualified_name(layer) or found(layer).name


def found(layer: Any) -> Found:
    """The names that the running model has for ``layer``, as found at its first record."""
    module = names.original(layer)
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
            if this is not last and names.is_module(this):
                last = this
                yield this
        frame = frame.f_back  # type: ignore[assignment]
