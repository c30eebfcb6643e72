"""Virtual graphs of relational layers, of which more is known than of a caller's edges."""
from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.cuda.structure import Rows, split_rows
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.relational.pairs import Blocks


class BetweenRows(GraphView):
    """A `GraphView` of edges given as sources and destinations, [E] int32 each, which it keeps: no
    copy of both as one array."""

    _kept: tuple[Tensor, Tensor]
    _complete = True  # relations and ids were checked

    def __init__(self, src: Tensor, dst: Tensor, num_src: int, num_dst: int):
        super().__init__(src, num_src, num_dst, num_edges=src.shape[0])
        self._kept = src, dst

    def _ends(self) -> tuple[Tensor, Tensor]:
        return self._kept


class OfBlocks(GraphView):
    """The edges from each node of ``blocks`` to its type, by which they are grouped already."""

    _complete = True

    def __init__(self, blocks: Blocks):
        super().__init__(blocks.ptr, blocks.count, blocks.ptr.shape[0] - 1, num_edges=blocks.count)
        self._blocks = blocks

    def _nodes(self) -> Tensor:
        return torch.arange(self.num_src, dtype=torch.int32, device=self.device)

    def _ends(self) -> tuple[Tensor, Tensor]:
        return self._nodes(), self._blocks.relation

    def _grouped(self, places: bool) -> Rows:
        ptr, nodes = self._blocks.ptr, self._nodes()
        return Rows(ptr, nodes, nodes, split_rows(ptr, self.num_src))
