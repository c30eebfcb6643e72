"""Stand-ins for the arguments of a ``message`` while it is looked through: each knows what it is
made of, and refuses all else.
"""
from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnaccel.dispatch.ops.messages import Gated, More, Rectified, Shifted
from gnnaccel.dispatch.policy.reasons import Reason

#: methods of tensors of the edges; pure, one row per edge in and out
METHODS = frozenset(("view", "reshape", "unsqueeze", "squeeze", "sigmoid", "tanh", "relu", "exp",
                     "abs", "neg", "mul", "to", "float"))
FUNCTIONS = {torch.mul: operator.mul, torch.multiply: operator.mul, torch.add: operator.add,
             torch.sub: operator.sub, torch.relu: operator.methodcaller("relu"),
             torch.nn.functional.relu: operator.methodcaller("relu"),
             torch.sigmoid: operator.methodcaller("sigmoid")}
#: numbers as messages have them; what `np.sqrt` gives is a float, too
NUMBERS = (int, float, bool, np.float64)
Arguments = dict[str, Any]  # of propagate


class Form(NamedTuple):
    """The parts of a message. ``source``: the argument of ``propagate`` whose rows are gathered at
    the source; ``weight(arguments)``: factors of these, one row per edge; ``apply(rows)``: an
    operation on each row before; ``more(arguments, layer)``: other parts of a message; each None
    for nothing. ``ends``: other arguments that are features of nodes, used or not, each with its
    end of the edge, "i" or "j". ``costly``: ``more`` computes something of the size of the edges'
    features. ``width``: the channels that rows then have, where ``more`` makes those too: ``(rows,
    more)``, or says why not. ``stand_in(arguments, graph)``: what looks like ``more`` and computes
    nothing, for messages that kernels are written for, or why these are none. ``summed``: it is a
    form for sums and means alone. ``of_edges``: nothing is gathered at the source, and ``source``
    belongs to edges. ``stacked``: nodes are in another dimension than the first; None where
    ``source`` tells. ``alike(layer, arguments, graph, whole)``: whether a call of the same kinds
    and widths of arguments over another graph has this form, too; if not ``whole``, but for what
    ``more`` looks at anyway; if it is None, of one whose arguments were `described` alike, over
    the same edges; None where each has. ``known``: the layer's class as it reduces these
    messages, where it does so in another way than its own."""

    source: str
    weight: Callable[[Arguments], Tensor] | None
    apply: Callable[[Tensor], Tensor] | None = None
    more: Callable[[Arguments, Any], More | tuple[Tensor, More] | Reason] | None = None
    ends: tuple[tuple[str, str], ...] = ()
    costly: bool = False
    width: int | None = None
    stand_in: Callable[[Arguments, Any], More | Reason] | None = None
    summed: bool = False
    of_edges: bool = False
    stacked: bool | None = None
    alike: Callable[[Any, Arguments, Any, bool | None], bool] | None = None
    known: Any = None

    @property
    def unfinished(self) -> bool:
        """Whether there is something to compute once a call is not native."""
        return self.costly or self.apply is not None


def rows(arguments: Arguments, name: str, end: str) -> Any:
    """Features by node, those of the source ("j") or of the destination ("i"); of a pair its first
    or second."""
    features = arguments[name]
    return features[end == "i"] if isinstance(features, (tuple, list)) else features


class Unseen(Exception):
    """The message does something that is not followed."""


class Refuses:
    """Stand-in for an argument that a message may be given but not use."""

    def __getattribute__(self, name: str) -> Any:
        raise Unseen

    def __setattr__(self, name: str, value: Any) -> None:
        raise Unseen

    def __bool__(self) -> bool:
        raise Unseen


