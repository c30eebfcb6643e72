"""Rows of the same shape in a new dimension, as ``torch.stack`` makes them: such as the messages of
several towers."""
from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from gnnaccel.adapters.pyg.propagate.channels import _dim
from gnnaccel.adapters.pyg.propagate.pointwise import Rows, hold
from gnnaccel.adapters.pyg.propagate.pointwise_calls import OPERATIONS
from gnnaccel.adapters.pyg.propagate.standins import Unseen
from gnnaccel.adapters.pyg.propagate.traced import Value, _call


def pile(parts: Any, dim: int = 0) -> Any:
    """Stand-in for ``torch.stack``: of channels they are side by side."""
    if not all(isinstance(part, Rows) for part in parts):
        raise Unseen
    if dim in (-1, parts[0].meta.dim()):
        return torch.cat([part.unsqueeze(-1) for part in parts], -1)
    return Pile(parts, dim)


class Pile(Value):
    """Rows of the same shape in a new dimension, over which they may be added up."""

    rank = 11

    def __init__(self, parts: Any, dim: int = 0):
        if type(dim) is not int or len({part.meta.shape for part in parts}) > 1:
            raise Unseen
        self.parts, self.meta = hold(tuple(parts)), torch.stack([part.meta for part in parts], dim)
        self.at = dim % self.meta.dim()

    @property
    def dtype(self) -> torch.dtype:
        return self.meta.dtype

    def each(self, function: Callable[[Any], Any]) -> list[Any]:
        """Results of ``function`` for each of the parts."""
        return [function(part) for part in self.parts]

    def _pointwise(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Pile:
        piles = [one for one in (*args, *kwargs.values()) if isinstance(one, Value)]
        if not all(type(one) is Pile and one.meta.shape == self.meta.shape and one.at == self.at
                   for one in piles):
            raise Unseen

        def part(of: Any, k: int) -> Any:
            return of.parts[k] if type(of) is Pile else of

        results = [_call(name, function, tuple(part(one, k) for one in args),
                         {key: part(one, k) for key, one in kwargs.items()})
                   for k in range(len(self.parts))]
        return Pile(results, self.at)

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        if name in OPERATIONS:
            return self._pointwise(name, function, args, kwargs)
        dim = _dim(args, kwargs)
        if name not in ("sum", "mean") or args[0] is not self or type(dim) is not int or (
            dim % self.meta.dim() != self.at or len(args) + len(kwargs) != 2):  # no more than it
            raise Unseen
        total: Any = functools.reduce(operator.add, self.parts)
        return total / len(self.parts) if name == "mean" else total
