"""Key of a compiled attention kernel, whatever its scores."""
from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from gnnaccel.cuda.layout import ROW_TYPES, TYPES, Layout, layout_for


@dataclass(frozen=True)
class RowVariant:
    """Heads x width of a row; ``row``/``out``: dtypes of the gathered rows and of the result;
    ``edge``: there are edge features; ``train``: tensors are saved for backward; ``wide``: int64
    offsets."""

    heads: int
    width: int
    row: torch.dtype
    out: torch.dtype
    edge: bool = False
    dropout: bool = False
    train: bool = False
    wide: bool = False

    @functools.cached_property
    def layout(self) -> Layout:
        return layout_for(self.heads, self.width)

    def defines(self, unroll: int | None = None, **more) -> tuple:
        """``-D`` definitions: the layout's, the common ones, and ``more``."""
        return self.layout.defines(unroll) + self.flags(**more)

    def flags(self, **more) -> tuple:
        """The definitions that do not depend on the layout."""
        flags = dict(ROW_T=ROW_TYPES[self.row], OUT_T=TYPES[self.out],
                     OFF_T="i64" if self.wide else "int", EDGE=int(self.edge),
                     DROPOUT=int(self.dropout), **more)
        return tuple((k, str(v)) for k, v in flags.items())
