"""Views and pieces of rows while a ``message`` of pointwise operations is traced, and rows without
gradients."""
from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.tracing.attention.traced import Make, Param, applied
from gnnaccel.adapters.tracing.expressed import Once, numbered, reshaped
from gnnaccel.adapters.tracing.rows.pointwise import Rows
from gnnaccel.adapters.tracing.rows.row_count import ROWS
from gnnaccel.adapters.tracing.rows.standins import Unseen
from gnnaccel.dispatch.generated.cut import without_gradient
from gnnaccel.dispatch.generated.operations import Pieces
from gnnaccel.dispatch.generated.tree import Leaf, Tail, mapped
from gnnaccel.dispatch.run.autograd import wants_grad

Place = tuple[int, int]  # the first number of a piece, and the one behind the last


def viewed(value: Rows, meta: Tensor) -> Rows:
    """Rows in another shape. Of a sum of rows and fewer numbers these are repeated in blocks."""
    old, new = tuple(value.meta.shape[1:]), tuple(meta.shape[1:])
    if meta.dim() == 0 or meta.shape[0] != ROWS:
        raise Unseen
    return Rows(reshaped(value.tree, old, new), meta)


def piece(value: Rows, function: Callable, args: tuple, kwargs: dict) -> Rows:
    """Some of the channels."""
    place = args[1] if type(args[1]) is tuple else (args[1],)
    if not place or not (place[0] is Ellipsis or place[0] == slice(None)) or any(
        type(one) not in (int, slice, type(None), type(Ellipsis)) for one in place):
        raise Unseen
    meta = applied(function, args, kwargs)
    if meta.numel() == value.meta.numel():  # nothing but new axes
        return viewed(value, meta)
    return cut(value, meta, lambda t: function(t, *args[1:], **kwargs), repr(place))


def several(value: Rows, function: Callable, args: tuple, kwargs: dict) -> tuple[Rows, ...]:
    dims = [kwargs["dim"]] if "dim" in kwargs else list(args[-1:])
    if dims != [-1] and dims != [value.meta.dim() - 1]:
        raise Unseen
    metas = function(value.meta, *args[1:], **kwargs)
    return tuple(cut(value, meta, lambda t: function(t, *args[1:], **kwargs),
                     repr((function.__name__, args[1:], kwargs)), k)
                 for k, meta in enumerate(metas))


def detached(value: Any) -> Any:
    """``value`` without gradients."""
    if type(value) is tuple:
        return tuple(map(detached, value))
    value = value.alone()
    return Rows(mapped(value.tree, _still), value.meta)


def recorded(value: Any) -> Any:
    """``value`` as autograd records it where it was made: without gradients, where these are
    off."""
    if torch.is_grad_enabled():
        return value
    if isinstance(value, Param):
        return value.detached()
    return detached(value) if isinstance(value, Rows) else value  # which sees to it by itself


def _still(leaf: Leaf) -> Leaf:
    if not isinstance(leaf.base, Leaf):  # of a parameter
        return without_gradient(leaf, None)
    base = leaf.pieces.get("still")
    if base is None:
        base = leaf.pieces["still"] = without_gradient(leaf.base, None)
    return base if leaf is leaf.base else without_gradient(leaf, base)


def cut(value: Rows, meta: Tensor, function: Callable[[Tensor], Any], key: str,
        at: int | None = None) -> Rows:
    """One piece of every leaf, by ``function``, named ``key``; of several, number ``at``."""
    old, new = tuple(value.meta.shape[1:]), tuple(meta.shape[1:])

    def piece(leaf: Leaf) -> Leaf:
        if leaf.blocks or (leaf.tail != old and math.prod(leaf.tail) != 1):
            raise Unseen
        if math.prod(leaf.tail) == 1:
            return leaf.viewed((1,) * len(new))
        return of_leaf(leaf, function, old, new, key, at)

    return Rows(mapped(value.tree, piece), meta)


def of_leaf(leaf: Leaf, function: Callable[[Tensor], Any], old: Tail, new: Tail, key: str,
            at: int | None = None) -> Leaf:
    """The piece of a leaf whose rows have the shape ``old``; ``new``: that of the piece's."""
    pieces = leaf.pieces
    if (old, key, at) in pieces:  # another tensor for the host, which users' gradients tell apart
        return pieces[old, key, at].viewed(new)

    def make(given: Any) -> Any:
        t = leaf.make(given)
        return function(t.reshape(1 if leaf.end == "p" else t.shape[0], *old))

    place = None if leaf.end == "p" else _place(function, old, at)
    make_piece: Make = make
    if place is not None:
        make_piece = pieces.setdefault("in place", _Cut(leaf, math.prod(old))).piece(place)
    elif at is not None:
        make_piece = partial(numbered, pieces.setdefault((old, key), Once(make)), at)
    pieces[old, key, at] = found = Leaf(leaf.end, make_piece, new, leaf.names, leaf.roots,
                                        cut=place is not None)
    return found


def _place(function: Callable[[Tensor], Any], shape: Tail, at: int | None) -> Place | None:
    """Where a piece of rows of this shape is, if it is numbers that lie one after the other, and no
    copy of them."""
    # two rows: memory of one may be in several orders at once
    rows = torch.arange(2 * math.prod(shape), device="cpu").view(2, *shape)
    piece = function(rows)
    piece = piece if at is None else piece[at]
    if piece.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr():
        return None  # in an order that kernels can read
    found = piece[0].flatten().tolist()
    if not found or found != list(range(found[0], found[0] + len(found))):
        return None
    return found[0], found[0] + len(found)


class _Cut(Once):
    """All pieces that are cut out of the rows of a leaf, so that these get one gradient."""

    def __init__(self, leaf: Leaf, numbers: int):
        self.places: list[Place] = []

        def make(given: Any) -> tuple[Tensor, ...]:
            t = leaf.make(given)
            rows, places = t.reshape(t.shape[0], numbers), tuple(self.places)
            if wants_grad(rows):
                return Pieces(places).apply(rows)
            return tuple([rows[:, begin:end] for begin, end in places])

        super().__init__(make)

    def piece(self, place: Place) -> Make:
        """What makes the piece at ``place``."""
        if place not in self.places:
            self.places.append(place)
        return partial(numbered, self, self.places.index(place))
