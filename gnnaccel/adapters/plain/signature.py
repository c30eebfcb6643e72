"""The arguments that the ``forward`` of a plain module takes."""
from __future__ import annotations

import types
from typing import Any


class Signature:
    """The arguments that a ``forward`` takes, all of which may be given by name: ``names`` in
    their order, ``positions`` of them also by their place; ``defaults``."""

    def __init__(self, names: tuple[str, ...], positions: int, defaults: dict[str, Any]):
        self.names, self.positions, self.defaults = names, positions, defaults
        self._all = set(names)

    @classmethod
    def of(cls, function: types.FunctionType) -> Signature | None:
        """The signature of a ``forward`` without its module, as its code has it; None of one that
        takes some by their place alone. More arguments than have a name, for ``*args`` and
        ``**kwargs``, do not fit."""
        code = function.__code__
        if code.co_posonlyargcount or not code.co_argcount:
            return None
        names = code.co_varnames[1:code.co_argcount + code.co_kwonlyargcount]
        positions, last = code.co_argcount - 1, function.__defaults__ or ()
        defaults = dict(zip(reversed(names[:positions]), reversed(last)))
        return cls(names, positions, {**defaults, **(function.__kwdefaults__ or {})})

    def bound(self, args: tuple, kwargs: dict) -> dict[str, Any] | None:
        """The arguments by name, with those that have a default; None where they do not fit."""
        if len(args) > self.positions:
            return None
        values = dict(zip(self.names, args))
        if kwargs and not values.keys().isdisjoint(kwargs):  # given twice
            return None
        if kwargs or len(values) < len(self.names):
            values = {**self.defaults, **values, **kwargs}
        return values if values.keys() == self._all else None
