"""What a traced function gives, as messages that kernels are written for."""
from __future__ import annotations

from typing import Any


from gnnaccel.adapters.tracing.expressed import Message, expressed
from gnnaccel.adapters.tracing.rows import beside, channels, linear_maps, pointwise, stacks
from gnnaccel.adapters.tracing.rows.standins import Unseen
from gnnaccel.adapters.tracing.weighted import weighted
from gnnaccel.dispatch.generated.tree import leaves

_MOST_PARTS = 4  # messages side by side, each of which is a kernel


def found(out: Any, layer: Any) -> Message | None:
    if isinstance(out, stacks.Stacked):
        message = found(stacks.message(out, layer), layer)
        return message and message._replace(turned=True)
    if not isinstance(out, pointwise.Rows) or not out.meta.is_floating_point():
        return None
    summed = out.of_sum() if isinstance(out, linear_maps.Mapped) else None
    if summed is not None:
        rows, *maps = summed
        message = _of_rows(rows)
        return message and message._replace(after=(*maps, out.roots, out.meta.shape[1]),
                                            mapped=mapped(out))
    return _of_rows(out.alone())


def side_by_side(rows: pointwise.Rows) -> tuple[Message, ...]:
    """The messages of rows that are several side by side; none where all are at one end, so that
    torch puts them together before, where they are no floats, or where kernels cannot be written
    for one."""
    if type(rows) is not beside.Beside or rows.is_made or len(rows.parts) > _MOST_PARTS or (
        not rows.meta.is_floating_point()
        or len(set().union(*map(channels.ends, rows.parts))) < 2):
        return ()
    try:
        messages = [_of_rows(part.alone()) for part in rows.parts]
    except Unseen:
        return ()
    return () if None in messages else tuple(messages)  # type: ignore[arg-type]  # no None


def _of_rows(rows: pointwise.Rows) -> Message | None:
    shape = tuple(rows.meta.shape[1:])
    if not leaves(rows.tree):
        return None
    message = expressed(rows.tree, shape)
    return message and message._replace(weighted=weighted(rows.tree, shape))


def mapped(out: pointwise.Rows) -> Message | None:
    """A message that ends in a map, as one of rows that were mapped at their ends."""
    try:
        return _of_rows(out.alone())
    except Unseen:
        return None
