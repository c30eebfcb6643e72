"""Python's operators on what is made of edges."""
from __future__ import annotations

import operator
from typing import Any

from torch import Tensor

from gnnaccel.adapters.tracing.attention.traced import name_of

#: by torch's names
NAMES = frozenset(("getitem", "truediv", "floordiv", "mod", "and", "or", "xor", "invert", "rsub",
                   "bitwise_and", "bitwise_or", "bitwise_not"))
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor")
_COMPARING = ("eq", "ne", "lt", "le", "gt", "ge")
_WRITING = {"add": "add", "sub": "sub", "mul": "mul", "truediv": "div"}


def give(cls: Any) -> None:
    """Give a class of stand-ins the operators, by its ``_made`` and ``overwritten``."""
    for name in (*_BINARY, *_COMPARING):
        _binary(cls, name)
    for name in ("invert", "neg"):
        _unary(cls, name)
    for name, torchs in _WRITING.items():
        _writing(cls, name, torchs)
    cls.__hash__ = object.__hash__  # which comparisons take away


def _unary(cls: Any, name: str) -> None:
    function = getattr(operator, name)
    setattr(cls, f"__{name}__", lambda self: self._made(name, function, (self,), {}))


def _binary(cls: Any, name: str) -> None:
    function = getattr(operator, name)
    torchs = name_of(function)
    setattr(cls, f"__{name.strip('_')}__",
            lambda self, other: self._made(torchs, function, (self, other), {}))
    if name not in _COMPARING:
        setattr(cls, f"__r{name.strip('_')}__",
                lambda self, other: self._made(torchs, function, (other, self), {}))


def _writing(cls: Any, name: str, torchs: str) -> None:
    function = getattr(Tensor, f"{torchs}_")
    setattr(cls, f"__i{name}__",
            lambda self, other: self.overwritten(torchs, function, self, other))
