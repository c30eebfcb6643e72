"""Whether a layer's calls come over the same edges again, or over new ones each time."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.dispatch.graph.tensor_ref import TensorMap, unversioned
from gnnaccel.dispatch.observe.watch import Visit


class EdgesSeen:
    """Of one layer. ``calls``: over edges that could be told apart; ``new``: over a tensor that had
    not come before, or was written to since; ``sizes``: the different numbers of edges."""

    def __init__(self) -> None:
        self.calls = self.new = 0
        self.sizes: set[int] = set()
        self._known: TensorMap[bool] = TensorMap()

    def note(self, visit: Visit) -> None:
        """One more call."""
        edges = _edges((*visit.args, *visit.kwargs.values()))
        if edges is None or unversioned((edges,)):
            return
        self.calls += 1
        self.sizes.add(edges.shape[1])
        if self._known.get(edges) is None:
            self.new += 1
            self._known.set(edges, True)


def _edges(values: Any) -> Tensor | None:
    """The first tensor of ids of shape [2, E]; of a dictionary by types of edges, its first."""
    for value in values:
        if isinstance(value, dict):
            value = _edges(value.values())
        if (isinstance(value, Tensor) and value.dim() == 2 and value.shape[0] == 2
                and not value.is_floating_point() and value.layout is torch.strided):
            return value
    return None
