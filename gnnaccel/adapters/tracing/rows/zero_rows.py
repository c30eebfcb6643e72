"""What stands for zeros and ones that users' functions make: rows of the edges; and zeros for the
nodes, to add messages to them by ``index_add``, ``scatter_add`` or ``scatter_reduce``, in place or
not.
"""
from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Set
from typing import Any

import torch

from gnnaccel.adapters.tracing.attention.traced import Value, _call
from gnnaccel.adapters.tracing.code import contexts, kinds, naming
from gnnaccel.adapters.tracing.layer import devices
from gnnaccel.adapters.tracing.nodes import node_wholes
from gnnaccel.adapters.tracing.nodes.node_values import IN_NEW_MEMORY, NodeCount, NodeValue
from gnnaccel.adapters.tracing.later import other
from gnnaccel.adapters.tracing.noted import default_dtype, of_wholes
from gnnaccel.adapters.tracing.rows import chosen, constants, pointwise
from gnnaccel.adapters.tracing.rows.row_count import ROWS, RowCount
from gnnaccel.adapters.tracing.rows.specials import DEVICE, Along, Special, Spread
from gnnaccel.adapters.tracing.rows.standins import NUMBERS, Unseen
from gnnaccel.adapters.tracing.rows.untold import Sequence
from gnnaccel.dispatch.generated.tree import Number

#: what may be named of them
NAMES = frozenset(("zeros", "new_zeros", "new_ones", "new_full", "index_add", "index_add_",
                   "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_put",
                   "index_put_", "index_reduce", "index_reduce_", "expand_as", "device", "bincount",
                   "full_like", "inf"))
#: extrema of rows and of the numbers that they are reduced into
_EXTREMA = ("amax", "amin")
_INTO = {f"{name} of all": (name, True) for name in _EXTREMA}
#: what makes others like these
_LIKE = ("zeros_like", "ones_like", "full_like")


