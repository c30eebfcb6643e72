"""The arguments that the ``forward`` of a plain module takes."""
from __future__ import annotations

import inspect
from typing import Any


class Signature:
    """The arguments that a ``forward`` takes, all of which may be given by name: ``names`` in
    their order, ``positions`` of them also by their place; ``defaults``."""

    def __init__(self, parameters: list[inspect.Parameter]):
        self.names = tuple(one.name for one in parameters)
        self.positions = sum(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters)
        self.defaults = {one.name: one.default for one in parameters
                         if one.default is not one.empty}

    @classmethod
    def of(cls, function: Any) -> Signature | None:
        """The signature of a ``forward`` without its module; None where it takes any number of
        arguments."""
        parameters = list(inspect.signature(function).parameters.values())[1:]
        allowed = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return cls(parameters) if all(one.kind in allowed for one in parameters) else None

    def bound(self, args: tuple, kwargs: dict) -> dict[str, Any] | None:
        """The arguments by name, with those that have a default; None where they do not fit."""
        if len(args) > self.positions:
            return None
        values = {**self.defaults, **dict(zip(self.names, args)), **kwargs}
        given_twice = any(name in kwargs for name in self.names[:len(args)])
        return None if given_twice or len(values) != len(self.names) or (
            not values.keys() <= set(self.names)) else values
