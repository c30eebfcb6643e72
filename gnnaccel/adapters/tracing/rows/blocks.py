"""Rows of the edges in several blocks each, which lie one below the other: [edges x blocks, ...].
So messages multiply block-diagonal weights that they pick by the kind of an edge."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.tracing.attention.traced import VIEWS, Value, shaped
from gnnaccel.adapters.tracing.rows import channels, pieces, pointwise
from gnnaccel.adapters.tracing.rows.products import product
from gnnaccel.adapters.tracing.rows.row_count import ROWS
from gnnaccel.adapters.tracing.rows.standins import Unseen


def view(rows: pointwise.Rows, meta: Tensor) -> Any:
    """Rows that look like ``meta``, whose first dimension may have several for each edge."""
    count = 0 if meta.dim() == 0 or meta.shape[0] % ROWS else meta.shape[0] // ROWS
    if count < 2:
        try:
            found = pieces.viewed(rows, meta)
        except Unseen:  # of parts in several shapes: they are written for each edge
            found = pieces.viewed(channels.at_edges(rows), meta)
        return rows.sharing(found)
    block_meta = meta.new_empty(ROWS, count, *meta.shape[1:])
    return Blocks(rows.sharing(pieces.viewed(rows, block_meta)), meta)


class Blocks(Value):
    """Stand-in for such rows. ``rows``: [edges, blocks, ...], which look like ``meta`` to the
    message. They may be multiplied with others in as many blocks, and laid side by side again."""

    rank = 13

    def __init__(self, rows: pointwise.Rows, meta: Tensor):
        self.rows, self.meta = rows, meta

    def __getattr__(self, name: str) -> Any:
        if name not in VIEWS and name not in ("bmm", "matmul"):
            raise Unseen
        function = getattr(Tensor, name)
        return lambda *args, **kwargs: self.operate(name, function, (self, *args), kwargs)

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        if not torch.is_grad_enabled():
            raise Unseen  # its result would have no gradient
        meta = shaped(function, args, kwargs)
        if name in VIEWS and args[0] is self:
            # each edge keeps its numbers in their order
            return view(self.rows, meta)
        if name not in ("bmm", "matmul") or not all(isinstance(one, Blocks) for one in args):
            raise Unseen
        # one matrix for each row
        if {one.meta.dim() for one in args} != {3} or len({one.meta.shape[0] for one in args}) > 1:
            raise Unseen
        return Blocks(product(torch.matmul, tuple([one.rows for one in args])), meta)
