"""Stand-ins for rows of the edges that a mask chooses, as of those of one kind, and for what
messages ask of masks.

The rows are computed for all edges, and the kernels take them where the mask is true. So that the
others leave no trace in gradients, nothing may be done to chosen rows that makes numbers infinite,
and in each call they, and the parameters that they meet, are held to be far from that.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.tracing.attention.traced import VIEWS, Param, Value, _call
from gnnaccel.adapters.tracing.expressed import KIND
from gnnaccel.adapters.tracing.layer import conditions, devices
from gnnaccel.adapters.tracing.noted import notes
from gnnaccel.adapters.tracing.rows import bounded, channels, constants
from gnnaccel.adapters.tracing.rows.pieces import recorded
from gnnaccel.adapters.tracing.rows.pointwise import MAPS, NODES_TOO, TRUTH, WHOLE, Rows, whole
from gnnaccel.adapters.tracing.rows.products import product
from gnnaccel.adapters.tracing.rows.row_count import ROWS, RowCount
from gnnaccel.adapters.tracing.rows.specials import DEVICE
from gnnaccel.adapters.tracing.rows.standins import NUMBERS, Unseen
from gnnaccel.adapters.tracing.rows.whole_numbers import calculated
from gnnaccel.dispatch.generated.tree import Call, Leaf, Number, Tree, leaves, mapped

#: what may be done to chosen rows
_NAMES = bounded.TAME | VIEWS | MAPS | {"layer_norm", "sum", "mean", "softmax", "getitem", "chunk",
                                 "split", "unbind", "transpose", "permute", "float", "to", "clone"}


def mask_of(place: Any) -> Rows | None:
    """The mask by which an index chooses rows; None for other indices."""
    if type(place) is tuple and len(place) > 1 and all(
        one is Ellipsis or type(one) is slice and one == slice(None) for one in place[1:]):
        place = place[0]
    if isinstance(place, Places):
        return place.mask if place.flat else None
    return place if isinstance(place, Rows) and place.meta.dtype == torch.bool else None


class EdgeNumbers(Value):
    """Stand-in for the numbers of all edges in their order, `torch.arange` of as many."""

    rank = 16

    def __init__(self) -> None:
        self.meta = torch.empty(ROWS, dtype=torch.int64, device="meta")


def picked(rows: Rows, place: Any) -> Any:
    """``rows[place]``, where that is a mask, or names one of each row's pieces; else None."""
    if type(place) is tuple and type(place[0]) is EdgeNumbers:
        return _piece_of_each(rows, *place[1:])
    mask = mask_of(place)
    return None if mask is None else chosen(rows, mask)


def _piece_of_each(rows: Rows, at: Any = None, *rest: Any) -> Rows:
    """Of each row the piece that ``at`` names, as of all kinds that of the edge's."""
    if not isinstance(at, Rows) or at.meta.dim() != 1 or at.meta.dtype != torch.int64 or any(
        [one is not Ellipsis and one != slice(None) for one in rest]) or (
        len(rest) > rows.meta.dim() - 2):
        raise Unseen
    return recorded(product(lambda rows, at: rows[torch.arange(len(rows), device=rows.device), at],
                            (rows.alone(), at.alone())))


