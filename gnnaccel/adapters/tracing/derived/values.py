"""Stand-ins for what a ``forward`` makes of its list of edges by torch alone, while it is traced.

Beside features they are rows of the edges, or of the nodes. As an index they are an end of the
edges over which kernels run, which may be others than the caller's (`ends`).
"""
from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.tracing.attention.traced import Param, Value, _call, name_of
from gnnaccel.adapters.tracing.derived import operators
from gnnaccel.adapters.tracing.derived.names import LAID, NAMES, STILL, WRITES
from gnnaccel.adapters.tracing.derived.program import DERIVED, HERE, NODES, Place
from gnnaccel.adapters.tracing.nodes.node_values import NodeCount, NodeValue
from gnnaccel.adapters.tracing.rows import pointwise
from gnnaccel.adapters.tracing.rows.row_count import ROWS, RowCount
from gnnaccel.adapters.tracing.rows.specials import DEVICE
from gnnaccel.adapters.tracing.rows.standins import NUMBERS, Unseen
from gnnaccel.adapters.tracing.rows.untold import Sequence
from gnnaccel.adapters.tracing.rows.zero_rows import ZeroRows

_PLAIN = (*NUMBERS, str, type(None), torch.dtype, torch.device, type(Ellipsis))


class EdgeCount(RowCount):
    """A whole number that is the result of a step, such as how many edges there are."""

    of_edges = True

    def __init__(self, steps: Any, at: int):
        self.steps, self.at = steps, at

    def __index__(self) -> int:
        raise Unseen

    __int__ = __index__
    __hash__ = object.__hash__

    def as_int(self) -> Any:
        return self


def _counting(name: str) -> None:
    function = getattr(operator, name)
    setattr(EdgeCount, f"__{name}__", lambda self, other: call(self.steps, function,
                                                               (self, other), {}))
    setattr(EdgeCount, f"__r{name}__", lambda self, other: call(self.steps, function,
                                                                (other, self), {}))


def _comparing(name: str) -> None:
    function = getattr(operator, name)
    setattr(EdgeCount, f"__{name}__", lambda self, other: call(self.steps, function,
                                                               (self, other), {}))


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    _counting(_name)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _comparing(_name)


class Mixed(Unseen):
    """There is something else among arguments."""


def _is_pure(value: Any) -> bool:
    """Whether ``value`` is made of edges, of numbers and of nothing else."""
    kind = type(value)
    if kind in (tuple, list, Sequence, torch.Size):
        return all(map(_is_pure, value))
    if kind is slice:
        return _is_pure((value.start, value.stop, value.step))
    if kind is ZeroRows:
        return _is_pure(value.count)
    return (kind in (EdgeValue, EdgeCount, *_PLAIN) or value is DEVICE
            or kind is NodeCount and value.of_all)


def _resolved(steps: Any, value: Any) -> Any:
    """``value`` for a step, with places in it in place of stand-ins."""
    kind = type(value)
    if kind is EdgeValue or kind is EdgeCount:
        return Place(value.at)
    if kind is NodeCount:
        return NODES
    if value is DEVICE:
        return HERE
    if kind is ZeroRows:
        return Place(_zeros(steps, value))
    if kind in (tuple, list, Sequence, torch.Size):
        parts = [_resolved(steps, one) for one in value]
        return parts if kind is list else tuple(parts)
    if kind is slice:
        return slice(*[_resolved(steps, one) for one in (value.start, value.stop, value.step)])
    return value


def _zeros(steps: Any, zeros: ZeroRows) -> int:
    """The place of rows of one number."""
    size = _resolved(steps, (zeros.count, *zeros.meta.shape[1:]))
    zeros.taken = True
    return steps.program.made(torch.full, (size, zeros.number),
                              {"dtype": zeros.meta.dtype, "device": HERE})


def call(steps: Any, function: Callable, args: tuple, kwargs: dict,
         writes: int | None = None) -> Any:
    """The stand-in for what a function gives of such alone; `Mixed` where there are others."""
    if not all(map(_is_pure, (*args, *kwargs.values()))):
        raise Mixed
    args = tuple([_resolved(steps, one) for one in args])
    kwargs = {key: _resolved(steps, one) for key, one in kwargs.items()}
    return shown(steps, steps.program.made(function, args, kwargs, writes))


def shown(steps: Any, at: int) -> Any:
    """The stand-in for a result."""
    value = steps.program.values[at]
    if isinstance(value, Tensor):
        return EdgeValue(steps, at)
    if type(value) is int:
        return EdgeCount(steps, at)
    if type(value) is bool:
        return steps.program.asked(at)
    if isinstance(value, (tuple, list)):
        parts = [shown(steps, steps.program.made(operator.getitem, (Place(at), k), {}))
                 for k in range(len(value))]
        if type(value) is torch.Size:
            return Sequence(parts)
        steps.program.asked(steps.program.made(len, (Place(at),), {}))
        return parts if type(value) is list else tuple(parts)
    if value is None:
        return None
    raise Unseen


