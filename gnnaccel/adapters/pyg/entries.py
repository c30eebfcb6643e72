"""Entries of PyG's ModuleDict and ParameterDict, by the names that users know them by.

A lookup in one of these translates the name and goes through several functions of torch's; layers
by type make dozens in each call.
"""
from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import Tensor


@functools.lru_cache(maxsize=4096)
def _internal(cls: Any, name: Any) -> str:
    """The name under which a dictionary of class ``cls`` keeps an entry."""
    return cls.to_internal_key(name) if hasattr(cls, "to_internal_key") else name


def paths(path: str, entries: Any, names: Iterable[str]) -> list[str]:
    """Dotted names of entries of a dictionary whose own is ``path``."""
    cls: Any = type(entries)
    return [f"{path}.{_internal(cls, name)}" for name in names]


def module(entries: Any, name: Any) -> Any:
    """``entries[name]`` of a ModuleDict."""
    cls: Any = type(entries)
    value = entries._modules.get(_internal(cls, name))
    return entries[name] if value is None else value


def parameter(entries: Any, name: Any) -> Tensor:
    """``entries[name]`` of a ParameterDict."""
    cls: Any = type(entries)
    value = entries._parameters.get(_internal(cls, name))
    return entries[name] if value is None else value