class Edge:
    """Something per edge; ``make(arguments)`` computes it."""

    def __init__(self, make: Callable[[dict[str, Any]], Tensor]):
        self.make = make

    def __getattr__(self, name: str) -> Callable:
        if name not in METHODS:
            raise Unseen

        def method(*args: Any, **kwargs: Any) -> Any:
            if name == "mul" and len(args) == 1 and not kwargs:
                return self * args[0]
            if any(isinstance(a, (Edge, Rows, Refuses)) for a in (*args, *kwargs.values())):
                raise Unseen
            return Edge(lambda given: getattr(self.make(given), name)(*args, **kwargs))

        return method

    def __getitem__(self, place: Any) -> Edge:
        if place not in ((slice(None), None), (Ellipsis, None), (slice(None), None, None)):
            raise Unseen
        return Edge(lambda given: self.make(given)[place])

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, (Source, Sum)):
            return other * self
        if isinstance(other, Edge):
            return Edge(lambda given: self.make(given) * other.make(given))
        if type(other) in (int, float):
            return Edge(lambda given: self.make(given) * other)
        raise Unseen

    __rmul__ = __mul__

    def __imul__(self, other: Any) -> Any:  # would change the caller's tensor
        raise Unseen

    __iadd__ = __isub__ = __imul__

    def __add__(self, other: Any) -> Any:
        return Sum(edge=self) + other

    def __sub__(self, other: Any) -> Any:
        return Sum(edge=self) - other

    def __neg__(self) -> Edge:
        return Edge(lambda given: -self.make(given))

    def __bool__(self) -> bool:
        raise Unseen

    @classmethod
    def __torch_function__(cls, function, types_, args=(), kwargs=None):
        if kwargs not in (None, {}, {"inplace": False}) or function not in FUNCTIONS:
            raise Unseen
        return FUNCTIONS[function](*args)


class Rows:
    """Stand-in for features of nodes, or for something made of them: refuses what it does not
    know."""

    def __getattr__(self, name: str) -> Any:
        raise Unseen

    def __bool__(self) -> bool:
        raise Unseen

    def __mul__(self, other: Any) -> Any:
        raise Unseen

    def __add__(self, other: Any) -> Any:
        raise Unseen

    def __sub__(self, other: Any) -> Any:
        return self + -other

    def __rmul__(self, other: Any) -> Any:
        return self * other

    def __radd__(self, other: Any) -> Any:
        return self + other

    def __imul__(self, other: Any) -> Any:
        return self._left() * other

    def __iadd__(self, other: Any) -> Any:
        return self._left() + other

    def __isub__(self, other: Any) -> Any:
        return self._left() - other

    def _left(self) -> Rows:
        """A copy of it before it changed in place. Others that hold it, under another name or as a
        part of a sum, may use it no more."""
        before = object.__new__(type(self))
        before.__dict__.update(self.__dict__)
        self.__class__ = Changed
        return before

    def mul(self, other: Any) -> Any:
        return self * other

    def add(self, other: Any) -> Any:
        return self + other

    def sub(self, other: Any) -> Any:
        return self - other

    def form(self) -> Form | None:
        """Form of a message that returns this; None for none."""
        return None

    __torch_function__ = Edge.__torch_function__


class Changed(Rows):
    """Rows that were changed in place, in the hands of whoever had them before."""

    def __getattribute__(self, name: str) -> Any:
        raise Unseen


class Source(Rows):
    """Features gathered at the source, after ``steps`` that each make a row of a row, times
    ``weight`` if that is not None."""

    def __init__(self, name: str, weight: Edge | None = None,
                 steps: tuple[Callable[[Tensor], Tensor], ...] = ()):
        self.name, self.weight, self.steps = name, weight, steps

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, Gate):
            return other * self
        if not isinstance(other, Edge):
            raise Unseen
        return Source(self.name, other if self.weight is None else self.weight * other, self.steps)

    def __add__(self, other: Any) -> Any:
        if type(other) in (int, float) and self.weight is None:
            return Source(self.name, None, (*self.steps, lambda x: x + other))
        return Sum(source=self) + other

    def __neg__(self) -> Source:
        if self.weight is not None:
            raise Unseen
        return Source(self.name, None, (*self.steps, Tensor.neg))

    def relu(self) -> Source:
        if self.weight is not None:
            raise Unseen
        return Source(self.name, None, (*self.steps, Tensor.relu))

    def form(self) -> Form:
        steps = self.steps

        def apply(x: Tensor) -> Tensor:
            for step in steps:
                x = step(x)
            return x

        return Form(self.name, None if self.weight is None else self.weight.make,
                    apply if steps else None)


