"""What a traced function read, kept to be compared in later calls."""
from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch import Tensor, nn

from gnnaccel.adapters.pyg.propagate.standins import Unseen
from gnnaccel.adapters.pyg.propagate.traced_modules import looks

PLAIN = (int, float, bool, str, type(None))
HOLDS_OTHERS = (list, tuple, dict, functools.partial)


class Look(NamedTuple):
    """A module or a tensor, and how it looked when it was read."""

    value: Any
    look: tuple


class Attributes:
    """Those of an object, as of a dictionary."""

    def __init__(self, of: Any):
        self.get = functools.partial(getattr, of)


class Contents(NamedTuple):
    """What a list, a tuple, a dictionary or a function with some arguments has: of this ``kind``,
    by its ``keys``."""

    kind: Any
    keys: tuple
    values: tuple


class EdgeRows(NamedTuple):
    """A tensor with a row for each edge, of this form."""

    tail: tuple[int, ...]
    dtype: Any


def seen(value: Any) -> Any:
    """What is kept of a value that was read."""
    if isinstance(value, (nn.Module, Tensor)):
        return Look(value, _look(value))
    if type(value) in HOLDS_OTHERS:
        held = _held(value)
        keys = tuple(held) if type(held) is dict else tuple(range(len(held)))
        return Contents(type(value), keys, tuple(seen(held[key]) for key in keys))
    return value


def _held(value: Any) -> Any:
    """What such a value holds, as a sequence or a dictionary."""
    if type(value) is functools.partial:
        return {**value.keywords, "": (value.func, value.args)}
    return value


def still(value: Any, was: Any, edges: int | None = None) -> bool:
    """Whether a value is as it was ``seen``, in a call over so many edges."""
    if type(was) is Look:
        return value is was.value and _look(value) == was.look
    if isinstance(was, Contents):
        if type(value) is not was.kind:
            return False
        if was.kind is functools.partial:
            value = _held(value)
        if len(value) != len(was.keys):
            return False
        keys = tuple(value) if type(value) is dict else was.keys
        return keys == was.keys and all(still(value[key], one, edges)
                                        for key, one in zip(keys, was.values))
    if type(was) is EdgeRows:
        return isinstance(value, Tensor) and edge_rows(value, edges) == was
    return same(getattr(value, "__func__", value), was)


def _look(value: nn.Module | Tensor) -> tuple:
    """Of a tensor what its ``data`` may change."""
    return looks(value) if isinstance(value, nn.Module) else (value.shape, value.dtype)


def same(value: Any, was: Any) -> bool:
    """Whether it is the same object, or an equal number or text."""
    return value is was or (type(value) is type(was) and type(value) in PLAIN and value == was)


def edge_rows(value: Tensor, edges: int | None) -> EdgeRows | None:
    """How a tensor looks that has a row for each of so many edges; None of others."""
    if edges is None or value.dim() < 1 or value.shape[0] != edges:
        return None
    return EdgeRows(tuple(value.shape[1:]), value.dtype)


def may_have_edges(was: Any, edges: int) -> bool:
    """Whether what was ``seen`` is a tensor that may have a row for each of so many edges."""
    return type(was) is Look and isinstance(was.value, Tensor) and (
        edge_rows(was.value, edges) is not None)


def found(layer: Any, names: tuple[str, ...]) -> Any:
    """What stands at the end of these names; Unseen where nothing does."""
    for name in names:
        layer = getattr(layer, name, Unseen)
    return layer
