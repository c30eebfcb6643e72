"""Values that a traced function read, kept to be compared in later calls."""
from __future__ import annotations

import functools
import types
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gnnaccel.adapters.tracing.layer.traced_modules import Looks, functions
from gnnaccel.adapters.tracing.rows.standins import NUMBERS, Unseen

PLAIN = (*NUMBERS, str, type(None), torch.device, torch.dtype)
HOLDS_OTHERS = (list, tuple, dict, functools.partial)


class Look(NamedTuple):
    """A module or a tensor, and how it looked when it was read."""

    value: Any
    look: Any


class Attributes:
    """Attributes of an object, read as from a dictionary."""

    def __init__(self, of: Any):
        self.get = functools.partial(getattr, of)


class Contents(NamedTuple):
    """Contents of a list, a tuple, a dictionary or a function with some arguments, of this
    ``kind``, by its ``keys``."""

    kind: Any
    keys: tuple
    values: tuple


class EdgeRows(NamedTuple):
    """A tensor with a row for each edge, of this form."""

    tail: tuple[int, ...]
    dtype: Any


class Guards:
    """All that a traced function read.

    ``read``: of an object, such as the layer, by the names that lead there, as `seen` keeps it;
    ``cells``: variables of functions around it, with what they held; ``watched``: what it and
    others name, with the places where that stands. ``steps`` leads to what was read: the place of
    an earlier step, the attribute to take there, and what it was."""

    __slots__ = ("read", "cells", "watched", "steps", "functions")

    def __init__(self, read: dict[tuple[str, ...], Any],
                 cells: tuple[tuple[types.CellType, Any], ...] = (),
                 watched: tuple[tuple[Any, str, Any], ...] = ()):
        self.read, self.cells, self.watched = read, cells, watched
        places: dict[tuple[str, ...], int] = {(): 0}
        self.steps: list[tuple[int, str, Any]] = []
        for names in read:
            for depth in range(1, len(names) + 1):
                path = names[:depth]
                if path not in places:
                    places[path] = len(places)
                    self.steps.append((places[path[:-1]], path[-1], read.get(path, _ANYTHING)))
        values = (*read.values(), *[was for _, _, was in watched])
        self.functions = functions() if any(map(_has_modules, values)) else None

    def hold(self, of: Any, edges: int | None = None) -> bool:
        """Whether all is as it was, in a call over so many edges."""
        values = [of]
        for at, name, was in self.steps:
            value = getattr(values[at], name, Unseen)
            values.append(value)
            # most is the same object: without a call
            if value is was or was is _ANYTHING:
                continue
            if type(was) is Look and type(was.look) is Looks:  # as in `still`
                if value is not was.value or not was.look.holds(value):
                    return False
            elif not still(value, was, edges):
                return False
        for cell, was in self.cells:
            if cell.cell_contents is not was and not same(cell.cell_contents, was):
                return False
        for place, name, was in self.watched:
            value = place.get(name, Unseen)
            if value is not was and not still(value, was, edges):
                return False
        return self.functions is None or self.functions == functions()


_ANYTHING = object()


def _has_modules(was: Any) -> bool:
    """Whether what was `seen` is a module, or may hold some."""
    return isinstance(was, Contents) or type(was) is Look and isinstance(was.value, nn.Module)


def seen(value: Any) -> Any:
    """Record of a value that was read, for `still`."""
    if isinstance(value, (nn.Module, Tensor)):
        return Look(value, _look(value))
    if type(value) in HOLDS_OTHERS:
        items = _held(value)
        keys = tuple(items) if type(items) is dict else tuple(range(len(items)))
        return Contents(type(value), keys, tuple(seen(items[key]) for key in keys))
    return value


def _held(value: Any) -> Any:
    """Contents of such a value, as a sequence or a dictionary."""
    if type(value) is functools.partial:
        return {**value.keywords, "": (value.func, value.args)}
    return value


def still(value: Any, was: Any, edges: int | None = None) -> bool:
    """Whether a value is as it was ``seen``, in a call over so many edges."""
    if type(was) is Look:
        look = was.look
        return value is was.value and (look.holds(value) if type(look) is Looks
                                       else value.shape == look[0] and value.dtype is look[1])
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


def _look(value: nn.Module | Tensor) -> Looks | tuple:
    """`Looks` of a module; of a tensor what its ``data`` may change."""
    return Looks(value) if isinstance(value, nn.Module) else (value.shape, value.dtype)


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