class Chosen(Value):
    """Stand-in for the ``rows`` of the edges for which ``mask`` is true."""

    rank = 14
    device = DEVICE

    def __init__(self, rows: Rows, mask: Rows):
        self.rows, self.mask, self.meta, self.used = rows, mask, rows.meta, False

    def __getattr__(self, name: str) -> Any:
        if name not in _NAMES:
            raise Unseen
        function = getattr(Tensor, name)
        return lambda *args, **kwargs: self.operate(name, function, (self, *args), kwargs)

    @property
    def dtype(self) -> torch.dtype:
        return self.meta.dtype

    def __getitem__(self, place: Any) -> Any:
        return self.operate("getitem", Tensor.__getitem__, (self, place), {})

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        operands = [one for one in (*args, *kwargs.values()) if isinstance(one, Value)]
        if name == "dropout":
            return self._dropped(*args[1:], **kwargs)
        if name == "div" and type(args[1]) in NUMBERS and args[1] and isinstance(args[0], Chosen):
            name = "mul"  # as tame as this
        if not torch.is_grad_enabled() or name not in _NAMES or not self._by_rows(
            name, args, kwargs):
            raise Unseen
        return self._all(lambda inner, named: _call(function.__name__.strip("_"), function, inner,
                                                    named), operands, args, kwargs)

    def _by_rows(self, name: str, args: tuple, kwargs: dict) -> bool:
        """Whether an operation that is given dimensions makes one row of each."""
        if name == "squeeze":  # of all dimensions of one
            return len(args) + len(kwargs) == 2
        if name in ("sum", "mean", "softmax"):
            dim = channels._dim(args, kwargs)
            return type(dim) is int and dim not in (0, -self.meta.dim())
        if name in ("chunk", "split", "unbind"):
            return self.meta.dim() > 1
        return name != "getitem" or isinstance(args[0], Chosen)

    def _all(self, function: Callable, operands: list[Any], args: tuple, kwargs: dict) -> Any:
        """The result for all edges, of which the same are chosen."""
        if not all(isinstance(one, Param) or isinstance(one, Chosen)
                   and one.mask.tree == self.mask.tree for one in operands):
            raise Unseen
        for one in operands:
            one.used = True
            if isinstance(one, Param):
                bounded.hold(*one.roots)
        result = function(tuple(map(_inner, args)), {k: _inner(v) for k, v in kwargs.items()})
        if type(result) is tuple:
            return tuple([self._of(one) for one in result])
        return self._of(result)

    def _of(self, result: Any) -> Chosen:
        if not isinstance(result, Rows):
            raise Unseen
        return Chosen(result, self.mask)

    def _dropped(self, p: float = 0.5, training: bool = True, inplace: bool = False) -> Chosen:
        if training and p:  # as many numbers are drawn as rows are chosen
            raise Unseen
        return self

    def beside(self, tensors: Any, dim: int) -> Any:
        return self._all(lambda inner, named: torch.cat(inner[0], dim), list(tensors),
                         (tuple(tensors),), {})

    def _added(self, name: str, other: Any) -> Chosen:
        """A change in place of rows that nothing was made of yet: they are a copy."""
        if self.used:
            raise Unseen
        result = self.operate(name, getattr(Tensor, name), (self, other), {})
        if result.meta.shape != self.meta.shape or result.meta.dtype != self.meta.dtype:
            raise Unseen
        self.rows, self.used = result.rows, False
        return self

    def __iadd__(self, other: Any) -> Any:
        return self._added("add", other)

    def __isub__(self, other: Any) -> Any:
        return self._added("sub", other)

    def __imul__(self, other: Any) -> Any:
        return self._added("mul", other)


def _inner(value: Any) -> Any:
    if type(value) is tuple and any(isinstance(one, Chosen) for one in value):
        return tuple(map(_inner, value))
    return value.rows if isinstance(value, Chosen) else value


def chosen(value: Rows, mask: Rows) -> Chosen:
    """``value[mask]``."""
    if mask.meta.dim() != 1 or not torch.is_grad_enabled():
        raise Unseen
    bounded.hold_rows(value)
    return Chosen(Rows(value.alone().tree, value.meta), Rows(mask.alone().tree, mask.meta))


def assign(rows: Rows, mask: Rows, value: Any) -> None:
    """``rows[mask] = value``: of the chosen edges other rows, or a number."""
    meta = rows.meta
    if tuple(mask.meta.shape) != tuple(meta.shape[:mask.meta.dim()]):
        raise Unseen
    column: Any = Rows(mask.alone().tree, mask.meta)
    for _ in range(meta.dim() - mask.meta.dim()):
        column = column.unsqueeze(-1)
    if isinstance(value, Chosen):
        if value.mask.tree != mask.alone().tree or value.meta.shape != meta.shape:
            raise Unseen
        inner = value.rows.alone()
        value = Rows(mapped(inner.tree, _of_kind), inner.meta)
    elif not isinstance(value, Param) and type(value) not in NUMBERS:
        raise Unseen
    if isinstance(value, Value) and value.meta.dtype != meta.dtype:
        raise Unseen
    before = Rows(rows.alone().tree, meta)
    result = calculated("where", torch.where, (column, value, before), {})
    if result.meta.shape != meta.shape or result.meta.dtype != meta.dtype:
        raise Unseen
    rows.becomes(Rows(result.tree, meta))


def _of_kind(leaf: Leaf) -> Leaf:
    return Leaf(leaf.end, leaf.make, leaf.tail, leaf.names | {KIND}, leaf.roots, leaf.base,
                leaf.blocks)


# --- what is asked of masks -----------------------------------------------------------------------