class Target(Rows):
    """Features of the node that receives."""

    def __init__(self, name: str):
        self.name = name

    def __add__(self, other: Any) -> Any:
        return Sum(target=self) + other

    def __neg__(self) -> Any:
        return Sum(target=self, sign=-1.0)


class Sum(Rows):
    """At most one each of a source, a target times ``sign`` and something per edge, added up; times
    ``weight`` if not None."""

    def __init__(self, source: Source | None = None, target: Target | None = None,
                 sign: float = 1.0, edge: Edge | None = None, weight: Edge | None = None):
        if source is not None and source.weight is not None:
            raise Unseen
        self.source, self.target, self.sign, self.edge, self.weight = (source, target, sign, edge,
                                                                       weight)

    def __add__(self, other: Any) -> Any:
        if type(other) in _TERMS:
            other = Sum(**{_TERMS[type(other)]: other})
        if type(other) is not Sum or self.weight is not None or other.weight is not None:
            raise Unseen
        parts = {}
        for name in ("source", "target", "edge"):
            mine, its = getattr(self, name), getattr(other, name)
            if mine is not None and its is not None:
                raise Unseen
            parts[name] = its if mine is None else mine
        return Sum(sign=self.sign if self.target is not None else other.sign, **parts)

    def __neg__(self) -> Any:
        raise Unseen

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, Edge):
            raise Unseen
        return Sum(self.source, self.target, self.sign, self.edge,
                   other if self.weight is None else self.weight * other)

    def relu(self) -> RectifiedSum:
        if (self.source is None or self.target is not None or self.edge is None
            or self.weight is not None):
            raise Unseen
        return RectifiedSum(self.source, self.edge)

    def sigmoid(self) -> Gate:
        if (self.source is None or self.target is None or self.source.steps or self.sign != 1.0
            or self.weight is not None):
            raise Unseen
        return Gate(self.source.name, self.target.name, self.edge)

    def _cancels(self) -> bool:
        """Whether it is a difference of both ends' rows of the same features.

        Neighbours are often alike, and the two sums into which such a message would be split are
        then far larger than their difference, which they leave to rounding.
        """
        assert self.source is not None and self.target is not None
        negated = self.source.steps.count(Tensor.neg) % 2 == 1
        return self.source.name == self.target.name and (self.sign < 0) is not negated

    def form(self) -> Form | None:
        if self.source is None or self.target is None or self.edge is not None or self._cancels():
            return None
        name, sign = self.target.name, self.sign
        weight = None if self.weight is None else self.weight.make
        return self.source.form()._replace(weight=weight, summed=True, more=lambda given,
                                           layer: Shifted(rows(given, name, "i"), sign))


_TERMS = {Source: "source", Target: "target", Edge: "edge"}


class RectifiedSum(Rows):
    """relu(x_j + e) + constant."""

    def __init__(self, source: Source, edge: Edge, constant: float = 0.0):
        self.source, self.edge, self.constant = source, edge, constant

    def __add__(self, other: Any) -> Any:
        if type(other) not in (int, float):
            raise Unseen
        return RectifiedSum(self.source, self.edge, self.constant + other)

    def form(self) -> Form:
        make, constant = self.edge.make, self.constant
        return self.source.form()._replace(more=lambda given,
                                           layer: Rectified(make(given), constant))


class Gate(Rows):
    """The sigmoid of features of both ends, and of the edge where there are any; ``times`` a
    source, it is a message."""

    def __init__(self, left: str, right: str, edge: Edge | None, times: Source | None = None):
        self.left, self.right, self.edge, self.times = left, right, edge, times

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, Source) or other.weight is not None or self.times is not None:
            raise Unseen
        return Gate(self.left, self.right, self.edge, other)

    def form(self) -> Form | None:
        if self.times is None:
            return None
        left, right, make = self.left, self.right, None if self.edge is None else self.edge.make

        def more(arguments: Arguments, layer: Any) -> Gated:
            return Gated(rows(arguments, left, "j"), rows(arguments, right, "i"),
                         None if make is None else make(arguments))

        return self.times.form()._replace(more=more)
