"""Stand-ins for tensors while a ``message`` of attention is traced.

The message runs once on stand-ins that know shapes. Features of one end of the edges (`Node`), and
what belongs to edges, go through operations that make one row of each row: those are
repeated on nodes, before anything is gathered. Where both ends meet, only what attention kernels
compute goes on: sums of both ends (`Ends`) after a leaky ReLU (`Bent`), and inner products
(`Product`). They end in a `Score`, its softmax (`Alpha`), and `Weighted`, the message. All else
raises `Unseen`.
"""
from __future__ import annotations

import operator
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.tracing.code.function_names import (ALIASES, BESIDE, LINEAR, POINTWISE,
                                                           VIEWS as VIEWS, by_torchs_names,
                                                           name_of as name_of)
from gnnaccel.adapters.tracing.later import other
from gnnaccel.adapters.tracing.layer.devices import MOVES, still
from gnnaccel.adapters.tracing.noted import note_device
from gnnaccel.adapters.tracing.rows.row_count import ROWS, counted
from gnnaccel.adapters.tracing.rows.specials import DEVICE, Special
from gnnaccel.adapters.tracing.rows.standins import Unseen
from gnnaccel.dispatch.generated.cut import make_without_gradient

Make = Callable[[dict], Tensor]  # the rows of a call's arguments

_OF_THREE = frozenset(("where", "lerp", "addcmul", "addcdiv", "addmm", "baddbmm"))
_OF_PARAMETERS = POINTWISE | {"getitem", "t", "split", "pow", "square", "sqrt", "softplus", "log",
                               "clamp", "softmax", "index_select", "transpose", "detach", "rsqrt",
                               "reciprocal", "maximum", "minimum", "clamp_min", "clamp_max",
                               "einsum",
                               *MOVES}


def meta_of(value: Any) -> Any:
    return value.meta if isinstance(value, Value) else value


def shaped(function: Callable, args: tuple, kwargs: dict) -> Tensor:
    """The shape of the result."""
    try:
        result = function(*map(meta_of, args), **{k: meta_of(v) for k, v in kwargs.items()})
    except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
        raise Unseen from None
    if isinstance(result, Tensor) and ROWS not in result.shape[1:]:  # no rows beside other rows
        return result
    raise Unseen


def applied(function: Callable, args: tuple, kwargs: dict) -> Tensor:
    """`shaped`; Unseen where that is no longer one row for each."""
    result = shaped(function, args, kwargs)
    if result.dim() == 0 or result.shape[0] != ROWS:
        raise Unseen
    return result


