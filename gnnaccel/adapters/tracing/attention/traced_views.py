"""What is known of rows of nodes in a traced ``message`` of attention: that they are views of an
argument of ``propagate``, or dots of such with a parameter.

Views need no arithmetic on nodes. A dot with a parameter for each head is the score of GAT, which
its kernels compute while they read the rows. Of a `Node`, ``views`` is the argument's name and the
operations on it, ``product`` rows and the parameter that they were multiplied with, and ``dot`` the
same once that was summed over channels; each None where it is nothing of the kind.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gnnaccel.adapters.tracing.attention.traced import Node, Param, applied, maker
from gnnaccel.adapters.tracing.code.function_names import VIEWS, name_of

_PLAIN = (int, bool, type(None), slice, type(Ellipsis))


def argument_rows(end: str, make: Callable, meta: Any, name: str) -> Node:
    """Rows of the argument ``name`` of ``propagate`` at an ``end``."""
    node = Node(end, make, meta)
    node.views = (name,)
    return node


def of_one(node: Node, function: Callable, args: tuple, kwargs: dict) -> Node:
    """Rows that ``function`` makes of the rows ``node``, one of ``args``."""
    made = Node(node.end, maker(function, args, kwargs), applied(function, args, kwargs))
    name = name_of(function)
    if name in VIEWS or name == "getitem":
        made.dot = node.dot
        rest = (*args[1:], *sorted(kwargs.items()))
        if node.views is not None and args[0] is node and _plain(rest):
            made.views = (*node.views, (name, rest))
    elif name == "mul":
        other = args[1] if args[0] is node else args[0]
        if isinstance(other, Param) and made.meta.shape == node.meta.shape:
            made.product = node, other
    elif name == "sum" and node.product is not None and args[0] is node:
        dims = (*args[1:], *([kwargs["dim"]] if "dim" in kwargs else []))
        if dims[:1] in ((-1,), (node.meta.dim() - 1,)) and "dtype" not in kwargs:
            made.dot = node.product
    elif name == "linear" and args[0] is node:
        weight, bias = (*args[1:], *kwargs.values(), None)[:2]
        if isinstance(weight, Param) and bias is None and weight.meta.shape[0] == 1:
            made.dot = node, weight
    return made


def _plain(value: Any) -> bool:
    """Whether a value is made of numbers and names alone, so that it can be compared."""
    if isinstance(value, (tuple, list)):
        return all(map(_plain, value))
    return isinstance(value, (*_PLAIN, str))
