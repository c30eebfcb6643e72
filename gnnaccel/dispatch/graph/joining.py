"""Edges of several types put together by one kernel (`cuda.structures.join`), joining with a check
of ids, and the structures of edges that are put together so, or of one tensor that is read the
other way round."""
from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence

from torch import Tensor

from gnnaccel.cuda.runtime import capture, driver
from gnnaccel.cuda.structures import join as cuda_join, structure
from gnnaccel.cuda.structures.join import Range as Range
from gnnaccel.dispatch.graph import cache
from gnnaccel.dispatch.graph.edge_arrays import EdgeArrays
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.policy.config import current


def serves(structure: Sequence[Tensor | EdgeArrays], num_nodes: int, num_loops: int = 0) -> bool:
    """Whether the kernel is to put these edges together: where kernels may run, and ids and edges
    fit 32 bits.

    False while a CUDA graph is captured: its replays would copy the table of parts from memory that
    has been reused since.
    """
    device, config = structure[0].device, current()
    if (config is not None and config.backend == "torch") or capture.capturing():
        return False
    if not driver.placed() and not (device.type == "cuda" and driver.available()[0]):
        return False
    if num_nodes >= 2**31 or num_loops + sum(t.shape[1] for t in structure) >= 2**31:
        return False
    return _compiles(driver.current())  # type: ignore[arg-type]


@functools.lru_cache(maxsize=4)
def _compiles(using: driver.Driver) -> bool:
    using.ahead(structure.prepare)  # a new graph needs these next
    try:
        cuda_join.prepare()
    except driver.CompileError:
        return False
    return True


def by_kernel(structure: Sequence[Tensor | EdgeArrays],
              ranges: Sequence[tuple[int, int, int, int, int]],
              loops: Sequence[Range] = ()) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """(src, dst, relation), each [E] int32, and `cuda.structures.join.Joined.wrong`. ``ranges``:
    `Range` of each edge type; ``loops``: of those that add an edge from each source to the
    destination with the same number, which come last."""
    parts = [t.unbind(0) if type(t) is EdgeArrays else t for t in structure]
    *ends, wrong = cuda_join.join([*parts, *[None] * len(loops)], [*ranges, *loops],
                                  structure[0].device)
    return tuple(ends), wrong  # type: ignore[return-value]


def checked(join: Callable[..., tuple],
            structure: tuple[Tensor | EdgeArrays, ...]) -> tuple:
    """``join(*structure)``, by its ``checked`` if it has one, which raises GraphError for ids where
    they do not belong."""
    return getattr(join, "checked", join)(*structure)


# --- structures of such edges, or of edges read the other way round -------------------------------

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
        self._sources = [tuple(map(weakref.ref, structure))]

    def _given_csc(self) -> None:
        """None: a CSC that came with the first part is not of the whole graph."""

    def _ends(self) -> tuple[Tensor, Tensor]:
        structure = tuple([t.detach() for t in self._alive()])
        src, dst = checked(self._join, structure)[:2]
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
