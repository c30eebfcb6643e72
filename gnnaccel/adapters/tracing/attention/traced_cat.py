"""Stand-ins for rows of both ends side by side while a ``message`` of attention is traced."""
from __future__ import annotations

import operator
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.adapters.tracing.attention.traced import Ends, Node, Param, Value, _call, with_first
from gnnaccel.adapters.tracing.attention.traced_bias import biased, checked_bias
from gnnaccel.adapters.tracing.rows.standins import Unseen


class Cat(Value):
    """Rows of both ends side by side."""

    rank = 3

    def __init__(self, parts: list[Node]):
        self.parts = parts
        try:
            self.meta = torch.cat([part.meta for part in parts], -1)
        except RuntimeError:
            raise Unseen from None

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        if name == "linear":
            weight, bias = (*args[1:], *kwargs.values(), None)[:2]
            ends = self._added("linear", F.linear, zip(self._cut(weight, -1)), {})
            return ends if bias is None else biased(ends,
                                                      checked_bias(weight, bias, ends.meta))
        function, rest = with_first(function, self, args)
        if name == "mul" and isinstance(rest[0], Param):
            return Cat([_call("mul", operator.mul, (part, w), {})
                        for part, w in zip(self.parts, self._cut(rest[0], -1))])
        if name == "matmul" and isinstance(rest[0], Param):
            dim = -2 if rest[0].dim() > 1 else 0
            return self._added("matmul", torch.matmul, zip(self._cut(rest[0], dim)), {})
        if name == "sum" and (rest or tuple(kwargs.values()))[:1] == (-1,):
            return Ends(self._added("sum", Tensor.sum, [rest] * len(self.parts), kwargs).parts)
        raise Unseen

    def _added(self, name: str, function: Callable, rest: Any, kwargs: dict) -> Ends:
        ends = Ends({}, once=True)
        for part, arguments in zip(self.parts, rest):
            ends = ends.plus(_call(name, function, (part, *arguments), kwargs))
        return ends

    def _cut(self, weight: Any, dim: int) -> list[Any]:
        widths = [part.meta.shape[-1] for part in self.parts]
        if not isinstance(weight, Param) or weight.meta.shape[dim] != sum(widths):
            raise Unseen
        return [sliced(weight, widths, at, dim) for at in range(len(widths))]


def sliced(weight: Param, widths: list[int], at: int, dim: int) -> Param:
    start, width = sum(widths[:at]), widths[at]
    return Param(lambda given: weight.make(given).narrow(dim, start, width),
                 weight.meta.narrow(dim, start, width), weight.roots)


def cat(tensors: Any, dim: int = 0) -> Any:
    """Stand-in for `torch.cat`."""
    if not all(isinstance(t, Node) for t in tensors):
        return max(tensors, key=attrgetter("rank")).beside(tensors, dim)
    if dim not in (-1, tensors[0].meta.dim() - 1):
        raise Unseen
    if len({t.end for t in tensors}) == 1:
        parts = tuple(tensors)

        def make(given: dict) -> Tensor:
            return torch.cat([part.make(given) for part in parts], -1)

        return Node(parts[0].end, make, torch.cat([part.meta for part in parts], -1))
    return Cat(list(tensors))
