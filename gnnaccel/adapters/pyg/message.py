"""What a ``message`` function computes, found out by running it once on stand-ins: a copy of the source's features, or those
times something that belongs to the edge.

Only functions that cannot do anything else are run: their code may name the methods of `_METHODS` and ``torch.mul``, no other
attribute and nothing global. So nothing is missed by not running it again.
"""
from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: of what belongs to edges; pure, one row per edge in and out
_METHODS = frozenset(("view", "reshape", "unsqueeze", "squeeze", "sigmoid", "tanh", "relu", "exp", "abs", "neg", "mul", "to",
                      "float"))
_FUNCTIONS = {torch.mul: "mul", torch.multiply: "mul"}
_NAMES = _METHODS | {"torch", "multiply", "Tensor"}
#: what message passing passes by itself; a message that reads one is none of ours
_SPECIAL = frozenset(("edge_index", "adj_t", "size", "size_i", "size_j", "edge_index_i", "edge_index_j", "ptr", "index",
                      "dim_size"))


class Form(NamedTuple):
    """``source``: the argument of ``propagate`` whose rows are gathered at the source; ``weight(arguments)``: what they are
    multiplied with, one row per edge; None for nothing. ``rows(layer, x)``: what is gathered, made of them row by row; None: they
    themselves."""

    source: str
    weight: Callable[[dict[str, Any]], Tensor] | None
    rows: Callable[[Any, Tensor], Tensor] | None = None


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
            if any(isinstance(a, (_Edge, _Source, _Refuses)) for a in (*args, *kwargs.values())):
                raise _Unseen
            return _Edge(lambda given: getattr(self.make(given), name)(*args, **kwargs))

        return method

    def __getitem__(self, place: Any) -> _Edge:
        if place not in ((slice(None), None), (Ellipsis, None), (slice(None), None, None)):
            raise _Unseen
        return _Edge(lambda given: self.make(given)[place])

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, _Source):
            return other * self
        if isinstance(other, _Edge):
            return _Edge(lambda given: self.make(given) * other.make(given))
        if type(other) in (int, float):
            return _Edge(lambda given: self.make(given) * other)
        raise _Unseen

    __rmul__ = __mul__

    def __imul__(self, other: Any) -> Any:  # would change the caller's tensor
        raise _Unseen

    def __neg__(self) -> _Edge:
        return _Edge(lambda given: -self.make(given))

    def __bool__(self) -> bool:
        raise _Unseen

    @classmethod
    def __torch_function__(cls, function, types_, args=(), kwargs=None):
        if kwargs or function not in _FUNCTIONS or len(args) != 2:
            raise _Unseen
        left, right = args
        return left * right if isinstance(left, (_Edge, _Source)) else right * left


class _Source:
    """Features gathered at the source, times ``weight`` if that is not None."""

    def __init__(self, name: str, weight: _Edge | None = None):
        self.name, self.weight = name, weight

    def __mul__(self, other: Any) -> _Source:
        if not isinstance(other, _Edge):
            raise _Unseen
        return _Source(self.name, other if self.weight is None else self.weight * other)

    __rmul__ = __mul__

    def mul(self, other: Any) -> _Source:
        return self * other

    def __getattr__(self, name: str) -> Any:
        raise _Unseen

    def __bool__(self) -> bool:
        raise _Unseen

    __torch_function__ = _Edge.__torch_function__


def form(function: Any, kinds: dict[str, str]) -> Form | None:
    """What ``function``, the ``message`` of a class, computes when ``propagate`` is called with arguments of these ``kinds``:
    "tensor" (or a pair of them), "none" or "other"; None where that is no form of ours."""
    if type(function) is not types.FunctionType:
        return None
    if _is_gen(function):
        none = kinds.get("edge_attr", "none") == "none"
        return Form("x", None, lambda layer, x: x.relu() + layer.eps) if none and kinds.get("x") == "tensor" else None
    if not _followed(function.__code__):
        return None
    given: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        value = _stand_in(parameter, kinds)
        if value is _Unseen:
            return None
        given[parameter.name] = value
    try:
        out = function(_Refuses(), **given)
    except (_Unseen, TypeError, ValueError, AssertionError):
        return None
    if type(out) is not _Source:
        return None
    return Form(out.name, None if out.weight is None else out.weight.make)


def _followed(code: types.CodeType) -> bool:
    """Whether the code can do nothing but return something of its arguments by way of what the stand-ins know."""
    return (not code.co_freevars and not code.co_cellvars and set(code.co_names) <= _NAMES
            and not any(isinstance(c, types.CodeType) for c in code.co_consts)
            and not code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR))


def _is_gen(function: types.FunctionType) -> bool:
    """Whether this is the message of PyG's GENConv: ``relu(x_j + edge_attr) + eps``."""
    code = function.__code__
    return (function.__module__ == "torch_geometric.nn.conv.gen_conv" and code.co_varnames == ("self", "x_j", "edge_attr", "msg")
            and {"relu", "eps"} <= set(code.co_names) <= {"hasattr", "lin_edge", "size", "relu", "eps", "AssertionError"})


def _stand_in(parameter: inspect.Parameter, kinds: dict[str, str]) -> Any:
    """What the message gets for a parameter; `_Unseen` where that is nothing for us."""
    name = parameter.name
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        return _Unseen
    if name in _SPECIAL:
        return _Unseen if name in ("edge_index", "adj_t") else _Refuses()
    if name[-2:] == "_j" and kinds.get(name[:-2]) == "tensor":
        return _Source(name[:-2])
    if name[-2:] in ("_i", "_j"):
        return _Unseen
    kind = kinds.get(name)
    if kind == "tensor":
        return _Edge(lambda given: given[name])
    if kind == "none" or (kind is None and parameter.default is None):
        return None
    return _Unseen
