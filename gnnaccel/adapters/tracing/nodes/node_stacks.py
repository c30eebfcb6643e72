"""Values per node in a new dimension, as ``torch.stack`` makes them: such as those of all rounds of
a module, which are added up."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.tracing.attention.traced import Value
from gnnaccel.adapters.tracing.nodes.node_values import NodeValue
from gnnaccel.adapters.tracing.rows.standins import Unseen


def stacked(parts: Any, dim: int = 0) -> Any:
    """The values, of the same shape."""
    first = parts[0]
    if not all(one.steps is first.steps and one.of_nodes and one.meta.shape == first.meta.shape
               for one in parts) or not first.steps.wholes or type(dim) is not int:
        raise Unseen
    meta = torch.stack([one.meta for one in parts], dim)
    if dim % meta.dim():
        return _made(parts, lambda t: t, dim, meta)
    return Stack(parts, dim, meta)


def _made(parts: Any, function: Callable, dim: int, meta: Tensor) -> NodeValue:
    result = parts[0].steps.made(lambda *given: function(torch.stack(given, dim)), tuple(parts), {},
                                 meta)
    result.alone = True
    return result


class Stack(Value):
    """Values whose first dimension tells which they are, over which they may be added up."""

    rank = 10

    def __init__(self, parts: Any, dim: int, meta: Tensor):
        # those that are written over later are others then
        self.parts, self.at, self.meta = [one.as_now() for one in parts], dim, meta

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        dims = (*args[1:], *kwargs.values())
        if name not in ("sum", "mean") or args[0] is not self or kwargs.keys() - {"dim"} or (
            len(dims) != 1 or dims[0] not in (0, -self.meta.dim(), (0,), [0])):
            raise Unseen
        return _made(self.parts, lambda t: function(t, *dims), self.at, self.meta[0])
