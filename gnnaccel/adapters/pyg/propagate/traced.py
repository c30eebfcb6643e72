"""What stands for tensors while a ``message`` of attention is traced.

The message runs once on stand-ins that know shapes. Features of one end of the edges (`Node`), and
what belongs to edges, go through operations that make one row of each row: those are
repeated on nodes, before anything is gathered. Where both ends meet, only what attention kernels
compute goes on: sums of both ends (`Ends`) after a leaky ReLU (`Bent`), and inner products
(`Product`). They end in a `Score`, its softmax (`Alpha`), and `Weighted`, the message. All else
raises `Unseen`.
"""
from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.adapters.pyg.propagate.standins import Unseen

#: rows that a stand-in claims to have: a prime, so that no view mixes rows without being noticed
ROWS = 7919
Make = Callable[[dict], Tensor]  # the rows of a call's arguments

_VIEWS = {"view", "reshape", "unsqueeze", "squeeze", "contiguous"}
#: linear in their first argument
_LINEAR = _VIEWS | {"mul", "div", "neg", "sum", "mean", "matmul"}
_POINTWISE = _LINEAR | {"add", "sub", "relu", "leaky_relu", "sigmoid", "tanh", "exp", "elu", "abs",
                        "linear", "to", "float"}
#: names of torch's functions that mean one of these
_ALIASES = {"multiply": "mul", "divide": "div", "true_divide": "div", "truediv": "div",
            "negative": "neg", "subtract": "sub", "rsub": "rsub", "__rsub__": "rsub"}
_OF_PARAMETERS = _POINTWISE | {"getitem", "t", "split"}


def _name(function: Any) -> str:
    name = getattr(function, "__name__", "").strip("_")
    return _ALIASES.get(name, name)


def _meta(value: Any) -> Any:
    if isinstance(value, Value):
        return value.meta
    return value


def _shaped(function: Callable, args: tuple, kwargs: dict) -> Tensor:
    """The shape of the result."""
    try:
        found = function(*map(_meta, args), **{k: _meta(v) for k, v in kwargs.items()})
    except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
        raise Unseen from None
    if not isinstance(found, Tensor):
        raise Unseen
    return found


def _applied(function: Callable, args: tuple, kwargs: dict) -> Tensor:
    """`_shaped`; Unseen where that is no longer one row for each."""
    found = _shaped(function, args, kwargs)
    if found.dim() == 0 or found.shape[0] != ROWS:
        raise Unseen
    return found


class Value:
    """``meta``: how it looks, on the meta device, `ROWS` in its first dimension."""

    meta: Tensor

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_PARAMETERS:
            raise Unseen
        return lambda *args, **kwargs: _call(name, getattr(Tensor, name), (self, *args), kwargs)

    def size(self, dim: int) -> int:
        if dim in (0, -self.meta.dim()) and not isinstance(self, Param):
            raise Unseen
        return self.meta.shape[dim]

    def dim(self) -> int:
        return self.meta.dim()

    def __bool__(self) -> bool:
        raise Unseen

    def __getitem__(self, place: Any) -> Any:
        if not isinstance(self, Param) and place not in (
            (slice(None), None), (Ellipsis, None), (slice(None), None, slice(None)),
            (slice(None), slice(None), None)):
            raise Unseen
        return _call("getitem", operator.getitem, (self, place), {})

    @classmethod
    def __torch_function__(cls, function, types_, args=(), kwargs=None):
        return _call(_name(function), function, args, kwargs or {})

    def __neg__(self) -> Any:
        return _call("neg", operator.neg, (self,), {})

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        """The result of an operation of which this, the first stand-in among ``args``, decides."""
        raise Unseen


def _binary(name: str, function: Callable) -> None:
    setattr(Value, f"__{name}__", lambda self, other: _call(_name(function), function,
                                                            (self, other), {}))
    setattr(Value, f"__r{name}__", lambda self, other: _call(_name(function), function,
                                                             (other, self), {}))


for _operator in ("mul", "add", "sub", "truediv", "matmul"):
    _binary(_operator, getattr(operator, _operator))


