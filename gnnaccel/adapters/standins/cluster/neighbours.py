"""Graphs of near points, as in torch_cluster 1.6."""
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.adapters.standins.cluster.search import nearest_points

_FLOWS = ("source_to_target", "target_to_source")


def knn(x: Tensor, y: Tensor, k: int, batch_x: Tensor | None = None, batch_y: Tensor | None = None,
        cosine: bool = False, num_workers: int = 1, batch_size: int | None = None) -> Tensor:
    """[2, pairs]: for each point of ``y`` (first row) the ``k`` nearest points of ``x`` (second
    row), nearest first; fewer where its example has fewer.

    ``x`` [N, F], ``y`` [M, F]. ``batch_x`` [N], ``batch_y`` [M]: int64, sorted, the example of each
    point. ``cosine``: by angle instead of distance, also on a CPU. ``num_workers``: threads of the
    search on a CPU. ``batch_size`` is found out. Raises ValueError for other shapes and unsorted
    batch vectors.
    """
    x, y = (F.normalize(each, dim=-1) if cosine else each for each in (x, y))
    query, point, _ = nearest_points(x, y, k, math.inf, batch_x, batch_y, num_workers)
    return torch.stack([query, point])


def knn_graph(x: Tensor, k: int, batch: Tensor | None = None, loop: bool = False,
              flow: str = "source_to_target", cosine: bool = False, num_workers: int = 1,
              batch_size: int | None = None) -> Tensor:
    """``edge_index`` [2, edges] between each point of ``x`` and its ``k`` nearest: from these to it
    with ``flow="source_to_target"``, else from it to these.

    ``loop``: a point may be its own neighbour, and then is one of the ``k``. Other arguments as in
    `knn`. Raises ValueError for another flow.
    """
    x = F.normalize(x, dim=-1) if cosine else x
    pairs = nearest_points(x, x, k if loop else k + 1, math.inf, batch, batch, num_workers)
    return _graph(*pairs, len(x), k, loop, flow)


def radius(x: Tensor, y: Tensor, r: float, batch_x: Tensor | None = None,
           batch_y: Tensor | None = None, max_num_neighbors: int = 32, num_workers: int = 1,
           batch_size: int | None = None) -> Tensor:
    """[2, pairs]: for each point of ``y`` (first row) the points of ``x`` (second row) that are
    nearer than ``r``, nearest first; of more than ``max_num_neighbors`` the nearest. Other
    arguments and errors as in `knn`."""
    query, point, _ = nearest_points(x, y, max_num_neighbors, r, batch_x, batch_y, num_workers)
    return torch.stack([query, point])


def radius_graph(x: Tensor, r: float, batch: Tensor | None = None, loop: bool = False,
                 max_num_neighbors: int = 32, flow: str = "source_to_target", num_workers: int = 1,
                 batch_size: int | None = None) -> Tensor:
    """``edge_index`` [2, edges] between each point of ``x`` and those nearer than ``r``; arguments
    and errors as in `radius` and `knn_graph`."""
    count = max_num_neighbors if loop else max_num_neighbors + 1
    pairs = nearest_points(x, x, count, r, batch, batch, num_workers)
    return _graph(*pairs, len(x), max_num_neighbors, loop, flow)


def nearest(x: Tensor, y: Tensor, batch_x: Tensor | None = None,
            batch_y: Tensor | None = None) -> Tensor:
    """[N]: for each point of ``x`` [N, F] the nearest point of ``y`` [M, F] of its example.

    Batch vectors as in `knn`. Raises ValueError where an example of ``x`` has no point in ``y``.
    """
    query, point, _ = nearest_points(y, x, 1, math.inf, batch_y, batch_x)
    if query.numel() != len(x):
        raise ValueError("an example in batch_x has no point in batch_y; give y a point of each "
                         "example that x has")
    return point


def _graph(query: Tensor, point: Tensor, rank: Tensor, size: int, count: int, loop: bool,
           flow: str) -> Tensor:
    if flow not in _FLOWS:
        raise ValueError(f"flow={flow!r} is not known; use one of {', '.join(_FLOWS)}")
    if not loop:  # one more was searched for, dropped where a point is not its own neighbour
        own = query == point
        has_own = torch.zeros(size, dtype=torch.bool, device=query.device)
        has_own[query[own]] = True
        keep = ~own & (has_own[query] | (rank < count))
        query, point = query[keep], point[keep]
    return torch.stack([point, query] if flow == "source_to_target" else [query, point])
