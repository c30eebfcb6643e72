"""What a ``message`` function computes, found out by running it once on stand-ins: a copy of the source's features, or those
times something that belongs to the edge; sums of features of both ends and of the edge, weighted, rectified or as a gate.

Only functions that cannot do anything else are run: their code may name the methods of `_METHODS` and the functions of
`_FUNCTIONS`, no other attribute and nothing global. So nothing is missed by not running it again.
"""
from __future__ import annotations

import inspect
import operator
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.dispatch.ops.messages import Gated, More, Rectified, Shifted

#: of what belongs to edges; pure, one row per edge in and out
_METHODS = frozenset(("view", "reshape", "unsqueeze", "squeeze", "sigmoid", "tanh", "relu", "exp", "abs", "neg", "mul", "to",
                      "float"))
_FUNCTIONS = {torch.mul: operator.mul, torch.multiply: operator.mul, torch.add: operator.add, torch.sub: operator.sub,
              torch.relu: operator.methodcaller("relu"), torch.nn.functional.relu: operator.methodcaller("relu"),
              torch.sigmoid: operator.methodcaller("sigmoid")}
_NAMES = _METHODS | {"torch", "nn", "functional", "F", "multiply", "add", "sub", "Tensor"}
#: what message passing passes by itself; a message that reads one is none of ours
_SPECIAL = frozenset(("edge_index", "adj_t", "size", "size_i", "size_j", "edge_index_i", "edge_index_j", "ptr", "index",
                      "dim_size"))


Arguments = dict[str, Any]  # of propagate


class Form(NamedTuple):
    """``source``: the argument of ``propagate`` whose rows are gathered at the source; ``weight(arguments)``: what they are
    multiplied with, one row per edge; ``apply(rows)``: what becomes of each row before; ``more(arguments, layer)``: what else is
    in a message; each None for nothing. ``ends``: other arguments that are features of nodes, used or not, each with its end of the
    edge, "i" or "j". ``costly``: ``more`` computes something of the size of the edges' features. ``width``: the channels that rows then have,
    where ``more`` makes those too: ``(rows, more)``."""

    source: str
    weight: Callable[[Arguments], Tensor] | None
    apply: Callable[[Tensor], Tensor] | None = None
    more: Callable[[Arguments, Any], More | tuple[Tensor, More]] | None = None
    ends: tuple[tuple[str, str], ...] = ()
    costly: bool = False
    width: int | None = None

    @property
    def unfinished(self) -> bool:
        """Whether there is something to compute once a call is not native."""
        return self.costly or self.apply is not None


def rows(arguments: Arguments, name: str, end: str) -> Any:
    """Features by node, those of the source ("j") or of the destination ("i"); of a pair its first or second."""
    found = arguments[name]
    return found[end == "i"] if isinstance(found, (tuple, list)) else found


class _Unseen(Exception):
    """The message does something that is not followed."""


class _Refuses:
    """Stands for what a message may be given but not use."""

    def __getattribute__(self, name: str) -> Any:
        raise _Unseen

    def __setattr__(self, name: str, value: Any) -> None:
        raise _Unseen

    def __bool__(self) -> bool:
        raise _Unseen


class _Edge:
    """Something per edge; ``make(arguments)`` computes it."""

    def __init__(self, make: Callable[[dict[str, Any]], Tensor]):
        self.make = make

    def __getattr__(self, name: str) -> Callable:
        if name not in _METHODS:
            raise _Unseen

        def method(*args: Any, **kwargs: Any) -> Any:
            if name == "mul" and len(args) == 1 and not kwargs:
                return self * args[0]
            if any(isinstance(a, (_Edge, _Rows, _Refuses)) for a in (*args, *kwargs.values())):
                raise _Unseen
            return _Edge(lambda given: getattr(self.make(given), name)(*args, **kwargs))

        return method

    def __getitem__(self, place: Any) -> _Edge:
        if place not in ((slice(None), None), (Ellipsis, None), (slice(None), None, None)):
            raise _Unseen
        return _Edge(lambda given: self.make(given)[place])

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, (_Source, _Sum)):
            return other * self
        if isinstance(other, _Edge):
            return _Edge(lambda given: self.make(given) * other.make(given))
        if type(other) in (int, float):
            return _Edge(lambda given: self.make(given) * other)
        raise _Unseen

    __rmul__ = __mul__

    def __imul__(self, other: Any) -> Any:  # would change the caller's tensor
        raise _Unseen

    __iadd__ = __isub__ = __imul__

    def __add__(self, other: Any) -> Any:
        return _Sum(edge=self) + other

    def __sub__(self, other: Any) -> Any:
        return _Sum(edge=self) - other

    def __neg__(self) -> _Edge:
        return _Edge(lambda given: -self.make(given))

    def __bool__(self) -> bool:
        raise _Unseen

    @classmethod
    def __torch_function__(cls, function, types_, args=(), kwargs=None):
        if kwargs not in (None, {}, {"inplace": False}) or function not in _FUNCTIONS:
            raise _Unseen
        return _FUNCTIONS[function](*args)