class ZeroRows(Value):
    """Zeros, as many as ``count`` says, or another ``number``, into which extrema are reduced. What
    is reduced into them in place makes them the result, which those that are ``taken`` for a value
    in another way may not become. Beside values per node they are such."""

    rank = 12
    device = DEVICE
    taken = False

    def __init__(self, count: Any, meta: torch.Tensor, number: float = 0.0):
        self.count, self.meta, self.number = count, meta, number

    def __getattr__(self, name: str) -> Any:
        if name in devices.MOVES:
            return functools.partial(self._moved, name)
        if name == "float":
            return functools.partial(self._moved, "to", torch.float32)
        if name.endswith("_") and name[:-1] not in _REDUCES:
            raise Unseen
        if name.removesuffix("_") not in _REDUCES:
            self.taken = True
            return getattr(self.value(), name)
        return functools.partial(self._reduced, name.removesuffix("_"), name.endswith("_"))

    @property
    def shape(self) -> tuple:
        return Sequence((self.count, *self.meta.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.meta.dtype

    def size(self, dim: Any = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def _moved(self, name: str, *args: Any, **kwargs: Any) -> ZeroRows:
        """The zeros on the device of the rows, where they are already, perhaps in another dtype."""
        name, _, (_, *rest), kwargs = devices.still(name, (self, *args), kwargs)
        dtypes = [*rest, *kwargs.values()]
        if kwargs.keys() - {"dtype"} or len(dtypes) > 1 or not all(
            isinstance(one, torch.dtype) for one in dtypes):
            raise Unseen
        if not name or dtypes[0] == self.meta.dtype:
            return self
        return ZeroRows(self.count, self.meta.to(dtypes[0]), _in_dtype(self.number, dtypes[0]))

    def operate(self, name: str, function: Any, args: tuple, kwargs: dict) -> Any:
        if args and args[0] is self and name in _REDUCES:
            return self._reduced(name, False, *args[1:], **kwargs)
        if name in _LIKE:
            return getattr(sys.modules[__name__], name)(*args, **kwargs)
        if name not in IN_NEW_MEMORY and name not in ("max", "min"):
            raise Unseen
        args = tuple([one.value() if type(one) is ZeroRows else one for one in args])
        kwargs = {k: one.value() if type(one) is ZeroRows else one for k, one in kwargs.items()}
        return _call(name, function, args, kwargs)

    def beside(self, tensors: Any, dim: int) -> Any:
        return torch.cat([one.value() if type(one) is ZeroRows else one for one in tensors], dim)

    def value(self, beside: NodeValue | None = None) -> Any:
        """These as values per node, or where there is a number of them as a constant; ``beside``:
        values of which others are to be made with them."""
        if type(self.count) is int and beside is None:
            return constants.constant(torch.full, (tuple(self.meta.shape), self.number),
                                      {"dtype": self.meta.dtype})
        of = self.count.of if type(self.count) is NodeCount else beside
        if type(of) is not NodeValue:
            raise Unseen
        return node_wholes.zeros(of.steps, self.count, self.meta, self.number, of)

    def _reduced_nodes(self, name: str, in_place: bool, args: tuple, kwargs: dict) -> Any:
        """These with values per node reduced into them, by torch."""
        args = tuple([one.value() if type(one) is ZeroRows else one for one in args])
        found = [one for one in (*args, *kwargs.values()) if type(one) is NodeValue]
        if not found or not found[0].steps.wholes or not all(one.of_nodes for one in found):
            raise Unseen
        into = self.value(found[0])
        result = into.steps.made(getattr(torch.Tensor, name), (into, *args), kwargs, into.meta)
        result.rows, result.alone = into.rows, True
        return self._becomes(result) if in_place else result

    def _becomes(self, result: NodeValue) -> NodeValue:
        if self.taken:
            raise Unseen
        self.__class__, self.__dict__ = NodeValue, result.__dict__  # type: ignore[assignment]
        return self  # type: ignore[return-value]

    def _reduced(self, name: str, in_place: bool, *args: Any, **kwargs: Any) -> Any:
        if any(getattr(type(one), "of_edges", False) for one in (*args, *kwargs.values())):
            return other("derived.reduced").into(self, name, in_place, args, kwargs)
        if any(type(one) is NodeValue for one in (*args, *kwargs.values())):
            return self._reduced_nodes(name, in_place, args, kwargs)
        index, src, dim, reduce = _REDUCES[name](*args, **kwargs)
        if type(index) is Along:
            index = index.of if index.dim == dim else None
        if not isinstance(src, pointwise.Rows) or type(index) is not Special or (
            src.meta.shape[1:] != self.meta.shape[1:] or src.meta.dtype != self.meta.dtype):
            raise Unseen
        if reduce in _INTO or self.number != 0.0 and reduce in _EXTREMA:
            if index.steps is None:
                raise Unseen
            how = _INTO.get(reduce, (reduce, False))
            result = index.steps.into(self.number, src, index, dim, self.count, *how)
        elif self.number != 0.0:
            raise Unseen
        elif index.steps is not None:
            result = index.steps.scatter(src, index, dim, self.count, reduce)
        elif reduce == "sum" and index.functions is not None:  # in a message
            result = index.functions.added(self.count, src, index, dim)
        else:
            raise Unseen
        return self._becomes(result) if in_place else result


def _index_add(dim: Any, index: Any, source: Any) -> tuple:
    return index, source, dim, "sum"


def _scatter_add(dim: Any, index: Any, src: Any) -> tuple:
    return _of_rows(index, src), src, dim, "sum"


def _scatter_reduce(dim: Any, index: Any, src: Any, reduce: Any, *,
                    include_self: Any = True) -> tuple:
    if reduce in _EXTREMA and include_self is True:
        reduce = f"{reduce} of all"
    elif include_self is not False and reduce != "sum" or (
        reduce not in ("sum", "mean", "amax", "amin")):
        raise Unseen
    return _of_rows(index, src), src, dim, reduce


def _index_reduce(dim: Any, index: Any, source: Any, reduce: Any, *,
                  include_self: Any = True) -> tuple:
    if reduce != "mean" or include_self is not False:
        raise Unseen
    return index, source, dim, reduce


def _index_put(indices: Any, values: Any, accumulate: Any = False) -> tuple:
    if accumulate is not True or type(indices) not in (tuple, list) or len(indices) != 1:
        raise Unseen
    return indices[0], values, 0, "sum"


_REDUCES: dict[str, Callable[..., tuple]] = {
    "index_add": _index_add, "scatter_add": _scatter_add, "index_reduce": _index_reduce,
    "scatter_reduce": _scatter_reduce, "index_put": _index_put}


def _of_rows(index: Any, src: Any) -> Any:
    """The index that was repeated over the whole shape of rows."""
    if type(index) is Spread:
        if not isinstance(src, Value) or index.tail != tuple(src.meta.shape[1:]):
            raise Unseen
        return index.of
    if type(index) is Along:
        return index
    if not isinstance(src, Value) or src.meta.dim() != 1:  # the first channel alone
        raise Unseen
    return index


def _full(number: float, function: Callable) -> Callable[..., Any]:
    """What stands for `torch.zeros` or `torch.ones`."""

    def full(*size: Any, dtype: Any = None, device: Any = None, **more: Any) -> Any:
        sizes = size or (more.pop("size", ()),)
        counts = _counts(sizes)
        if not counts or not isinstance(counts[0], (Special, RowCount)) and not (
            type(counts[0]) is int and of_wholes() and not more):
            return constants.constant(function, sizes, {**more, "dtype": dtype}, device)
        if not (device is None or devices.named(device)) or more:
            raise Unseen
        return _made(number, counts, default_dtype() if dtype is None else dtype)

    return full


def _new_full(number: float) -> Callable[..., Any]:
    """What stands for ``new_zeros`` or ``new_ones`` of rows."""

    def new_full(rows: Any, *size: Any) -> Any:
        counts = _counts(size)
        if not counts:
            raise Unseen
        return _made(number, counts, rows.meta.dtype)

    return new_full


def _filled(rows: Any, size: Any, fill_value: Any) -> Any:
    """What stands for ``new_full`` of rows."""
    if type(fill_value) not in (int, float):
        raise Unseen
    return _new_full(float(fill_value))(rows, size)


def _full_of(size: Any, fill_value: Any, **options: Any) -> Any:
    """What stands for `torch.full`."""
    counts = _counts((size,))
    if not counts or not isinstance(counts[0], (Special, RowCount)):
        return constants.FUNCTIONS[torch.full](size, fill_value, **options)
    if type(fill_value) is not float and not (
        type(fill_value) is int and options.get("dtype") is not None):  # integers make integers
        raise Unseen
    return _full(float(fill_value), torch.full)(*counts, **options)


def zeros_like(input: Any, **options: Any) -> ZeroRows:
    """`torch.zeros_like` of values per node."""
    return full_like(input, 0.0, **options)


def ones_like(input: Any, **options: Any) -> ZeroRows:
    """`torch.ones_like`, likewise."""
    return full_like(input, 1.0, **options)


def full_like(input: Any, fill_value: Any, *, dtype: Any = None, device: Any = None,
              **options: Any) -> ZeroRows:
    """`torch.full_like`, likewise."""
    if type(fill_value) not in NUMBERS or options or not (
        device is None or devices.named(device)):
        raise Unseen
    count = input.count if type(input) is ZeroRows else _count_of(input)
    meta = input.meta if dtype is None else input.meta.to(dtype)
    return ZeroRows(count, meta, _in_dtype(fill_value, meta.dtype))


def _count_of(value: Any) -> NodeCount:
    """How many nodes receive, by values per node."""
    if type(value) is not NodeValue:
        raise Unseen
    end, whole = value.rows
    if not whole or end != "i" and not value.steps.square:
        raise Unseen
    return NodeCount(value.as_now())


def _in_dtype(number: float, dtype: torch.dtype) -> float:
    """A number as torch keeps it in this dtype."""
    try:
        return float(torch.full((), number, dtype=dtype, device="cpu").item())
    except RuntimeError:
        raise Unseen from None


def _onto(value: NodeValue, name: str, *args: Any, **kwargs: Any) -> NodeValue:
    """Values per node with sums added to them, in place or not."""
    zeros, sums = zeros_like(value), name.removesuffix("_")
    total = zeros._reduced(sums, False, *args, **kwargs)
    if name.endswith("_"):
        return value.overwritten("add", torch.Tensor.add, value, total)
    return value.operate("add", torch.Tensor.add, (value, total), {})


def _ones_like(value: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    """What stands for `torch.ones_like`, of ids a one for each edge."""
    if type(value) is not Special or not value.end:
        return torch.ones_like(value, dtype=dtype, device=device, **options)
    if options or not (device is None or devices.named(device)):
        raise Unseen
    return _made(1.0, (value.numel(),), torch.int64 if dtype is None else dtype)


def _counts(size: tuple) -> Any:
    return size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size


def _made(number: float, counts: Any, dtype: Any) -> Any:
    """Zeros for the nodes, to add to; or rows of the edges that are this number."""
    if not all(type(one) is int for one in counts[1:]):
        raise Unseen
    meta = torch.empty(ROWS, *counts[1:], dtype=dtype, device="meta")
    if type(counts[0]) is RowCount:
        if not meta.is_floating_point():
            raise Unseen
        return pointwise.Rows(Number(number), meta)
    if type(counts[0]) is int and of_wholes() and counts[0] not in (ROWS, node_wholes.GRAPHS):
        return ZeroRows(counts[0], meta.new_empty(counts), number)
    if type(counts[0]) not in (Special, NodeCount) or not meta.is_floating_point() and number:
        raise Unseen
    return ZeroRows(counts[0], meta, number)


def _bincount(index: Any, weights: Any = None, minlength: Any = 0) -> Any:
    """What stands for `torch.bincount`, of the ids of one end of the edges."""
    if type(index) is NodeValue and weights is None:
        return node_wholes.bincount(index, minlength)
    if type(index) is not Special:
        return torch.bincount(index, weights, minlength)
    if weights is not None or index.functions is None:
        raise Unseen
    return index.functions.bincount(index, minlength)


#: functions of torch's, with what stands for them
FUNCTIONS: dict[Any, Any] = {
    **constants.FUNCTIONS, torch.arange: chosen.numbers,
    torch.full: _full_of, torch.zeros: _full(0.0, torch.zeros), torch.ones: _full(1.0, torch.ones),
    torch.ones_like: _ones_like, torch.bincount: _bincount}
# rows tell of themselves what others beside them need
for _name, _value in (("new_zeros", _new_full(0.0)), ("new_ones", _new_full(1.0)),
                      ("new_full", _filled), ("device", DEVICE)):
    setattr(pointwise.Rows, _name, _value)
    setattr(NodeValue, _name, _value)
for _name in ("index_add", "index_add_", "scatter_add", "scatter_add_"):
    setattr(NodeValue, _name, functools.partialmethod(_onto, _name))


def instead(value: Any, names: Set[str], watched: list | None = None) -> Any:
    """What stands for a global value; None for others. ``names``: what may be named of torch's;
    ``watched``: what is compared in each call, as of `guarded.Guards`."""
    if any(value is one for one in naming.STOOD_FOR):
        return Torch(value, names, watched)
    return FUNCTIONS.get(value) if isinstance(value, types.BuiltinFunctionType) else None


class Torch(naming.Torch):
    """With zeros and ones that stand-ins know."""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if found is torch.Tensor:
            return kinds.TENSOR
        if found is torch.enable_grad:
            return contexts.EnableGrad
        return FUNCTIONS.get(found, found) if type(found) is types.BuiltinFunctionType else found
