"""Stand-ins for rows of nodes or edges that are not in the first dimension, such as features
[batch, time, nodes, channels].

The kernels see rows [nodes, batch, time, channels]. What a message does is done to these, where it
leaves the dimension of the rows alone; only how the user sees the dimensions is remembered.
"""
from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnaccel.adapters.tracing.attention.traced import VIEWS, Param, Value
from gnnaccel.adapters.tracing.expressed import Effect
from gnnaccel.adapters.tracing.later import other
from gnnaccel.adapters.tracing.nodes.node_values import NodeValue
from gnnaccel.adapters.tracing.rows import channels, operators, pieces
from gnnaccel.adapters.tracing.rows.pointwise import Rows
from gnnaccel.adapters.tracing.rows.pointwise_calls import OPERATIONS
from gnnaccel.adapters.tracing.rows.row_count import ROWS, RowCount
from gnnaccel.adapters.tracing.rows.standins import Unseen
from gnnaccel.adapters.tracing.rows.untold import Sequence
from gnnaccel.dispatch.generated.tree import Leaf, mapped

_SAME = frozenset(("contiguous", "clone", "detach", "float"))
_TURNED = ("transpose", "swapaxes", "permute", "t")
#: functions of `composed` whose operations all leave the rows where they are
_COMPOSED = ("glu", "vecdot")
#: operations on the last dimensions, with the place of the dimension among their arguments
_TRAILING = {"sum": 1, "mean": 1, "softmax": 1, "norm": 2, "normalize": 2, "chunk": 2, "split": 2,
             "unbind": 1, "linear": None, "matmul": None, "mm": None, "layer_norm": None}


