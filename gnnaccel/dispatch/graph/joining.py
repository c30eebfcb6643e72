"""Edges of several types put together by one kernel (`cuda.join`), and joining with a check of
ids."""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import Tensor

from gnnaccel.cuda import capture, driver, structure
from gnnaccel.cuda import join as cuda_join
from gnnaccel.cuda.join import Range
from gnnaccel.dispatch.graph.edge_arrays import EdgeArrays
from gnnaccel.dispatch.policy.config import current

__all__ = ["Range", "by_kernel", "checked", "serves"]


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
    """(src, dst, relation), each [E] int32, and `cuda.join.Joined.wrong`. ``ranges``: `Range` of
    each edge type; ``loops``: of those that add an edge from each source to the destination with
    the same number, which come last."""
    parts = [t.unbind(0) if type(t) is EdgeArrays else t for t in structure]
    *ends, wrong = cuda_join.join([*parts, *[None] * len(loops)], [*ranges, *loops],
                                  structure[0].device)
    return tuple(ends), wrong  # type: ignore[return-value]


def checked(join: Callable[..., tuple],
            structure: tuple[Tensor | EdgeArrays, ...]) -> tuple:
    """``join(*structure)``, by its ``checked`` if it has one, which raises GraphError for ids where
    they do not belong."""
    return getattr(join, "checked", join)(*structure)
