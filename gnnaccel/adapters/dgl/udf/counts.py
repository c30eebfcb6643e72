"""The in-degree of nodes, as a reduce function reads it off its mailbox.

DGL calls such a function once for each degree, to which the size of a mailbox is a number
(`Degree`). Over all nodes at once it is another number for each of them: it is computed in double
precision, as Python would, and becomes rows of nodes beside messages and results.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnaccel.adapters.tracing import manners
from gnnaccel.adapters.tracing.attention.traced import Param, Value, _call
from gnnaccel.adapters.tracing.code import naming
from gnnaccel.adapters.tracing.nodes.node_values import Given
from gnnaccel.adapters.tracing.nodes.nodes_read import node_rows
from gnnaccel.adapters.tracing.rows import pointwise
from gnnaccel.adapters.tracing.rows.row_count import ROWS
from gnnaccel.adapters.tracing.rows.standins import NUMBERS, Unseen

#: key of a call's arguments: [nodes] in double precision, how many edges enter each
KEY = "n.in-degree"  # selected with the features of nodes
_BESIDE = ("add", "sub", "mul", "div")
_LEAST = math.ulp(0.0)  # stands for: more than 0
#: functions of numbers, by name: torch's, and the least number that has a result
_FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "log": (torch.log, _LEAST), "log2": (torch.log2, _LEAST), "log10": (torch.log10, _LEAST),
    "log1p": (torch.log1p, 0.0), "sqrt": (torch.sqrt, 0.0)}
#: names of such functions
NAMES = frozenset((*_FUNCTIONS, "batch_size"))


class Degree(Value):
    """The degree, or a number made of it: ``make(given)`` computes it for all nodes. ``low``: a
    lower bound; operations that may raise an error in Python, as far as the bound tells, are not
    followed; ``is_size``: whether it is the degree itself."""

    rank = 12

    def __init__(self, make: Callable[[Any], Tensor], low: float, is_size: bool = False):
        self.make, self.low, self.is_size = make, low, is_size

    @staticmethod
    def of_nodes() -> Degree:
        return Degree(node_rows(itemgetter(KEY), "i"), 1.0, True)

    def __getattr__(self, name: str) -> Any:
        raise Unseen

    def _unread(self, *args: Any) -> Any:
        raise Unseen

    size = dim = __getitem__ = _unread  # type: ignore[assignment]  # refuses any arguments
    ndim = property(_unread)

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        tensors = [one for one in args if isinstance(one, Value) and not _is_number(one)]
        if kwargs or not 0 < len(args) < 3:
            raise Unseen
        if tensors:
            if name not in _BESIDE or isinstance(tensors[0], Param):
                raise Unseen
            like = tensors[0].meta
            return _call(name, function, tuple(_rows(one, like) if type(one) is Degree else one
                                               for one in args), {})
        if getattr(function, "__module__", None) != "_operator" or name not in _BOUNDS:
            raise Unseen
        if not all(_is_number(one) or type(one) in NUMBERS for one in args):
            raise Unseen

        def make(given: Any) -> Tensor:
            return function(*[_now(one, given) for one in args])

        return Degree(make, _BOUNDS[name](*args))


def _is_number(value: Any) -> bool:
    """Whether ``value`` is a degree, or a tensor of one number that the layer holds."""
    return type(value) is Degree or isinstance(value, Param) and value.meta.dim() == 0


def _now(value: Any, given: Any) -> Any:
    if isinstance(value, Param):
        return value.make(given).double()
    return value.make(given) if type(value) is Degree else value


def _rows(degree: Degree, like: Tensor) -> Given:
    """Rows of nodes with the dtype and number of dimensions of ``like``."""
    if like.dtype not in (torch.float32, torch.float64):
        raise Unseen
    ones, dtype = (1,) * (like.dim() - 1), like.dtype

    def make(given: Any) -> Tensor:
        return degree.make(given).to(dtype).view(-1, *ones)

    return Given(pointwise.rows("i", make, like.new_empty(ROWS, *ones), KEY), make)


# --- bounds below ---------------------------------------------------------------------------------

def _low(value: Any) -> float:
    if type(value) in NUMBERS:
        return float(value)
    return value.low if type(value) is Degree else -math.inf


def _sum(left: Any, right: Any) -> float:
    return _low(left) + _low(right)


def _difference(left: Any, right: Any) -> float:
    return _low(left) - right if type(right) in NUMBERS else -math.inf


def _product(left: Any, right: Any) -> float:
    return _low(left) * _low(right) if min(_low(left), _low(right)) > 0 else -math.inf


def _quotient(left: Any, right: Any) -> float:
    if isinstance(right, Param):  # torch divides, by 0 too
        return -math.inf
    if type(right) in NUMBERS and right != 0:
        return _low(left) / right if right > 0 else -math.inf
    if _low(right) <= 0 and not isinstance(left, Param):
        raise Unseen
    return _LEAST if _low(left) > 0 else -math.inf


def _power(base: Any, exponent: Any) -> float:
    if type(exponent) not in NUMBERS or type(base) is not Degree or base.low <= 0 or (
        abs(exponent) > 8):
        raise Unseen
    return base.low ** exponent if exponent >= 0 else _LEAST


def _negative(value: Any) -> float:
    return -math.inf


_BOUNDS: dict[str, Callable[..., float]] = {
    "add": _sum, "sub": _difference, "mul": _product, "div": _quotient, "pow": _power,
    "neg": _negative}


# --- functions of numbers -------------------------------------------------------------------------

class Functions:
    """Stand-ins of global values in functions that a layer's functions call."""

    def __init__(self, layer: Any):
        self._names, self._watched = layer._traced_manner.names, layer._traced_watched

    def imported(self, name: str) -> None:
        """Functions here may import nothing by themselves."""

    def instead(self, value: Any) -> Any:
        if any(value is one for one in naming.STOOD_FOR):
            return naming.Torch(value, self._names)
        if value is math or value is np:
            return _Mathematics(value, self._watched)
        return manners.instead_of(value)


class _Mathematics:
    """Stand-in of ``math`` or numpy, of which functions of numbers may be called; ``watched`` lists
    the values read of it."""

    def __init__(self, module: Any, watched: list):
        self._traced_module, self._traced_watched = module, watched

    def __getattr__(self, name: str) -> Any:
        place = vars(self._traced_module)
        if name not in place:
            raise Unseen
        value = place[name]
        self._traced_watched.append((place, name, value))
        if type(value) in NUMBERS:
            return value
        if self._traced_module is not math and (name not in _FUNCTIONS
                                                or type(value) is not np.ufunc):
            raise Unseen

        def called(*args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and type(args[0]) is Degree and not kwargs:
                return _of_degree(name, args[0])
            if not all(type(one) in NUMBERS for one in (*args, *kwargs.values())):
                raise Unseen
            return value(*args, **kwargs)

        return called


def _of_degree(name: str, degree: Degree) -> Degree:
    if name not in _FUNCTIONS or degree.low < _FUNCTIONS[name][1]:
        raise Unseen
    function = _FUNCTIONS[name][0]
    low = float(function(torch.tensor(degree.low, dtype=torch.float64, device="cpu")))
    return Degree(lambda given: function(degree.make(given)), low)
