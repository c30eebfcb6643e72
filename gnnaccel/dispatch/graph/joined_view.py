"""Structures of edges that are put together from several of the caller's tensors, or of one tensor
that is read the other way round."""
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gnnaccel.dispatch.graph import cache, joining
from gnnaccel.dispatch.graph.view import GraphView

if TYPE_CHECKING:
    from gnnaccel.dispatch.graph.edge_arrays import EdgeArrays


class JoinedView(GraphView):
    """A `GraphView` whose edges are ``join(*structure)``: (src, dst, ...), each [E] integer, in the
    order of edge ids.

    ``join`` may have a ``checked(*structure)``, which joins too, but raises for ids that it would
    put where they do not belong.
    """

    def __init__(self, structure: tuple[Tensor, ...], num_src: int, num_dst: int,
                 join: Callable[..., tuple], own: bool = False, loops: int = 0):
        super().__init__(structure[0], num_src, num_dst, loops,
                         num_edges=sum(t.shape[1] for t in structure))
        self._join = join
        self._kept = structure if own else None
        self.bind(*structure)

    def bind(self, *structure: Tensor | EdgeArrays) -> None:
        """The tensors to build from, equal in value to those of the constructor."""
        self._sources = tuple(weakref.ref(t) for t in structure)

    def _given_csc(self) -> None:
        """None: a CSC that came with the first part is not of the whole graph."""

    def _ends(self) -> tuple[Tensor, Tensor]:
        structure: tuple[Any, ...] = tuple(ref() for ref in self._sources)
        if any(t is None for t in structure):
            raise RuntimeError(
                "the edges of this JoinedView are gone; call bind() with live ones first")
        structure = tuple(t.detach() for t in structure)
        src, dst = joining.checked(self._join, structure)[:2]
        return src.contiguous(), dst.contiguous()


# --- against the flow -----------------------------------------------------------------------------

def flipped(edge_index: Tensor, num_src: int, num_dst: int,
            loops: int = 0) -> tuple[GraphView, str]:
    """`cache.lookup` of edges whose second row holds the sources."""
    return cache.lookup_many((edge_index,), flipped_sizes(num_src, num_dst, loops),
                             lambda own: JoinedView((edge_index,), num_src, num_dst, reversed_ends,
                                                    own, loops))


def flipped_sizes(num_src: int, num_dst: int, loops: int = 0) -> tuple:
    """Key of such edges in the structure cache."""
    return "flipped", num_src, num_dst, loops


def reversed_ends(edge_index: Tensor) -> tuple[Tensor, Tensor]:
    return edge_index[1], edge_index[0]
