"""Whole numbers and truth values of edges or nodes in a message, such as the kinds of edges.

Kernels take floats. What is made of whole numbers alone, torch computes where they are, as exactly
as for the host. Beside floats they become floats as torch makes them, and truth values are floats
that are not 0. Numbers that a message makes of truth values, as by ``(x_j > 0) * 1``, are floats
throughout, whatever torch's dtype.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.tracing.attention.traced import Param, Value, applied, name_of
from gnnaccel.adapters.tracing.expressed import Once
from gnnaccel.adapters.tracing.rows.channels import ends
from gnnaccel.adapters.tracing.rows.pointwise import (TRUTH, WHOLE, Rows, about, made_rows, tree_of,
                                                      whole)
from gnnaccel.adapters.tracing.rows.pointwise_calls import OPERATIONS, of_truth
from gnnaccel.adapters.tracing.rows.standins import Unseen
from gnnaccel.dispatch.generated.cut import make_without_gradient
from gnnaccel.dispatch.generated.tree import Call, Leaf, Number, leaves


def calculated(name: str, function: Callable, args: tuple, kwargs: dict) -> Rows:
    """An operation number by number, on rows, parameters and numbers."""
    meta = applied(function, args, kwargs)
    stand_ins = [one for one in (*args, *kwargs.values()) if isinstance(one, Value)]
    if any(map(_is_whole, stand_ins)):
        if not any(one.meta.is_floating_point() for one in stand_ins):
            if len(set().union(*[ends(one) for one in stand_ins if isinstance(one, Rows)])) > 1:
                args = tuple(map(taken, args))
                kwargs = {k: taken(one) for k, one in kwargs.items()}
            return by_torch(function, args, kwargs, meta)
        args = tuple(map(_beside_floats, args))
        kwargs = {k: _beside_floats(one) for k, one in kwargs.items()}
    if meta.is_floating_point() and any(
        [isinstance(one, Rows) and one.meta.is_floating_point() and one.meta.dtype != meta.dtype
         for one in stand_ins]):
        raise Unseen  # the host converts, kernels take one dtype
    name = of_truth(name, meta, args)
    return Rows(OPERATIONS[name](function, tuple(tree_of(a, meta) for a in args),
                                 {k: tree_of(v, meta) for k, v in kwargs.items()}), meta)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Rows) and any(WHOLE in leaf.names for leaf in leaves(value.tree)) and (
        not value.meta.is_floating_point() and value.meta.dtype != torch.bool)


def taken(value: Any) -> Any:
    """Rows of nodes as rows of the edges, which torch picks: in kernels they would be floats."""
    if not isinstance(value, Rows) or ends(value) <= {"e"}:
        return value
    tree, tail = value.tree, value.meta.shape[1:]
    end, names, roots = about(tree)

    def make(given: Any) -> Tensor:
        return whole(tree, tail, given)[given.graph.index("v" if end == "i" else "u")]

    # arguments of nodes are none of the edges
    names = frozenset(one for one in names if type(one) is not str)
    return made_rows("e", Once(make), value.meta, names, roots)


def _beside_floats(value: Any) -> Any:
    return kept(value, value.meta.float()) if _is_whole(value) else value


def by_torch(function: Callable, args: tuple, kwargs: dict, meta: Tensor) -> Rows:
    """Result of a function, row by row and without gradients, of rows at one end."""
    operands = (*args, *kwargs.values())
    rows = [one for one in operands if isinstance(one, Rows)]
    truth, pieces, key = meta.dtype == torch.bool, {}, None
    if truth and len(rows) == 1 and type(rows[0].tree) is Leaf and not kwargs and all(
        one is rows[0] or type(one) is int for one in args):
        # of the same question, asked again, there is one answer
        pieces = rows[0].tree.pieces
        key = ("asked", name_of(function), tuple([None if one is rows[0] else one for one in args]),
               tuple(meta.shape))
        if key in pieces:
            return is_true(Rows(pieces[key], meta))
    parameters = [root for one in operands if isinstance(one, Param) for root in one.roots]
    end, names, roots = about(*[one.tree for one in rows])
    args, kwargs = tuple(map(_as_they_are, args)), {k: _as_they_are(one)
                                                    for k, one in kwargs.items()}

    def make(given: Any) -> Tensor:
        with torch.no_grad():
            values = function(*(_now(one, given) for one in args),
                              **{k: _now(one, given) for k, one in kwargs.items()})
        return values.float() if truth else values

    names = names | {TRUTH} if truth else names
    result = made_rows(end, make, meta, names, tuple(map(make_without_gradient,
                                                         (*roots, *parameters))))
    if key is not None:
        pieces[key] = result.tree
    return is_true(result) if truth else result


def _as_they_are(value: Any) -> Any:
    """An operand, as what it was made for may be changed in place afterwards."""
    return Rows(value.tree, value.meta) if isinstance(value, Rows) else value


def _now(value: Any, given: Any) -> Any:
    if isinstance(value, Rows):
        return whole(value.tree, value.meta.shape[1:], given).to(value.meta.dtype)
    return value.make(given) if isinstance(value, Param) else value


def is_true(rows: Rows) -> Rows:
    """The truth values that rows of zeros and ones stand for."""
    return Rows(Call("ne", (rows.tree, Number(0.0))), rows.meta)


def of_caller(rows: Rows) -> Rows:
    """Stand-in for an argument of truth values."""
    return by_torch(lambda values: values, (rows,), {}, rows.meta)


def kept(value: Rows, meta: Tensor) -> Rows:
    """``value`` in another dtype; of truth values zeros and ones."""
    before, after = value.meta.dtype, meta.dtype
    if before == torch.bool and after in (torch.float32, torch.int64, torch.int32):
        return Rows(Call("float", (value.tree,)), meta)
    if not before.is_floating_point and after == torch.float32 and not _is_whole(value):
        return Rows(value.tree, meta)
    if after.is_floating_point and (before.is_floating_point or after != torch.float32):
        raise Unseen
    return by_torch(Tensor.to, (value, after), {}, meta)