def asked(name: str, mask: Rows, args: tuple, kwargs: dict) -> Any:
    """``any``, ``all`` or ``sum`` of a mask, or the places where it is true; None for others."""
    if len(args) != 1 or args[0] is not mask:
        return None
    if name in ("nonzero", "where"):
        apart = name == "where" or kwargs.get("as_tuple", False)
        return (Places(mask, True),) if apart is True else Places(mask, False)
    return None if kwargs else Asked(mask, "all" if name == "all" else "any")


class Places(Value):
    """Stand-in for the numbers of the edges for which a mask is true; ``flat``: without a second
    dimension."""

    rank = 15

    def __init__(self, mask: Rows, flat: bool):
        if mask.meta.dim() != 1:
            raise Unseen
        self.mask, self.flat, self.meta = mask, flat, mask.meta

    def __getattr__(self, name: str) -> Any:
        if name == "shape":
            return (Asked(self.mask, "any"),)
        if name == "numel":
            return lambda: Asked(self.mask, "any")
        if name not in ("squeeze", "view", "reshape", "flatten"):
            raise Unseen

        def flat(*args: Any) -> Places:
            if name == "squeeze" and args not in ((1,), (-1,)) or (
                name in ("view", "reshape") and args != (-1,)) or name == "flatten" and args:
                raise Unseen
            return Places(self.mask, True)

        return flat

    def size(self, dim: Any = None) -> Any:
        if dim != 0:
            raise Unseen
        return self.shape[0]

    def __getitem__(self, place: Any) -> Any:
        if self.flat or place != (slice(None), 0):
            raise Unseen
        return Places(self.mask, True)


def numbers(*sizes: Any, device: Any = None, **options: Any) -> Any:
    """What stands for `torch.arange`: of as many numbers as there are edges, or a constant."""
    if len(sizes) != 1 or type(sizes[0]) is not RowCount:
        return constants.constant(torch.arange, sizes, options, device)
    if not (device is None or devices.named(device)) or (
        options.get("dtype") not in (None, torch.int64) or options.keys() - {"dtype"}):
        raise Unseen
    return EdgeNumbers()


class Asked:
    """Stand-in for a truth value, or for a count of which no more is asked than whether it is
    0."""

    def __init__(self, mask: Rows, of: str):
        self.mask, self.of = mask, of

    def item(self) -> Asked:
        return self

    def __bool__(self) -> bool:
        return answered(self.mask, self.of)

    def _compared(self, other: Any, bound: int) -> bool:
        if self.of != "any" or type(other) is not int or other != bound:
            raise Unseen
        return bool(self)

    def __gt__(self, other: Any) -> bool:
        return self._compared(other, 0)

    def __ne__(self, other: Any) -> bool:
        return self._compared(other, 0)

    def __eq__(self, other: Any) -> bool:
        return not self._compared(other, 0)

    def __le__(self, other: Any) -> bool:
        return not self._compared(other, 0)

    def __ge__(self, other: Any) -> bool:
        return self._compared(other, 1)

    def __lt__(self, other: Any) -> bool:
        return not self._compared(other, 1)

    def _refuses(self, *args: Any) -> Any:
        raise Unseen

    __hash__ = object.__hash__
    __str__ = __repr__ = __format__ = __int__ = __index__ = __float__ = _refuses


def answered(mask: Rows, of: str) -> bool:
    """Whether any, or all, of a mask is true: of arguments of the edges as it is now, of other rows
    whether there is something that is no number, as expected."""
    tree = mask.alone().tree
    if channels.ends(mask) == {"e"} and all(
        type(one) is str or one in (WHOLE, TRUTH, NODES_TOO) for leaf in leaves(tree)
        for one in leaf.names):
        rows, answer = Rows(tree, mask.meta), None
    elif not notes().effects and _is_of_numbers(tree, of):
        numbers = Rows(Call("float", (tree,)), mask.meta.float())
        rows, answer = channels.at_edges(numbers), of == "all"
    else:
        raise Unseen
    tail = rows.meta.shape[1:]

    def make(given: Any) -> Tensor:
        values = whole(rows.tree, tail, given)
        return values.ne(0).all() if of == "all" else values.ne(0).any()

    return conditions.noted(make, answer)


def _is_of_numbers(tree: Tree, of: str) -> bool:
    """Whether it asks for what is no number, or infinite, or that all are finite."""
    if type(tree) is not Call:
        return False
    left, right = tree.args[0], tree.args[-1]
    no_number = tree.op == "ne" and left is right
    bounded = type(left) is Call and left.op == "abs" and right == Number(math.inf)
    return (no_number or bounded and tree.op == "eq") if of == "any" else (
        bounded and tree.op == "lt")