def _call(name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
    name = _ALIASES.get(name, name)
    if name in ("cat", "concat", "concatenate"):
        return _cat(*args, **kwargs)
    if kwargs.pop("inplace", False):
        raise Unseen
    stand_ins = [a for a in (*args, *kwargs.values()) if isinstance(a, Value)]
    if any(isinstance(a, (list, tuple)) and any(isinstance(b, Value) for b in a) for a in args):
        raise Unseen
    if len([one for one in stand_ins if not isinstance(one, Param)]) > 2:
        raise Unseen
    # of two the one that knows more of attention decides
    return max(stand_ins, key=_rank).operate(name, function, args, kwargs)


def _rank(value: Value) -> int:
    return _ORDER.index(type(value))


class Param(Value):
    """A tensor that the layer holds, or something made of such alone; ``make`` computes it, anew in
    each call, since its numbers change."""

    def __init__(self, make: Make, meta: Tensor):
        self.make, self.meta = make, meta

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        if name not in _OF_PARAMETERS or name == "split":
            raise Unseen
        return Param(_maker(function, args, kwargs), _shaped(function, args, kwargs))


class Node(Value):
    """Rows of nodes at the ``end`` "i" or "j" of the edges, or of the edges themselves ("e");
    ``make`` computes them of the arguments of ``propagate``."""

    def __init__(self, end: str, make: Make, meta: Tensor):
        self.end, self.make, self.meta = end, make, meta

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        others = [a for a in args if isinstance(a, Node) and a is not self]
        if others and any(one.end != self.end for one in others):
            return _between(name, args)
        if name not in _POINTWISE and name != "getitem":
            raise Unseen
        return Node(self.end, _maker(function, args, kwargs), _applied(function, args, kwargs))


def _maker(function: Callable, args: tuple, kwargs: dict) -> Make:
    def make(given: dict) -> Tensor:
        return function(*(_made(a, given) for a in args),
                        **{k: _made(v, given) for k, v in kwargs.items()})

    return make


def _made(value: Any, given: dict) -> Any:
    return value.make(given) if isinstance(value, (Node, Param)) else value


def _between(name: str, args: tuple) -> Any:
    left, right = args
    if name in ("add", "sub"):
        right = _negated(right) if name == "sub" else right
        return Ends({}).plus(left).plus(right)
    if name == "mul" and {left.end, right.end} == {"i", "j"}:
        return Product(*sorted((left, right), key=lambda one: one.end))
    raise Unseen


def _negated(node: Any) -> Any:
    return _call("neg", operator.neg, (node,), {})


class Ends(Value):
    """A sum of rows of both ends, and of the edge; ``parts`` by end."""

    def __init__(self, parts: dict[str, Node]):
        self.parts = parts
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
        return Ends(parts)

    def mapped(self, function: Callable, args: tuple, kwargs: dict) -> Ends:
        """A linear operation of each part."""
        shapes = {part.meta.shape for part in self.parts.values()}
        if len(shapes) > 1:
            raise Unseen
        return Ends({end: Node(end, _maker(function, (part, *args), kwargs),
                               _applied(function, (part, *args), kwargs))
                     for end, part in self.parts.items()})

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        if name in ("add", "sub") and all(isinstance(a, (Ends, Node)) for a in args):
            left, right = args
            right = _all_negated(right) if name == "sub" else right
            return Ends({}).plus(left).plus(right)
        if name == "leaky_relu" or name == "relu":
            slope = 0.0 if name == "relu" else _slope(args[1:], kwargs)
            return Bent(self, slope)
        if name == "linear":
            return _of_linear(self, args, kwargs)
        if name in _LINEAR or name == "getitem":
            function, args = _with_first(function, self, args)
            return self.mapped(function, args, kwargs)
        raise Unseen


def _all_negated(value: Any) -> Any:
    if isinstance(value, Node):
        return _negated(value)
    return value.mapped(operator.neg, (), {})


def _with_first(function: Callable, value: Value, args: tuple) -> tuple[Callable, tuple]:
    """The operation with ``value`` in the first place; only products commute."""
    if args[0] is value:
        rest = args[1:]
    elif _name(function) == "mul" and args[1] is value:
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


def _of_linear(ends: Ends, args: tuple, kwargs: dict) -> Ends:
    """A linear map of a sum: its bias is added once."""
    weight, bias = (*args[1:], *kwargs.values(), None)[:2]
    found = ends.mapped(F.linear, (weight,), {})
    return found if bias is None else _biased(found, bias)


def _biased(ends: Ends, bias: Any) -> Ends:
    """A sum, to one part of which ``bias`` is added."""
    first = next(iter(ends.parts))
    parts = dict(ends.parts)
    parts[first] = _call("add", operator.add, (parts[first], bias), {})
    return Ends(parts)


class Cat(Value):
    """Rows of both ends side by side."""

    def __init__(self, parts: list[Node]):
        self.parts = parts
        try:
            self.meta = torch.cat([part.meta for part in parts], -1)
        except RuntimeError:
            raise Unseen from None

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        if name == "linear":
            weight, bias = (*args[1:], *kwargs.values(), None)[:2]
            found = Ends({})
            for part, w in zip(self.parts, self._cut(weight, -1)):
                found = found.plus(_call("linear", F.linear, (part, w), {}))
            return found if bias is None else _biased(found, bias)
        function, rest = _with_first(function, self, args)
        if name == "mul" and isinstance(rest[0], Param):
            return Cat([_call("mul", operator.mul, (part, w), {})
                        for part, w in zip(self.parts, self._cut(rest[0], -1))])
        if name == "matmul" and isinstance(rest[0], Param):
            found = Ends({})
            for part, w in zip(self.parts, self._cut(rest[0], -2 if rest[0].dim() > 1 else 0)):
                found = found.plus(_call("matmul", torch.matmul, (part, w), {}))
            return found
        if name == "sum" and (rest or tuple(kwargs.values()))[:1] == (-1,):
            found = Ends({})
            for part in self.parts:
                found = found.plus(_call("sum", Tensor.sum, (part, *rest), kwargs))
            return found
        raise Unseen

    def _cut(self, weight: Any, dim: int) -> list[Any]:
        widths = [part.meta.shape[-1] for part in self.parts]
        if not isinstance(weight, Param) or weight.meta.shape[dim] != sum(widths):
            raise Unseen
        return [_slice(weight, widths, at, dim) for at in range(len(widths))]


def _slice(weight: Param, widths: list[int], at: int, dim: int) -> Param:
    return Param(lambda given: weight.make(given).split(widths, dim)[at],
                 weight.meta.split(widths, dim)[at])


def _cat(tensors: Any, dim: int = 0) -> Any:
    if not all(isinstance(t, Node) for t in tensors):
        raise Unseen
    if dim not in (-1, tensors[0].meta.dim() - 1):
        raise Unseen
    if len({t.end for t in tensors}) == 1:
        parts = tuple(tensors)

        def make(given: dict) -> Tensor:
            return torch.cat([part.make(given) for part in parts], -1)

        return Node(parts[0].end, make, torch.cat([part.meta for part in parts], -1))
    return Cat(list(tensors))


class Bent(Value):
    """A leaky ReLU of a sum of both ends, whose channels ``att`` are multiplied with."""

    def __init__(self, ends: Ends, slope: float, att: Param | None = None):
        self.ends, self.slope, self.att, self.meta = ends, slope, att, ends.meta

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        if name in _VIEWS or name == "getitem":
            if self.att is not None:
                raise Unseen
            return Bent(self.ends.mapped(*_with_first(function, self, args), kwargs), self.slope)
        if name == "linear":
            weight, bias = (*args[1:], *kwargs.values(), None)[:2]
            if self.att is not None or bias is not None or weight.meta.shape[0] != 1:
                raise Unseen
            return self._scored(weight.view(-1), _applied(F.linear, args, kwargs))
        function, rest = _with_first(function, self, args)
        if name == "mul" and isinstance(rest[0], Param) and self.att is None:
            _applied(function, args, kwargs)
            return Bent(self.ends, self.slope, rest[0])
        if name == "matmul" and isinstance(rest[0], Param) and self.att is None:
            if rest[0].dim() > 2 or (rest[0].dim() == 2 and rest[0].meta.shape[1] != 1):
                raise Unseen
            return self._scored(rest[0].reshape(-1), _applied(function, args, kwargs))
        if name == "sum" and self.att is not None and (rest or
                                                       tuple(kwargs.values()))[:1] == (-1,):
            return self._scored(self.att, _applied(function, args, kwargs))
        raise Unseen

    def _scored(self, att: Param, meta: Tensor) -> Score:
        if self.ends.parts.keys() != {"i", "j"}:
            raise Unseen
        return Score("gatv2", meta, ends=self.ends, slope=self.slope, att=att)


class Product(Value):
    """Both ends' rows, multiplied."""

    def __init__(self, at_i: Node, at_j: Node):
        self.at_i, self.at_j = at_i, at_j
        if at_i.meta.shape != at_j.meta.shape:
            raise Unseen
        self.meta = at_i.meta

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        function, rest = _with_first(function, self, args)
        if name != "sum" or (rest or tuple(kwargs.values()))[:1] not in ((-1,),
                                                                        (self.meta.dim() - 1,)):
            raise Unseen
        return Score("dot", _applied(function, args, kwargs), queries=self.at_i, keys=self.at_j)


class Score(Value):
    """One number for each edge and head. ``kind``: of the attention; ``of``: what it is made
    of."""

    def __init__(self, kind: str, meta: Tensor, scale: float = 1.0, **of: Any):
        self.kind, self.meta, self.scale, self.of = kind, meta, scale, of

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        function, rest = _with_first(function, self, args)
        if name in _VIEWS or name == "getitem":
            return Score(self.kind, _applied(function, args, kwargs), self.scale, **self.of)
        if (name in ("mul", "div") and self.kind == "dot" and type(rest[0]) in (int, float)
            and rest[0]):
            by = float(rest[0])
            return Score("dot", self.meta, self.scale * (by if name == "mul" else 1.0 / by),
                         **self.of)
        raise Unseen


def score_of(value: Any) -> Score:
    """What a softmax is taken of."""
    if (isinstance(value, Bent) and value.att is None) or isinstance(value, Ends):
        ends = value if isinstance(value, Ends) else value.ends
        slope = 1.0 if ends is value else value.slope  # 1: without a leaky ReLU
        if ("j" not in ends.parts
            or any(part.meta.shape != ends.meta.shape for part in ends.parts.values())):
            raise Unseen
        return Score("terms", value.meta, ends=ends, slope=slope)
    if isinstance(value, Score):
        return value
    raise Unseen


class Alpha(Value):
    """A softmax of ``score`` over the edges that enter each node, after dropout."""

    def __init__(self, score: Score, meta: Tensor, dropout: float = 0.0):
        self.score, self.meta, self.dropout = score, meta, dropout

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        if name in _VIEWS or name == "getitem":
            function, _ = _with_first(function, self, args)
            return Alpha(self.score, _applied(function, args, kwargs), self.dropout)
        if name == "dropout":
            return self.dropped(*args[1:], **kwargs)
        other = args[1] if args[0] is self else args[0]
        if name == "mul" and isinstance(other, Node) and other.end == "j":
            return Weighted(self, other, _applied(function, args, kwargs))
        raise Unseen

    def dropped(self, p: float = 0.5, training: bool = True) -> Alpha:
        """After dropout of rate ``p``."""
        if not training or not p:
            return self
        if self.dropout or not 0.0 < p < 1.0:
            raise Unseen
        return Alpha(self.score, self.meta, float(p))


class Weighted(Value):
    """The message: rows ``values`` of the source, each head's times its `Alpha`."""

    def __init__(self, alpha: Alpha, values: Node, meta: Tensor):
        self.alpha, self.values, self.meta = alpha, values, meta
        heads = alpha.meta.numel() // ROWS
        # heads come before channels, in memory as well
        if (alpha.meta.dim() != values.meta.dim() or meta.shape != values.meta.shape
            or heads != math.prod(values.meta.shape[1:-1] or (1,)) or alpha.meta.shape[-1] != 1
            or alpha.score.meta.numel() != alpha.meta.numel()):
            raise Unseen
        if alpha.score.kind == "gatv2" and alpha.score.of["ends"].parts["j"] is not values:
            raise Unseen  # the kernel's values are its keys

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        if name not in _VIEWS:
            raise Unseen
        found = Weighted(self.alpha, self.values, self.values.meta)
        function, _ = _with_first(function, self, args)
        found.meta = _applied(function, args, kwargs)
        return found


#: of two stand-ins in one operation the later one here decides
_ORDER = (Param, Node, Ends, Cat, Bent, Product, Score, Alpha, Weighted)
