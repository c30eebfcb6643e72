"""The edges with relations that a caller gave, checked and put together."""
from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from gnnaccel.dispatch.graph.tensor_ref import Derived
from gnnaccel.errors import VALID, GraphError

Ends = tuple[Tensor, Tensor, Tensor]

#: Edges below which arrays that a kernel put together are kept, 12 bytes an edge: making them again
#: would take longer than reading them.
_KEEP_BELOW = 1 << 22


def by_type(edge_index: Tensor, edge_type: Tensor) -> Ends:
    """(src, dst, relation), each [E], of edges with a type each."""
    src, dst = edge_index.unbind(0)
    return src, dst, edge_type


def rows_by_type(types: Tensor) -> Ends:
    """The same of rows with a type each: an edge from each row to itself."""
    row = torch.arange(types.shape[0], device=types.device)
    return row, row, types


class Edges(Derived):
    """The edges that ``assemble(*structure)`` gives as (src, dst, relation).

    The tensors of ``structure`` are not kept alive, unless ``own``. ``sizes``: of nodes at either
    end, and relations. ``ignore``: edges of unknown relations do not count; otherwise, and for
    nodes out of range always, GraphError. ``assemble`` may have a ``checked(*structure)``, which
    gives the same ends or raises GraphError where ids are out of range.
    """

    def __init__(self, structure: tuple[Tensor, ...], sizes: tuple[int, int, int],
                 assemble: Callable[..., Ends], own: bool, ignore: bool):
        self.assemble, self._sizes, self._ignore = assemble, sizes, ignore
        self._own = structure if own else None
        self._sources = [tuple(map(weakref.ref, structure))]
        #: the edges, where some do not count or a kernel put them together
        self.kept: Ends | None = None
        self.checked = False

    def ends(self, check: bool = True) -> Ends:
        """Those that count. ``check`` False: the caller checks them."""
        if self.kept is not None:
            return self.kept
        structure = [t.detach() for t in self._alive()]
        if self.checked:
            return self.assemble(*structure)
        if hasattr(self.assemble, "checked"):
            ends = self.assemble.checked(*structure)
            self.checked = True
            if ends[0].dtype is torch.int32 and ends[0].shape[0] < _KEEP_BELOW:
                self.kept = ends
            return ends
        ends = self.assemble(*structure)
        if check:
            self.check(*ends)
        return self.kept or ends

    def check(self, src: Tensor, dst: Tensor, relation: Tensor) -> None:
        """Check the ids, with one wait for the device per graph: one out of range would make a pair
        of another node."""
        if not src.shape[0]:
            self.checked = True
            return
        low = torch.stack([ids.min().long() for ids in (src, dst, relation)]).tolist()
        high = torch.stack([ids.max().long() for ids in (src, dst, relation)]).tolist()
        names = "source ids", "destination ids", "edge types"
        for at, (what, limit) in enumerate(zip(names, self._sizes)):
            if low[at] >= 0 and high[at] < limit:
                continue
            if what != "edge types" or not self._ignore:
                raise GraphError(f"the graph holds {what} from {low[at]} to {high[at]}; they must "
                                 f"lie in [0, {limit}). Check the number of nodes, and of "
                                 f"relations, that the layer was made with. {VALID}")
            in_range = ((relation >= 0) & (relation < self._sizes[2])).nonzero().view(-1)
            self.kept = tuple(  # type: ignore[assignment]
                ids.index_select(0, in_range) for ids in (src, dst, relation))
        self.checked = True