class _Rows:
    """What stands for features of nodes, or for something made of them: refuses what it does not know."""

    def __getattr__(self, name: str) -> Any:
        raise _Unseen

    def __bool__(self) -> bool:
        raise _Unseen

    def __mul__(self, other: Any) -> Any:
        raise _Unseen

    def __add__(self, other: Any) -> Any:
        raise _Unseen

    def __sub__(self, other: Any) -> Any:
        return self + -other

    def __rmul__(self, other: Any) -> Any:
        return self * other

    def __radd__(self, other: Any) -> Any:
        return self + other

    def mul(self, other: Any) -> Any:
        return self * other

    def add(self, other: Any) -> Any:
        return self + other

    def sub(self, other: Any) -> Any:
        return self - other

    def form(self) -> Form | None:
        """What a message is that gives this back."""
        return None

    __torch_function__ = _Edge.__torch_function__


class _Source(_Rows):
    """Features gathered at the source, after ``steps`` that each make a row of a row, times ``weight`` if that is not None."""

    def __init__(self, name: str, weight: _Edge | None = None, steps: tuple[Callable[[Tensor], Tensor], ...] = ()):
        self.name, self.weight, self.steps = name, weight, steps

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, _Gate):
            return other * self
        if not isinstance(other, _Edge):
            raise _Unseen
        return _Source(self.name, other if self.weight is None else self.weight * other, self.steps)

    def __add__(self, other: Any) -> Any:
        if type(other) in (int, float) and self.weight is None:
            return _Source(self.name, None, (*self.steps, lambda x: x + other))
        return _Sum(source=self) + other

    def __neg__(self) -> _Source:
        if self.weight is not None:
            raise _Unseen
        return _Source(self.name, None, (*self.steps, Tensor.neg))

    def relu(self) -> _Source:
        if self.weight is not None:
            raise _Unseen
        return _Source(self.name, None, (*self.steps, Tensor.relu))

    def sigmoid(self) -> Any:
        return _Sum(source=self).sigmoid()

    def form(self) -> Form:
        steps = self.steps

        def apply(x: Tensor) -> Tensor:
            for step in steps:
                x = step(x)
            return x

        return Form(self.name, None if self.weight is None else self.weight.make, apply if steps else None)


class _Target(_Rows):
    """Features of the node that receives."""

    def __init__(self, name: str):
        self.name = name

    def __add__(self, other: Any) -> Any:
        return _Sum(target=self) + other

    def __neg__(self) -> Any:
        return _Sum(target=self, sign=-1.0)


class _Sum(_Rows):
    """At most one each of a source, a target times ``sign`` and something per edge, added up; times ``weight`` if not None."""

    def __init__(self, source: _Source | None = None, target: _Target | None = None, sign: float = 1.0, edge: _Edge | None = None,
                 weight: _Edge | None = None):
        if source is not None and source.weight is not None:
            raise _Unseen
        self.source, self.target, self.sign, self.edge, self.weight = source, target, sign, edge, weight

    def __add__(self, other: Any) -> Any:
        if type(other) in _TERMS:
            other = _Sum(**{_TERMS[type(other)]: other})
        if type(other) is not _Sum or self.weight is not None or other.weight is not None:
            raise _Unseen
        parts = {}
        for name in ("source", "target", "edge"):
            mine, its = getattr(self, name), getattr(other, name)
            if mine is not None and its is not None:
                raise _Unseen
            parts[name] = its if mine is None else mine
        return _Sum(sign=self.sign if self.target is not None else other.sign, **parts)

    def __neg__(self) -> Any:
        raise _Unseen

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, _Edge):
            raise _Unseen
        return _Sum(self.source, self.target, self.sign, self.edge, other if self.weight is None else self.weight * other)

    def relu(self) -> _Rectified:
        if self.source is None or self.target is not None or self.edge is None or self.weight is not None:
            raise _Unseen
        return _Rectified(self.source, self.edge)

    def sigmoid(self) -> _Gate:
        if self.source is None or self.target is None or self.source.steps or self.sign != 1.0 or self.weight is not None:
            raise _Unseen
        return _Gate(self.source.name, self.target.name, self.edge)

    def form(self) -> Form | None:
        if self.source is None or self.target is None or self.edge is not None:
            return None
        name, sign = self.target.name, self.sign
        weight = None if self.weight is None else self.weight.make
        return self.source.form()._replace(weight=weight, more=lambda given, layer: Shifted(rows(given, name, "i"), sign))


