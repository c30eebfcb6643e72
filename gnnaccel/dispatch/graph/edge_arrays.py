"""`EdgeArrays`: edges that a host keeps as arrays of its own, read where they lie, in the place of
an ``edge_index`` tensor."""
from __future__ import annotations

from typing import NamedTuple, final

import torch
from torch import Tensor


class CSC(NamedTuple):
    """Edges grouped by destination: ``indptr`` [num_dst + 1], ``src`` [E], ``ids`` [E], or [0]
    where ids are places."""

    indptr: Tensor
    src: Tensor
    ids: Tensor


@final
class EdgeArrays:
    """The interface of an ``edge_index`` [2, E] over a source and a destination tensor that lie
    apart, over a CSC, or over both.

    ``ends``: (src, dst), each [E], by edge id; None: made of the CSC when first asked for, which
    only ids that are places save a copy. ``csc``: the same edges; ``shape``: [2, E]. All of one
    integer dtype, on one device. Code that uses the arrays in place keeps them alive.
    """

    __slots__ = ("csc", "shape", "_parts", "_ends", "__weakref__")

    def __init__(self, ends: tuple[Tensor, Tensor] | None, csc: CSC | None = None):
        self.csc, self._ends = csc, ends
        self._parts = (*(ends or ()), *(csc or ()))
        first: Tensor = csc.src if ends is None else ends[0]  # type: ignore[union-attr]
        self.shape = 2, first.shape[0]

    @property
    def device(self) -> torch.device:
        return self._parts[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self._parts[0].dtype

    @property
    def is_cuda(self) -> bool:
        return self._parts[0].is_cuda

    @property
    def _version(self) -> int:
        """Version of all arrays: grows when any of them is written through its tensor here."""
        total = 0
        for t in self._parts:
            total += t._version
        return total

    def data_ptr(self) -> int:
        """Address of the first of the arrays. They are never moved: DGL and the like keep them."""
        return self._parts[0].data_ptr()

    def is_inference(self) -> bool:
        return any(t.is_inference() for t in self._parts)

    def detach(self) -> EdgeArrays:
        return self

    def unbind(self, dim: int = 0) -> tuple[Tensor, Tensor]:
        """(src, dst) by edge id."""
        if self._ends is None:
            assert self.csc is not None
            self._ends = by_id(self.csc.src, destinations(self.csc), self.csc.ids)
        return self._ends

    def __getitem__(self, end: int) -> Tensor:
        return self.unbind()[end]

    def index_select(self, dim: int, ids: Tensor) -> Tensor:
        """[2, ids] tensor: the edges with these ids."""
        return torch.stack([end.index_select(0, ids) for end in self.unbind()])

    def to(self, device: torch.device) -> Tensor:
        """[2, E] tensor on ``device``: one copy of each end, and nothing between."""
        edges = torch.empty(self.shape, dtype=self.dtype, device=device)
        for row, end in zip(edges.unbind(0), self.unbind()):
            row.copy_(end)
        return edges


@torch.inference_mode(False)  # made in inference mode they could not take part in training later
def by_id(src: Tensor, dst: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(src, dst) in the order of edge ids; ``ids`` [0]: they are so already."""
    if not ids.shape[0]:
        return src, dst
    ids = ids.long()
    return tuple(torch.empty_like(end).index_copy_(0, ids, end)  # type: ignore[return-value]
                 for end in (src, dst))


@torch.inference_mode(False)
def destinations(csc: CSC) -> Tensor:
    """[E] of the CSC's dtype: the destination of each place."""
    nodes = torch.arange(csc.indptr.shape[0] - 1, dtype=csc.src.dtype, device=csc.src.device)
    return torch.repeat_interleave(nodes, csc.indptr.diff(), output_size=csc.src.shape[0])


def csc_of(edge_index: Tensor | EdgeArrays | None) -> CSC | None:
    """The CSC that came with these edges."""
    return edge_index.csc if type(edge_index) is EdgeArrays else None
