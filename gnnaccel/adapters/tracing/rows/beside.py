"""Stand-ins for rows side by side in one of their dimensions, as ``torch.cat`` makes them, or as
code fills columns one after another.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.tracing.attention.traced import applied
from gnnaccel.adapters.tracing.rows import channels, chosen
from gnnaccel.adapters.tracing.rows.linear_maps import map_of
from gnnaccel.adapters.tracing.rows.pointwise import (MAPS, Deferred, Rows, about, hold, made_rows,
                                                      whole)
from gnnaccel.adapters.tracing.rows.standins import NUMBERS, Unseen
from gnnaccel.dispatch.generated.tree import Number


class Beside(Deferred):
    """Rows side by side in the dimension ``along``, ``parts``: one stand-in only where all are at
    one end."""

    def __init__(self, parts: list[Rows], meta: Tensor, dim: int = -1):
        super().__init__(meta)
        self.parts, self.along = hold(parts), dim % meta.dim()

    @property
    def of_channels(self) -> bool:
        """Whether it is the last dimension."""
        return self.along == self.meta.dim() - 1

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        if args[0] is self and torch.is_grad_enabled():
            if name in MAPS and self.of_channels:
                return map_of(self.parts, name, function, args[1:], kwargs)
            if name == "getitem" and self.of_channels and not self.is_made and (
                _keeps_channels(args[1], self.meta.dim())):
                parts = [part[args[1]] for part in self.parts]
                return self.sharing(Beside(parts, applied(function, args, kwargs)))
        return super().operate(name, function, args, kwargs)

    def joined(self) -> Rows:
        dim, rows = self.along, [part for part in self.parts if type(part.tree) is not Number]
        if len(set().union(*map(channels.ends, rows))) > 1:
            rows = [channels.at_edges(part) for part in rows]
        trees = [part.tree for part in rows]
        end, names, roots = about(*trees)
        tails = [part.meta.shape[1:] for part in rows]
        filled = [(part.tree.value, part.meta.shape[1:]) if type(part.tree) is Number else None
                  for part in self.parts]

        def make(given: Any) -> Tensor:
            made = [whole(tree, tail, given) for tree, tail in zip(trees, tails)]
            remaining, first = iter(made), made[0]
            return torch.cat([next(remaining) if number is None
                              else first.new_full((first.shape[0], *number[1]), number[0])
                              for number in filled], dim)

        return made_rows(end, make, self.meta, names, roots)


def _keeps_channels(place: Any, dims: int) -> bool:
    """Whether what is picked has all channels."""
    return (type(place) is tuple and len(place) == dims and place[-1] == slice(None)
            and all(type(one) in (int, slice) for one in place))


def together(tensors: Any, dim: Any) -> Beside:
    """The tensors, all of them rows, as one by `torch.cat`."""
    if not all(isinstance(t, Rows) for t in tensors):
        raise Unseen
    dims = tensors[0].meta.dim()
    if type(dim) is not int or dim % dims == 0:
        raise Unseen
    try:
        meta = torch.cat([t.meta for t in tensors], dim)
    except (RuntimeError, IndexError):
        raise Unseen from None
    parts = [t.alone() for t in tensors]  # of one dtype, as torch makes them
    return Beside([part.kept(part.meta.to(meta.dtype)) for part in parts], meta, dim)


def assign(rows: Rows, place: Any, value: Any) -> None:
    """``rows[place] = value``: ``rows`` are other ones then, of their parts that stay and these.
    Others that lie in their memory may be used no more."""
    if rows.held or not torch.is_grad_enabled() or not rows.meta.is_floating_point():
        raise Unseen
    if 0 in rows.meta.stride():  # several columns are one number in memory
        raise Unseen
    mask = chosen.mask_of(place)
    if mask is not None:
        chosen.assign(rows, mask, value)
        return
    dim, at = _columns(place, tuple(rows.meta.shape))
    slot = rows.meta.narrow(dim, at.start, len(at))
    if type(value) in NUMBERS:
        value = Rows(Number(float(value)), slot)
    if not isinstance(value, Rows) or value.meta.dtype != rows.meta.dtype:
        raise Unseen
    if value.meta.dim() == slot.dim() - 1:  # of one place, given by its number
        value = value.unsqueeze(dim)
    if value.meta.shape != slot.shape:
        raise Unseen
    parts = (rows.parts if type(rows) is Beside and rows.along == dim
             else [Rows(rows.alone().tree, rows.meta)])  # in memory of its own
    after, begin = [], 0
    for part in parts:
        end = begin + part.meta.shape[dim]
        if at.start <= begin and end <= at.stop and not _is_number(part):
            raise Unseen  # what it was made of gets zeros for gradients
        after += [_narrowed(part, dim, 0, at.start - begin),
                  value if begin <= at.start < end else None,
                  _narrowed(part, dim, at.stop - begin, end - begin)]
        begin = end
    filled = Beside([one for one in after if one is not None], rows.meta, dim)
    rows.becomes(filled)


def _is_number(rows: Rows) -> bool:
    """Whether all of the rows are one number."""
    return not isinstance(rows, Deferred) and type(rows.tree) is Number


def _columns(place: Any, shape: tuple[int, ...]) -> tuple[int, range]:
    """The one dimension of which a place has a part, other than that of the rows, and the part."""
    if type(place) is not tuple or not place:
        raise Unseen
    if place[0] is Ellipsis:  # the last ones
        place = (slice(None),) * (len(shape) - len(place) + 1) + place[1:]
    dims = [dim for dim, one in enumerate(place)
            if not (type(one) is slice and one == slice(None))]
    if len(place) > len(shape) or len(dims) != 1 or dims[0] == 0:
        raise Unseen
    dim = dims[0]
    one, length = place[dim], shape[dim]
    if type(one) is int and -length <= one < length:
        return dim, range(one % length, one % length + 1)
    if type(one) is not slice or any(type(n) not in (int, type(None))
                                     for n in (one.start, one.stop, one.step)):
        raise Unseen
    part = range(length)[one]
    if part.step != 1 or not part:
        raise Unseen
    return dim, part


def _narrowed(rows: Rows, dim: int, start: int, stop: int) -> Rows | None:
    """What stays of a part, from ``start`` on and before ``stop``; None for nothing."""
    length = rows.meta.shape[dim]
    start, stop = max(start, 0), min(stop, length)
    if start >= stop:
        return None
    if (start, stop) == (0, length):
        return rows
    return rows[(slice(None),) * dim + (slice(start, stop),)]