_TERMS = {_Source: "source", _Target: "target", _Edge: "edge"}


class _Rectified(_Rows):
    """What `Rectified` says."""

    def __init__(self, source: _Source, edge: _Edge, constant: float = 0.0):
        self.source, self.edge, self.constant = source, edge, constant

    def __add__(self, other: Any) -> Any:
        if type(other) not in (int, float):
            raise _Unseen
        return _Rectified(self.source, self.edge, self.constant + other)

    def form(self) -> Form:
        make, constant = self.edge.make, self.constant
        return self.source.form()._replace(more=lambda given, layer: Rectified(make(given), constant))


class _Gate(_Rows):
    """The sigmoid of features of both ends, and of the edge where there are any; ``times`` a source, it is a message."""

    def __init__(self, left: str, right: str, edge: _Edge | None, times: _Source | None = None):
        self.left, self.right, self.edge, self.times = left, right, edge, times

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, _Source) or other.weight is not None or self.times is not None:
            raise _Unseen
        return _Gate(self.left, self.right, self.edge, other)

    def form(self) -> Form | None:
        if self.times is None:
            return None
        left, right, make = self.left, self.right, None if self.edge is None else self.edge.make

        def more(given: Arguments, layer: Any) -> Gated:
            return Gated(rows(given, left, "j"), rows(given, right, "i"), None if make is None else make(given))

        return self.times.form()._replace(more=more)


def form(function: Any, kinds: dict[str, str]) -> Form | None:
    """What ``function``, the ``message`` of a class, computes when ``propagate`` is called with arguments of these ``kinds``:
    "tensor" (or a pair of them), "none" or "other"; None where that is no form of ours."""
    if type(function) is not types.FunctionType or not _followed(function):
        return None
    given: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        value = _stand_in(parameter, kinds)
        if value is _Unseen:
            return None
        given[parameter.name] = value
    try:
        out = function(_Refuses(), **given)
    except (_Unseen, AttributeError, TypeError, ValueError, AssertionError):
        return None
    found = out.form() if isinstance(out, _Rows) else None
    if found is None:
        return None
    ends = [(name[:-2], name[-1]) for name, value in given.items() if type(value) in (_Source, _Target)]
    return found._replace(ends=tuple(end for end in ends if end != (found.source, "j")))


def _followed(function: types.FunctionType) -> bool:
    """Whether it can do nothing but return something of its arguments by way of what the stand-ins know."""
    code = function.__code__
    if "F" in code.co_names and function.__globals__.get("F") is not torch.nn.functional:
        return False
    return (not code.co_freevars and not code.co_cellvars and set(code.co_names) <= _NAMES
            and not any(isinstance(c, types.CodeType) for c in code.co_consts)
            and not code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR))


def _stand_in(parameter: inspect.Parameter, kinds: dict[str, str]) -> Any:
    """What the message gets for a parameter; `_Unseen` where that is nothing for us."""
    name = parameter.name
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        return _Unseen
    if name in _SPECIAL:
        return _Unseen if name in ("edge_index", "adj_t") else _Refuses()
    if name[-2:] == "_j" and kinds.get(name[:-2]) == "tensor":
        return _Source(name[:-2])
    if name[-2:] == "_i" and kinds.get(name[:-2]) == "tensor":
        return _Target(name[:-2])
    if name[-2:] in ("_i", "_j"):
        return _Unseen
    kind = kinds.get(name)
    if kind == "tensor":
        return _Edge(lambda given: given[name])
    if kind == "none" or (kind is None and parameter.default is None):
        return None
    return _Unseen
