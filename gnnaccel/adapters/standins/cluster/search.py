"""The nearest points, within a distance, of the same example: one search for all of torch_cluster.

On a CPU and in up to 16 dimensions SciPy's k-d tree searches, if SciPy is installed; otherwise
distances are computed in blocks by `torch.cdist`, without the matrix products that would round
away small distances.
"""
from __future__ import annotations

import importlib.util
import math

import torch
from torch import Tensor

_TREE_DIMENSIONS = 16  # with more a k-d tree looks at nearly all points
_QUERIES = 1024
_DISTANCES = 1 << 24  # distances of one block


def nearest_points(x: Tensor, y: Tensor, count: int, radius: float, batch_x: Tensor | None,
                   batch_y: Tensor | None, workers: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """(query, point, rank) of the up to ``count`` points of ``x`` that are nearest to each point of
    ``y``, nearest first, and nearer than ``radius``.

    ``x`` [N, F], ``y`` [M, F]; ``batch_x`` [N] and ``batch_y`` [M]: int64, sorted, number of the
    example that each is of; None where there is one. Raises ValueError for other shapes and for
    batch vectors that are not sorted.
    """
    x, y = _points(x), _points(y)
    if x.size(1) != y.size(1):
        raise ValueError(f"points of {x.size(1)} and of {y.size(1)} dimensions; they need as many")
    batch_x = _checked_batch("batch_x", batch_x, x)
    batch_y = _checked_batch("batch_y", batch_y, y)
    if not x.numel() or not y.numel() or count <= 0:
        none = torch.empty(0, dtype=torch.int64, device=x.device)
        return none, none, none
    if x.device.type == "cpu" and x.size(1) <= _TREE_DIMENSIONS and _has_scipy():
        return _by_tree(x, y, count, radius, batch_x, batch_y, workers)
    return _by_blocks(x, y, count, radius, batch_x, batch_y)


def _has_scipy() -> bool:
    return importlib.util.find_spec("scipy") is not None


def _by_tree(x: Tensor, y: Tensor, count: int, radius: float, batch_x: Tensor, batch_y: Tensor,
             workers: int) -> tuple[Tensor, Tensor, Tensor]:
    from scipy.spatial import cKDTree

    points, queries = x.double().numpy(), y.double().numpy()
    parts = []
    for example in batch_y.unique_consecutive():
        x_range, y_range = (_range(batch, int(example)) for batch in (batch_x, batch_y))
        size = x_range[1] - x_range[0]
        if not size:
            continue
        tree = cKDTree(points[slice(*x_range)])
        for begin in range(y_range[0], y_range[1], _QUERIES):
            end = min(begin + _QUERIES, y_range[1])
            _, place = tree.query(queries[begin:end], k=range(1, min(count, size) + 1),
                                  distance_upper_bound=radius, workers=workers)
            place = torch.as_tensor(place, device="cpu")
            query, rank = (place < size).nonzero().unbind(1)
            parts.append((query + begin, place[query, rank] + x_range[0], rank))
    return _joined(parts, x.device)


def _by_blocks(x: Tensor, y: Tensor, count: int, radius: float, batch_x: Tensor,
               batch_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    parts = []
    begin = 0
    while begin < len(y):
        end = min(begin + _QUERIES, len(y))
        first, last = (int(batch_y[place]) for place in (begin, end - 1))
        lower, upper = _range(batch_x, first)[0], _range(batch_x, last)[1]
        end = min(end, begin + max(_DISTANCES // max(upper - lower, 1), 1))
        if upper > lower:
            query, place, rank = _block(x[lower:upper], y[begin:end], count, radius,
                                        batch_x[lower:upper], batch_y[begin:end])
            parts.append((query + begin, place + lower, rank))
        begin = end
    return _joined(parts, x.device)


def _block(x: Tensor, y: Tensor, count: int, radius: float, batch_x: Tensor,
           batch_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    distance = torch.cdist(y, x, compute_mode="donot_use_mm_for_euclid_dist")
    distance.masked_fill_(batch_y[:, None] != batch_x, math.inf)
    distance, place = distance.topk(min(count, len(x)), largest=False)
    query, rank = (distance < radius).nonzero().unbind(1)
    return query, place[query, rank], rank


def _range(batch: Tensor, example: int) -> tuple[int, int]:
    """(begin, end) of the points of one example."""
    ends = torch.searchsorted(batch, torch.tensor([example, example + 1], device=batch.device))
    begin, end = ends.tolist()
    return begin, end


def _joined(found: list, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    if not found:
        none = torch.empty(0, dtype=torch.int64, device=device)
        return none, none, none
    query, point, rank = (torch.cat(parts) for parts in zip(*found))
    return query, point, rank


def _points(x: Tensor) -> Tensor:
    x = x.detach()
    x = x.unsqueeze(-1) if x.dim() == 1 else x
    if x.dim() != 2:
        raise ValueError(f"points are {list(x.shape)}; they must be [points, dimensions]")
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _checked_batch(name: str, batch: Tensor | None, x: Tensor) -> Tensor:
    if batch is None:
        return torch.zeros(len(x), dtype=torch.int64, device=x.device)
    if batch.shape != (len(x),):
        raise ValueError(f"{name} is {list(batch.shape)} for {len(x)} points; it needs one entry "
                         "for each")
    if bool((batch[1:] < batch[:-1]).any()):
        raise ValueError(f"{name} is not sorted; sort points and batch vector by example first")
    return batch.contiguous()
