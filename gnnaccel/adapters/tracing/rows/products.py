"""Products of several rows in a ``message``, such as of a source's row and a matrix for each edge:
torch computes them, at the nodes where all are at one end, else of rows of the edges."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from gnnaccel.adapters.tracing.attention.traced import Param, Value, applied
from gnnaccel.adapters.tracing.code.function_names import ALONG
from gnnaccel.adapters.tracing.expressed import Once
from gnnaccel.adapters.tracing.nodes.nodes_read import of_read, protected
from gnnaccel.adapters.tracing.rows import channels
from gnnaccel.adapters.tracing.rows.pointwise import Rows, about, made_rows
from gnnaccel.adapters.tracing.rows.standins import Unseen
from gnnaccel.dispatch.generated.tree import Tree


class _Whole(NamedTuple):
    """Rows to compute, of this shape."""

    tree: Tree
    tail: Any


class Pair(NamedTuple):
    """Result of what sorts."""

    values: Rows
    indices: Rows


def by_torch(name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
    """A function of `function_names.BY_TORCH`: of rows at the ends that they are at."""
    if name in ALONG:
        return along(function, args, kwargs, *ALONG[name])
    if name == "conv1d" and getattr(args[0], "meta", args[0]).dim() != 3 or name == "pad" and (
        len(args[1]) > 2 * (args[0].meta.dim() - 1)):  # the rows
        raise Unseen
    if name == "rms_norm":
        return _rms_norm(function, *args, **kwargs)
    if name == "group_norm":
        return _group_norm(function, *args, **kwargs)
    return product(function, args, kwargs)


def _rms_norm(function: Callable, rows: Any, shape: Any, weight: Any = None,
              eps: Any = None) -> Rows:
    if weight is None:
        return product(lambda t: function(t, shape, None, eps), (rows,))
    return product(lambda t, weight: function(t, shape, weight, eps), (rows, weight))


def _group_norm(function: Callable, rows: Any, groups: Any, weight: Any = None, bias: Any = None,
                eps: float = 1e-5) -> Rows:
    if (weight is None) is not (bias is None):
        raise Unseen
    if weight is None:
        return product(lambda t: function(t, groups, None, None, eps), (rows,))
    return product(lambda t, weight, bias: function(t, groups, weight, bias, eps),
                   (rows, weight, bias))


def repeated(function: Callable, args: tuple, kwargs: dict) -> Rows:
    """``repeat`` of channels, of which there are several side by side then."""
    rows, sizes = args[0], args[1:] if len(args) > 2 else args[1]
    if function.__name__ != "repeat" or kwargs or not isinstance(sizes, (tuple, list)) or (
        len(sizes) != rows.meta.dim() or any(type(one) is not int for one in sizes)
        or sizes[0] != 1):
        raise Unseen
    return product(lambda t: t.repeat(*sizes), (rows,))


def along(function: Callable, args: tuple, kwargs: dict, at: int, default: int | None) -> Any:
    """A function along channels. ``at``: the place of the dimension among its arguments."""
    dim = kwargs.get("dim", kwargs.get("dims", args[at] if len(args) > at else default))
    rows, dims = args[0], (tuple(dim) if isinstance(dim, (tuple, list)) else (dim,))
    if not isinstance(rows, Rows) or any(
        type(one) is not int or one in (0, -rows.meta.dim()) for one in dims):
        raise Unseen
    try:
        meta = function(*[getattr(one, "meta", one) for one in args], **kwargs)
    except (RuntimeError, TypeError, IndexError, ValueError):
        raise Unseen from None
    if not isinstance(meta, tuple):
        return product(function, args, kwargs)
    values = product(lambda *one: function(*one, **kwargs)[0], args)
    indices = product(lambda *one: function(*one, **kwargs)[1], args)
    return Pair(values, indices)


def product(function: Callable, args: tuple, kwargs: dict | None = None) -> Rows:
    """torch's ``function`` of rows and parameters, one row of each. ``kwargs``: other arguments."""
    if any(isinstance(one, Value) and not isinstance(one, (Rows, Param)) for one in args) or any(
        isinstance(one, Value) for one in (kwargs or {}).values()):
        raise Unseen
    function = functools.partial(function, **kwargs) if kwargs else function
    meta = applied(function, args, {})
    rows = [one for one in args if isinstance(one, Rows)]
    if len(set().union(*map(channels.ends, rows))) > 1:
        args = tuple([channels.at_edges(one) if isinstance(one, Rows) else one for one in args])
    operands = tuple([_Whole(one.alone().tree, one.meta.shape[1:]) if isinstance(one, Rows) else one
                      for one in args])
    trees = [one.tree for one in operands if type(one) is _Whole]
    end, names, roots = about(*trees)
    roots = (*roots, *(root for one in args if isinstance(one, Param) for root in one.roots))
    of_nodes = roots if end in "ji" else ()

    parameters = [one for one in operands if isinstance(one, Param)]
    wholes = [one for one in operands if type(one) is _Whole]

    def call(*tensors: Tensor) -> Tensor:
        rows, others = iter(tensors), iter(tensors[len(wholes):])
        return function(*[next(rows) if type(one) is _Whole else
                          next(others) if isinstance(one, Param) else one for one in operands])

    run = protected(call, wholes, end)

    def make(given: Any) -> Tensor:
        given = of_read(given, of_nodes)
        return run(given, *[one.make(given) for one in parameters])

    return made_rows(end, Once(make), meta, names, roots)
