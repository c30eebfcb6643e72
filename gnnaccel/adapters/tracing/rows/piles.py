"""Rows of the same shape in a new dimension, as ``torch.stack`` makes them: such as the messages of
several towers."""
from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.tracing.attention.traced import Param, Value, _call
from gnnaccel.adapters.tracing.later import other
from gnnaccel.adapters.tracing.rows.channels import _dim
from gnnaccel.adapters.tracing.rows.pieces import recorded
from gnnaccel.adapters.tracing.rows.pointwise import NAMES, Rows, hold
from gnnaccel.adapters.tracing.rows.pointwise_calls import OPERATIONS
from gnnaccel.adapters.tracing.rows.standins import Unseen


def pile(parts: Any, dim: int = 0) -> Any:
    """Stand-in for ``torch.stack``: of channels they are side by side."""
    of_nodes = other("nodes.node_values").NodeValue
    if all(type(part) is of_nodes for part in parts):
        return other("nodes.node_stacks").stacked(parts, dim)
    if not all(isinstance(part, Rows) for part in parts):
        raise Unseen
    parts = [recorded(part) for part in parts]
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

    def each(self, function: Callable[[Any], Any]) -> list[Any]:
        """Results of ``function`` for each of the parts."""
        return [function(part) for part in self.parts]

    def _pointwise(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Pile:
        results = [_call(name, function, tuple(self._part(one, k) for one in args),
                         {key: self._part(one, k) for key, one in kwargs.items()})
                   for k in range(len(self.parts))]
        return Pile(results, self.at)

    def _part(self, of: Any, k: int) -> Any:
        """The part of an operand that meets part ``k``: of others, such as weights of the parts,
        what is in the same place."""
        if not isinstance(of, Value):
            return of
        if type(of) is Pile:
            if of.meta.shape != self.meta.shape or of.at != self.at:
                raise Unseen
            return of.parts[k]
        dim = self.at + of.meta.dim() - self.meta.dim()
        if not isinstance(of, (Rows, Param)) or of.meta.dim() > self.meta.dim() or (
            isinstance(of, Rows) and (dim < 1 or of.meta.dim() < self.meta.dim())):
            raise Unseen
        if dim < 0:
            return of
        if of.meta.shape[dim] not in (1, len(self.parts)):
            raise Unseen
        return of[(slice(None),) * dim + (k if of.meta.shape[dim] > 1 else 0,)]

    def joined(self) -> Rows:
        """The rows as one stand-in, side by side in their dimension."""
        if not self.at:
            raise Unseen
        return torch.cat([part.unsqueeze(self.at) for part in self.parts],
                         self.at)  # type: ignore[return-value]  # of stand-ins

    def __getitem__(self, place: Any) -> Any:
        if type(place) is tuple and len(place) == self.at + 1 and type(place[-1]) is int and (
            all(one == slice(None) for one in place[:-1])):
            return self.parts[place[-1]]
        return self.joined()[place]

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "size", "dtype"):
            return getattr(self.joined(), name)
        if name not in OPERATIONS and name not in NAMES:
            raise Unseen
        function = getattr(Tensor, name)
        return lambda *args, **kwargs: self.operate(name, function, (self, *args), kwargs)

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        if name in OPERATIONS:
            return self._pointwise(name, function, args, kwargs)
        dim = _dim(args, kwargs)
        if name not in ("sum", "mean") or args[0] is not self or type(dim) is not int or (
            dim % self.meta.dim() != self.at or len(args) + len(kwargs) != 2):  # no more than it
            rows = self.joined()
            return _call(name, function, tuple([rows if one is self else one for one in args]),
                         kwargs)
        total: Any = functools.reduce(operator.add, self.parts)
        return total / len(self.parts) if name == "mean" else total