class Stacked(Value):
    """Stand-in for such rows. ``rows``: as the kernels see them; ``meta``: as the user does, `ROWS`
    in the dimension ``place``."""

    rank = 12

    def __init__(self, rows: Rows, meta: Tensor):
        self.rows, self.meta, self.place = pieces.recorded(rows), meta, _place(meta)
        if tuple(rows.meta.shape[1:]) != _tail(meta) or rows.meta.dtype != meta.dtype:
            raise Unseen

    def __getattr__(self, name: str) -> Any:
        if name == "shape":
            return Sequence(RowCount() if at == self.place else size
                            for at, size in enumerate(self.meta.shape))
        if name == "dtype":
            return self.meta.dtype
        if not (name in OPERATIONS or name in VIEWS or name in _SAME or name in _TRAILING
                or name in _TURNED):
            raise Unseen
        function = getattr(Tensor, name)
        return lambda *args, **kwargs: self.operate(name, function, (self, *args), kwargs)

    def size(self, dim: Any = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __getitem__(self, place: Any) -> Any:
        return self.operate("getitem", operator.getitem, (self, place), {})

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        if name == "dropout":
            return self._dropped(*args[1:], **kwargs)
        if name in _TURNED:
            return turned(self, function, args, kwargs)
        if name in _COMPOSED:
            return getattr(other("rows.composed"), name)(*args, **kwargs)
        if name == "getitem":
            self._check_piece(args[1])
        elif name in _TRAILING:
            args, kwargs = self._trailing(name, args, kwargs)
        elif name not in VIEWS and name not in _SAME:
            return _pointwise(name, function, args, kwargs)
        if args[0] is not self or any(isinstance(one, Stacked)
                                      for one in (*args[1:], *kwargs.values())):
            raise Unseen
        result = _outer(function, args, kwargs)
        if name in VIEWS and name not in _SAME:
            return self._viewed(result)
        inner = self.rows.operate(name, function, (self.rows, *args[1:]), kwargs)
        if type(result) in (tuple, list):
            return tuple(map(Stacked, inner, result))
        return Stacked(inner, result)

    def _viewed(self, meta: Tensor) -> Stacked:
        """The rows with other shapes on both sides."""
        place, shape = _place(meta), self.meta.shape
        if math.prod(shape[:self.place]) != math.prod(meta.shape[:place]):
            raise Unseen
        inner = self.rows.meta.new_empty(ROWS, *_tail(meta))
        return Stacked(pieces.viewed(self.rows.alone(), inner), meta)

    def _check_piece(self, place: Any) -> None:
        """Pieces of the dimensions after the rows, ``x[..., :k]``."""
        place = place if type(place) is tuple else (place,)
        behind = self.meta.dim() - 1 - self.place
        if not place or place[0] is not Ellipsis or Ellipsis in place[1:] or (
            len([one for one in place[1:] if one is not None]) > behind):
            raise Unseen

    def _trailing(self, name: str, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments, with a dimension after the rows counted from the last."""
        behind, at = self.meta.dim() - 1 - self.place, _TRAILING[name]
        if not behind:
            raise Unseen
        if at is None:
            if name == "layer_norm" and len(tuple(args[1])) > behind or (
                name in ("matmul", "mm") and not _is_map(args)):
                raise Unseen
            return args, kwargs
        dim: Any = kwargs.get("dim", args[at] if len(args) > at else None)
        dim = dim[0] if type(dim) in (tuple, list) and len(dim) == 1 else dim
        if type(dim) is not int:
            raise Unseen
        dim = dim if dim < 0 else dim - self.meta.dim()
        if not -behind <= dim < 0:
            raise Unseen
        if "dim" in kwargs:
            return args, {**kwargs, "dim": dim}
        return (*args[:at], dim, *args[at + 1:]), kwargs

    def _dropped(self, p: float = 0.5, training: bool = True, inplace: bool = False) -> Stacked:
        """Dropout with the host's mask: drawn in the order of the dimensions that the user sees."""
        if inplace or type(p) not in (int, float):
            raise Unseen
        if not training or p == 0:
            return self
        rows, place = channels.at_edges(self.rows), self.place

        def dropped(t: Tensor) -> Tensor:
            if t.is_meta:
                return t
            return F.dropout(t.movedim(0, place).contiguous(), p, True).movedim(place, 0)

        return Stacked(channels.by_torch(rows, dropped, (rows,), {}, Effect), self.meta)

    def beside(self, tensors: Any, dim: int) -> Any:
        if not all(isinstance(one, Stacked) and one.place == self.place for one in tensors):
            raise Unseen
        if dim not in (-1, self.meta.dim() - 1) or self.place == self.meta.dim() - 1:
            raise Unseen
        meta = torch.cat([one.meta for one in tensors], -1)
        rows = [one.rows.alone() for one in tensors]
        return Stacked(rows[0].beside(rows, -1), meta)

    def of_neighbours(self, function: Callable, dim: Any) -> Stacked:
        """A softmax over neighbours. ``dim``: the dimension that the user says."""
        self._check_dim(dim)
        return Stacked(function(self.rows.alone()), self.meta)

    def reduced(self, function: Callable, dim: Any) -> Any:
        """A reduction over the edges that enter a node, by ``function`` of rows."""
        self._check_dim(dim)
        return OfNodes(function(self.rows.alone()), self.place, self.meta.dim())

    def _check_dim(self, dim: Any) -> None:
        if type(dim) is not int or dim not in (self.place, self.place - self.meta.dim()):
            raise Unseen


class OfNodes(Value):
    """Values per node in another dimension than the first, ``place`` of ``dims``: for whoever picks
    those of the edges."""

    rank = 13

    def __init__(self, value: NodeValue, place: int, dims: int):
        self.value, self.place, self.dims, self.meta = value, place, dims, value.meta

    def __getattr__(self, name: str) -> Any:
        if name != "index_select":
            raise Unseen
        return lambda *args, **kwargs: self.operate(name, torch.index_select, (self, *args), kwargs)

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        if name != "index_select" or len(args) + len(kwargs) != 3:
            raise Unseen
        dim, index = [*args[1:], *[kwargs[key] for key in ("dim", "index") if key in kwargs]]
        if type(dim) is not int or dim not in (self.place, self.place - self.dims):
            raise Unseen
        return stand_in(other("nodes.reduced").gathered(self.value, index), self.place)


def message(out: Any, layer: Any) -> Any:
    """The rows of a message as the kernels see them; None where the layer does not reduce these."""
    if not isinstance(out, Stacked):
        return out
    return out.rows if layer.node_dim in (out.place, out.place - out.meta.dim()) else None


def stand_in(rows: Rows, place: int) -> Stacked:
    """Rows that the user sees in the dimension ``place``."""
    return Stacked(rows, rows.meta.movedim(0, place))


def place_of(function: Callable, args: tuple, kwargs: dict) -> int:
    """The dimension of the rows in the result of an operation."""
    return _place(_outer(function, args, kwargs))


def turned(value: Any, function: Callable, args: tuple, kwargs: dict) -> Any:
    """Rows whose dimensions are in another order, as those of several heads may come first."""
    if args[0] is not value or any(isinstance(one, Value) for one in (*args[1:], *kwargs.values())):
        raise Unseen
    meta, before = _outer(function, args, kwargs), _place(value.meta)
    # which dimension is where tells one whose sizes differ
    sizes = tuple(range(1, value.meta.dim() + 1))
    order = [size - 1 for size in _outer(function, (value.meta.new_empty(sizes), *args[1:]),
                                         kwargs).shape]
    rows = value.rows if isinstance(value, Stacked) else value
    inner = [0, *[at + (at < before) for at in order if at != before]]
    if inner != sorted(inner):
        rows = rows.permute(inner)
    if _place(meta):
        return Stacked(rows, meta)
    return rows.sharing(Rows(rows.alone().tree, meta))


def _pointwise(name: str, function: Callable, args: tuple, kwargs: dict) -> Stacked:
    if name not in OPERATIONS:
        raise Unseen
    meta = _outer(function, args, kwargs)
    place = _place(meta) - meta.dim()
    inner = [_aligned(one, meta.dim(), place) for one in args]
    keywords = {k: _aligned(one, meta.dim(), place) for k, one in kwargs.items()}
    first = next(one for one in (*inner, *keywords.values()) if isinstance(one, Rows))
    return Stacked(first.operate(name, function, tuple(inner), keywords), meta)


def _aligned(value: Any, dims: int, place: int) -> Any:
    """An operand as the kernels see it, of as many dimensions as the result; the rows of this are
    in the dimension ``place``, counted from the last."""
    if isinstance(value, Param):
        return _without(value, place)
    if not isinstance(value, Stacked):
        if isinstance(value, Value):
            raise Unseen
        return value
    if value.place - value.meta.dim() != place:
        raise Unseen
    rows, extra = value.rows.alone(), dims - value.meta.dim()
    if not extra:
        return rows

    def longer(leaf: Leaf) -> Leaf:
        if leaf.blocks:
            raise Unseen
        return leaf.viewed((*(1,) * extra, *leaf.tail))

    return Rows(mapped(rows.tree, longer),
                rows.meta.reshape(ROWS, *(1,) * extra, *rows.meta.shape[1:]))


def _without(value: Param, place: int) -> Param:
    """A parameter without the dimension that lies beside the rows."""
    if value.meta.dim() < -place:
        return value
    if value.meta.shape[place] != 1:
        raise Unseen

    def make(given: dict) -> Tensor:
        return value.make(given).squeeze(place)

    return Param(make, value.meta.squeeze(place), value.roots)


def _is_map(args: tuple) -> bool:
    """Whether it is a product with a matrix or a vector from the right."""
    return isinstance(args[1], Param) and args[1].meta.dim() <= 2


def _outer(function: Callable, args: tuple, kwargs: dict) -> Any:
    """How the result looks to the user."""
    try:
        return function(*[one.meta if isinstance(one, Value) else one for one in args],
                        **{k: one.meta if isinstance(one, Value) else one
                           for k, one in kwargs.items()})
    except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
        raise Unseen from None


def _place(meta: Any) -> int:
    """The dimension of the rows."""
    if not isinstance(meta, Tensor) or list(meta.shape).count(ROWS) != 1:
        raise Unseen
    return list(meta.shape).index(ROWS)


def _tail(meta: Tensor) -> tuple[int, ...]:
    """The other dimensions."""
    place = _place(meta)
    return (*meta.shape[:place], *meta.shape[place + 1:])


operators.operate(Stacked, ("gt", "lt", "ge", "le", "eq", "ne"))
Stacked.__hash__ = None  # type: ignore[assignment]  # as it compares number by number