class Value:
    """Stand-in for a tensor. ``meta``: how it looks, on the meta device, `ROWS` in its first
    dimension; ``rank``: of two stand-ins in one operation that of the higher rank decides."""

    meta: Tensor
    rank: int
    __array_ufunc__ = None  # a number of numpy's on the left leaves it to this

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_PARAMETERS:
            raise Unseen
        return lambda *args, **kwargs: _call(name, getattr(Tensor, name), (self, *args), kwargs)

    def size(self, dim: int) -> int:
        if dim in (0, -self.meta.dim()):
            raise Unseen
        return self.meta.shape[dim]

    def dim(self) -> int:
        return self.meta.dim()

    @property
    def ndim(self) -> int:
        return self.meta.dim()

    def _refuses(self, *args: Any) -> Any:
        raise Unseen

    __bool__ = __str__ = __format__ = __repr__ = _refuses  # its text is another than the tensor's

    def __getitem__(self, place: Any) -> Any:
        if not isinstance(self, Param) and place not in (
            (slice(None), None), (Ellipsis, None), (slice(None), None, slice(None)),
            (slice(None), slice(None), None)):
            raise Unseen
        return _call("getitem", operator.getitem, (self, place), {})

    @classmethod
    def __torch_function__(cls, function, types_, args=(), kwargs=None):
        name, kwargs = getattr(function, "__name__", ""), dict(kwargs or {})
        if name.endswith("_") and not name.endswith("__"):
            return _overwritten(function, args, kwargs)
        if not args and "input" in kwargs and "condition" not in kwargs:  # of `torch.where`
            args = (kwargs.pop("input"),)
        return _call(name_of(function), function, args, kwargs)

    def __neg__(self) -> Any:
        return _call("neg", operator.neg, (self,), {})

    def __eq__(self, other: Any) -> bool:
        return False if other is None else self._refuses()  # Python's own says that they are not

    def __ne__(self, other: Any) -> bool:
        return not self == other

    __hash__ = object.__hash__

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __imatmul__ = _refuses
    __ipow__ = __iand__ = __ior__ = __ifloordiv__ = __imod__ = __ixor__ = _refuses

    def overwritten(self, name: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """The result of an operation that writes it over this, the first of ``args``."""
        raise Unseen

    def becomes(self, result: Any) -> Any:
        """This, with ``result`` written over it. Values that lie in its memory may be used no
        more."""
        raise Unseen

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        """The result of an operation of which this, the first stand-in among ``args``, decides."""
        raise Unseen

    def beside(self, tensors: Any, dim: int) -> Any:
        """The tensors, of which this decides, as one by `torch.cat`."""
        raise Unseen


def _binary(name: str, function: Callable) -> None:
    setattr(Value, f"__{name}__", lambda self, other: _call(name_of(function), function,
                                                            (self, other), {}))
    setattr(Value, f"__r{name}__", lambda self, other: _call(name_of(function), function,
                                                             (other, self), {}))


for _operator in ("mul", "add", "sub", "truediv", "matmul", "pow"):
    _binary(_operator, getattr(operator, _operator))


def _call(name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
    name, kwargs = ALIASES.get(name, name), by_torchs_names(function, kwargs)
    if name in BESIDE:
        named = kwargs if "cat" in name else {**kwargs, "dim": 1}
        return other("rows.pieces").recorded(other("attention.traced_cat").cat(*args, **named))
    if name == "stack":
        return other("rows.piles").pile(*args, **kwargs)
    if name == "einsum":
        return other("rows.einsums").einsum(*args, **kwargs)
    if name in MOVES:
        name, function, args, kwargs = still(name, args, kwargs)
        if not name:
            return args[0]
    if kwargs.pop("inplace", False):
        return _overwritten(function, args, kwargs)
    stand_ins = [a for a in (*args, *kwargs.values()) if isinstance(a, Value)]
    if any(isinstance(a, (list, tuple)) and any(isinstance(b, Value) for b in a) for a in args):
        raise Unseen
    if len([one for one in stand_ins if not isinstance(one, Param)]) > 2 and name not in _OF_THREE:
        raise Unseen
    # the operand that knows more of attention decides
    return max(stand_ins, key=attrgetter("rank")).operate(name, function, args, kwargs)


def _overwritten(function: Callable, args: tuple, kwargs: dict) -> Any:
    if not args or not isinstance(args[0], Value):
        raise Unseen
    return args[0].overwritten(name_of(function), function, *args, **kwargs)


class Param(Value):
    """A tensor that the layer holds, or something made of such alone; ``make`` computes it, anew in
    each call, since its numbers change; ``roots``: what it is made of, likewise; ``names``: as of a
    `Leaf`, where that is rows of the edges."""

    rank = 0

    def __init__(self, make: Make, meta: Tensor, roots: tuple[Make, ...] = (),
                 names: frozenset[Any] = frozenset()):
        self.make, self.meta, self.roots, self.names = make, meta, roots, names

    @property
    def T(self) -> Any:
        return self.t()

    def __getitem__(self, place: Any) -> Any:
        if type(place) is tuple and any(isinstance(one, (Value, Special)) for one in place):
            return other("rows.tables").at_places(self, place)
        return super().__getitem__(place)

    def repeat(self, *sizes: Any) -> Any:
        """One row, for each of the edges."""
        return other("rows.tables").for_edges(self, sizes)

    @property
    def shape(self) -> torch.Size:
        return self.meta.shape

    def size(self, dim: Any = None) -> Any:
        return self.meta.shape if dim is None else self.meta.shape[dim]

    @property
    def mT(self) -> Any:
        return self.transpose(-1, -2)

    @property
    def dtype(self) -> torch.dtype:
        return self.meta.dtype

    @property
    def device(self) -> Any:
        for root in self.roots:
            note_device(root)
        return DEVICE

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        if any(isinstance(one, Special) for one in (*args, *kwargs.values())):
            return other("rows.tables").at_end(name, *args, **kwargs)
        if name not in _OF_PARAMETERS or name == "split" or counted((args, *kwargs.values())):
            raise Unseen
        meta = shaped(function, args, kwargs)
        if meta is self.meta:
            return self  # as torch gives the tensor itself
        of = [a for a in (*args, *kwargs.values()) if isinstance(a, Param)]
        made = Param(maker(function, args, kwargs), meta, *_made_of(of))
        return made.detached() if name == "detach" or not torch.is_grad_enabled() else made

    def detached(self) -> Param:
        """The same without gradients."""
        return Param(make_without_gradient(self.make), self.meta,
                     tuple(map(make_without_gradient, self.roots)), self.names)

    def beside(self, tensors: Any, dim: int) -> Any:
        if not all(isinstance(one, Param) for one in tensors):
            raise Unseen

        def make(given: dict) -> Tensor:
            return torch.cat([one.make(given) for one in tensors], dim)

        return Param(make, shaped(torch.cat, ([one.meta for one in tensors], dim), {}),
                     *_made_of(tensors))


def _made_of(tensors: Any) -> tuple[tuple[Make, ...], frozenset[Any]]:
    """The ``roots`` and the ``names`` of a `Param` that is made of several."""
    return (tuple([root for one in tensors for root in one.roots]),
            frozenset().union(*[one.names for one in tensors]))


class Node(Value):
    """Rows of nodes at the ``end`` "i" or "j" of the edges, or of the edges themselves ("e");
    ``make`` computes them of a call's arguments; the rest is as of `traced_views`."""

    rank = 1
    views: tuple | None = None
    product: tuple[Node, Param] | None = None
    dot: tuple[Node, Param] | None = None

    def __init__(self, end: str, make: Make, meta: Tensor):
        self.end, self.make, self.meta = end, make, meta

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        other_nodes = [a for a in args if isinstance(a, Node) and a is not self]
        if other_nodes and any(one.end != self.end for one in other_nodes):
            return _between(name, args)
        if name not in POINTWISE and name != "getitem":
            raise Unseen
        return other("attention.traced_views").of_one(self, function, args, kwargs)


def maker(function: Callable, args: tuple, kwargs: dict) -> Make:
    parts = [(a.make, None) if isinstance(a, (Node, Param)) else (None, a) for a in args]
    def make(given: dict) -> Tensor:
        values = [value if one is None else one(given) for one, value in parts]
        return function(*values, **{k: _made(v, given) for k, v in kwargs.items()})

    return make


def _made(value: Any, given: dict) -> Any:
    return value.make(given) if isinstance(value, (Node, Param)) else value


def _between(name: str, args: tuple) -> Any:
    left, right = args
    if name in ("add", "sub"):
        right = _negated(right) if name == "sub" else right
        return Ends({}).plus(left).plus(right)
    if name == "mul" and {left.end, right.end} == {"i", "j"}:
        return _product(left, right)
    raise Unseen


def _product(left: Any, right: Any) -> Any:
    """The product of rows at both ends; to those of the source rows of the edge may be added."""
    from gnnaccel.adapters.tracing.attention.traced_scores import Product

    parts = [one.parts if isinstance(one, Ends) else {one.end: one} for one in (left, right)]
    at_i, at_source = parts if "i" in parts[0] else parts[::-1]
    if at_i.keys() != {"i"} or at_source.keys() not in ({"j"}, {"j", "e"}):
        raise Unseen
    return Product(at_i["i"], at_source["j"], at_source.get("e"))


def _negated(node: Any) -> Any:
    return _call("neg", operator.neg, (node,), {})


class Ends(Value):
    """A sum of rows of both ends, and of the edge; ``parts`` by end. ``once``: the host adds up
    with one rounding, in one product, where these parts are rounded each."""

    rank = 2

    def __init__(self, parts: dict[str, Node], once: bool = False):
        self.parts, self.once = parts, once
        if parts:
            try:
                self.meta = sum(part.meta for part in parts.values())  # type: ignore[assignment]
            except RuntimeError:
                raise Unseen from None

    def plus(self, other: Any) -> Ends:
        parts = dict(self.parts)
        for end, part in (other.parts if isinstance(other, Ends) else {other.end: other}).items():
            parts[end] = (part if end not in parts
                          else _call("add", operator.add, (parts[end], part), {}))
        return Ends(parts, self.once or isinstance(other, Ends) and other.once)

    def mapped(self, function: Callable, args: tuple, kwargs: dict) -> Ends:
        """A linear operation of each part."""
        shapes = {part.meta.shape for part in self.parts.values()}
        if len(shapes) > 1:
            raise Unseen
        of_one = other("attention.traced_views").of_one
        return Ends({end: of_one(part, function, (part, *args), kwargs)
                     for end, part in self.parts.items()}, self.once)

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        if name in ("add", "sub") and all(isinstance(a, (Ends, Node)) for a in args):
            left, right = args
            right = _all_negated(right) if name == "sub" else right
            return Ends({}).plus(left).plus(right)
        if name == "mul" and all(isinstance(a, (Ends, Node)) for a in args):
            return _product(*args)
        if name == "leaky_relu" or name == "relu":
            if self.once and self.meta.element_size() == 2:
                raise Unseen  # the sign, and so the slope, would be another far from zero, too
            from gnnaccel.adapters.tracing.attention.traced_scores import Bent

            slope = 0.0 if name == "relu" else _slope(args[1:], kwargs)
            return Bent(self, slope)
        if name == "linear":
            return other("attention.traced_bias").of_linear(self, args, kwargs)
        if name in LINEAR or name == "getitem":
            function, args = with_first(function, self, args)
            return self.mapped(function, args, kwargs)
        raise Unseen


def _all_negated(value: Any) -> Any:
    return _negated(value) if isinstance(value, Node) else value.mapped(operator.neg, (), {})


def with_first(function: Callable, value: Value, args: tuple) -> tuple[Callable, tuple]:
    """The operation with ``value`` in the first place; only products commute."""
    if args[0] is value:
        rest = args[1:]
    elif name_of(function) == "mul" and args[1] is value:
        rest = args[:1]
    else:
        raise Unseen
    if any(isinstance(a, Value) and not isinstance(a, Param) for a in rest):
        raise Unseen
    return function, rest


def _slope(args: tuple, kwargs: dict) -> float:
    slope = kwargs.get("negative_slope", args[0] if args else 0.01)
    if type(slope) not in (int, float) or slope < 0:
        raise Unseen
    return float(slope)