def is_of_edges(value: Any) -> bool:
    """Whether there is such a stand-in in ``value``."""
    if isinstance(value, (tuple, list)):
        return any(map(is_of_edges, value))
    return isinstance(value, (EdgeValue, EdgeCount))


class EdgeValue(Value):
    """The result at the place ``at`` of the program of ``steps``. ``key``: of the ids at one end
    of a list what names that end; ``laid``: of an index with more dimensions the one that it is
    made of, the method and its arguments."""

    rank = 15
    of_edges = True
    laid: tuple | None = None

    def __init__(self, steps: Any, at: int):
        self.steps, self.at = steps, at
        self.key: tuple = ("one", at)

    @property
    def value(self) -> Tensor:
        return self.steps.program.values[self.at]

    @property
    def meta(self) -> Tensor:  # type: ignore[override]  # made when it is asked for
        return torch.empty_like(self.value, device="meta")

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    device = DEVICE

    @property
    def shape(self) -> tuple:
        return self.size()

    @property
    def T(self) -> Any:
        return self.t()

    def size(self, dim: Any = None) -> Any:
        if dim is None:
            return Sequence([self.size(at) for at in range(self.value.dim())])
        if type(dim) is not int:
            raise Unseen
        size = call(self.steps, Tensor.size, (self, dim), {})
        if dim % self.value.dim() and self.value.is_floating_point():
            return self.steps.program.asked(size.at)  # channels, which are to be told
        return size

    def dim(self) -> int:
        return self.value.dim()

    @property
    def ndim(self) -> int:
        return self.value.dim()

    def numel(self) -> Any:
        return call(self.steps, Tensor.numel, (self,), {})

    def as_int(self) -> Any:
        return self.item()

    def item(self) -> Any:
        if self.value.is_floating_point():
            raise Unseen
        return call(self.steps, Tensor.item, (self,), {})

    def __getattr__(self, name: str) -> Any:
        if name.removesuffix("_") in WRITES and name.endswith("_"):
            return functools.partial(self.overwritten, name[:-1], getattr(Tensor, name), self)
        if name not in NAMES:
            raise Unseen
        return functools.partial(self._method, name)

    def _method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._made(name, getattr(Tensor, name), (self, *args), kwargs)

    @classmethod
    def __torch_function__(cls, function: Any, types_: Any, args: Any = (), kwargs: Any = None):
        name, kwargs = getattr(function, "__name__", ""), dict(kwargs or {})
        if name.endswith("_") and not name.endswith("__"):
            return args[0].overwritten(name.removesuffix("_"), function, *args, **kwargs)
        first = next(_of_edges((*args, *kwargs.values())))
        return first._made(name_of(function), function, args, kwargs)

    def _made(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        """What an operation of torch gives, of such alone or of features, too."""
        if name not in NAMES and name not in operators.NAMES:
            return self._among(name, function, args, kwargs)
        try:
            result = call(self.steps, function, args, kwargs)
        except Mixed:
            return self._among(name, function, args, kwargs)
        if isinstance(result, EdgeValue) and args and args[0] is self:
            self._names(result, name, args[1:], kwargs)
        return result

    def _names(self, result: EdgeValue, name: str, args: tuple, kwargs: dict) -> None:
        """Note where a result is an index as it was, or in other dimensions."""
        if self.value.dtype is not torch.int64 or result.value.dtype is not torch.int64:
            return
        if name in STILL:
            result.key, result.laid = self.key, self.laid
        elif name in LAID and not kwargs or name == "getitem" and args[0] == (slice(None), None):
            result.laid = self, name, args
        elif name == "select" and len(args) == 2 and args[0] == 0:
            self._end(result, args[1])
        elif name == "getitem":
            self._end(result, args[0])

    def _end(self, result: EdgeValue, place: Any) -> None:
        """Note which end of a list a row or a column is."""
        rows = place[0] if type(place) is tuple and place[1:] in (
            (slice(None),), (Ellipsis,)) else place
        if self.value.dim() != 2:
            return
        if type(rows) is int and self.value.shape[0] == 2:
            result.key = ("rows", self.at, rows % 2)
        elif type(place) is tuple and len(place) == 2 and place[0] in (slice(None), Ellipsis) and (
            type(place[1]) is int) and self.value.shape[1] == 2:
            result.key = ("columns", self.at, place[1] % 2)

    def __getitem__(self, place: Any) -> Any:
        return self._made("getitem", operator.getitem, (self, place), {})

    def __setitem__(self, place: Any, value: Any) -> None:
        self.overwritten("setitem", _with_set, self, place, value)

    def __iter__(self) -> Any:
        if not self.value.dim():
            raise Unseen
        self.steps.program.asked(call(self.steps, len, (self,), {}).at)
        return iter([self[k] for k in range(len(self.value))])

    def unbind(self, dim: Any = 0) -> Any:
        if dim == 0:
            return tuple(self)
        return tuple(self.t()) if dim in (1, -1) and self.dim() == 2 else self._refuses()

    def __bool__(self) -> bool:
        if self.value.numel() != 1:
            raise Unseen
        return call(self.steps, bool, (self,), {})

    def overwritten(self, name: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
        if name not in WRITES and name != "setitem" or not args or args[0] is not self:
            raise Unseen
        try:
            result = call(self.steps, function, args, kwargs, self.at)
        except Mixed:
            raise Unseen from None
        self.at, self.key, self.laid = result.at, ("one", result.at), None
        return self

    # --- beside features --------------------------------------------------------------------------

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        return self._made(name, function, args, kwargs)

    def _among(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        """An operation on features and on such rows."""
        if self.value.dtype is torch.int64 and name in LAID and args[0] is self:
            return getattr(self.ids(), name)(*[RowCount() if type(one) is EdgeCount else one
                                               for one in args[1:]])
        if name in ("index_select", "gather") and len(args) == 3 and isinstance(args[2], EdgeValue):
            return _call(name, function, (*args[:2], args[2].ids()), kwargs)
        parts = (*args, *kwargs.values())
        of_nodes = any(isinstance(one, (NodeValue, ZeroRows)) for one in parts) and not any(
            isinstance(one, pointwise.Rows) for one in parts)
        if not any(isinstance(one, (NodeValue, pointwise.Rows)) for one in parts):
            of_nodes = self.value.shape[:1] == (self.steps.nodes,)  # beside parameters alone
        turn = functools.partial(_beside, of_nodes)
        return _call(name, function, tuple(map(turn, args)),
                     {key: turn(one) for key, one in kwargs.items()})

    def beside(self, tensors: Any, dim: int) -> Any:
        of_nodes = any(isinstance(one, (NodeValue, ZeroRows)) for one in tensors)
        return torch.cat([_beside(of_nodes, one) for one in tensors], dim)

    def ids(self) -> Any:
        """The end of the edges that this is an index of."""
        if self.laid is not None:
            of, name, args = self.laid
            args = tuple([RowCount() if type(one) is EdgeCount else one for one in args])
            return of.ids()[args[0]] if name == "getitem" else getattr(of.ids(), name)(*args)
        if self.value.dtype is not torch.int64 or self.value.dim() != 1:
            raise Unseen
        self.steps.program.read.add(self.key[1])
        return self.steps.end(self.key)

    def rows(self) -> pointwise.Rows:
        """These as rows of the edges."""
        value, at = self.value, self.at
        if value.dtype not in (torch.float32, torch.int64) or not value.dim():
            raise Unseen
        self.steps.program.read.add(at)
        self.steps.at_edges.add(at)
        meta = torch.empty(ROWS, *value.shape[1:], dtype=value.dtype, device="meta")
        make = Result(at)
        return pointwise.made_rows("e", make, meta, frozenset((make,)), (make,))

    def of_nodes(self) -> Any:
        """These as values per node, or as numbers for all."""
        value, at = self.value, self.at
        self.steps.program.read.add(at)
        make = Result(at)
        if value.dim() and value.shape[0] not in (1, self.steps.nodes):
            raise Unseen
        if not value.dim() or value.shape[0] == 1:
            return Param(make, self.meta, (make,))
        self.steps.at_nodes.add(at)
        meta = torch.empty(ROWS, *value.shape[1:], dtype=value.dtype, device="meta")
        return self.steps.made(_itself, (Param(make, meta, (make,)),), {}, meta)


class Result:
    """Gives the result at a place for the arguments of a call."""

    def __init__(self, at: int):
        self.at = at

    def __call__(self, given: Any) -> Tensor:
        return given[DERIVED][self.at]


def _itself(t: Tensor) -> Tensor:
    return t.view_as(t)


def _with_set(t: Tensor, place: Any, value: Any) -> Tensor:
    t[place] = value
    return t


def _beside(of_nodes: bool, value: Any) -> Any:
    """What stands for ``value`` beside features."""
    if not isinstance(value, EdgeValue):
        return value
    tensor = value.value
    if of_nodes or not tensor.dim() or tensor.shape[0] == 1:
        return value.of_nodes()
    return value.rows()


def _of_edges(value: Any) -> Iterator[EdgeValue]:
    if isinstance(value, EdgeValue):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _of_edges(one)


operators.give(EdgeValue)
