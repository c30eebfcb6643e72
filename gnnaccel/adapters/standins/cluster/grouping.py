"""Choosing and grouping points and nodes, as in torch_cluster 1.6."""
from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def fps(src: Tensor, batch: Tensor | None = None, ratio: Tensor | float | None = None,
        random_start: bool = True, batch_size: int | None = None,
        ptr: Tensor | Sequence[int] | None = None) -> Tensor:
    """[chosen]: farthest point sampling (PointNet++, arXiv:1706.02413). Of each example a share of
    ``ratio`` (0.5 by default, rounded up) is chosen, each point the farthest from those before it.

    ``src`` [N, F]. ``batch`` [N]: int64, sorted, or ``ptr``: where examples begin, and the end.
    ``random_start``: begin with a random point instead of the first. Raises ValueError where there
    is not one entry of ``batch`` per point.
    """
    points = src.detach()
    points = points.flatten(1) if points.dim() > 1 else points.unsqueeze(1)
    offsets = _offsets(points, batch, batch_size, ptr)
    begin, size = offsets[:-1], offsets.diff()
    share = torch.as_tensor(0.5 if ratio is None else ratio, dtype=src.dtype, device=src.device)
    wanted = (size.float() * share).ceil().long()
    if not len(points):
        return wanted.new_empty(0)
    padded = torch.arange(int(size.max()), device=src.device)
    there = padded < size[:, None]
    member = torch.where(there, begin[:, None] + padded, 0)
    chance = torch.rand(size.shape, dtype=torch.float64, device=src.device)
    chosen = (chance * size).long() if random_start else torch.zeros_like(size)
    distance = torch.where(there, math.inf, -math.inf).to(points.dtype)
    example, picked = torch.arange(len(size), device=src.device), []
    for _ in range(int(wanted.max())):
        picked.append(member[example, chosen])
        step = (points[member] - points[picked[-1]][:, None]).square().sum(-1)
        distance = torch.minimum(distance, step.masked_fill(~there, -math.inf))
        chosen = distance.argmax(1)
    rank = torch.arange(len(picked), device=src.device)
    return torch.stack(picked, 1)[rank < wanted[:, None]]


def _offsets(points: Tensor, batch: Tensor | None, batch_size: int | None,
             ptr: Tensor | Sequence[int] | None) -> Tensor:
    if ptr is not None:
        return torch.as_tensor(ptr, device=points.device)
    if batch is None:
        return torch.tensor([0, len(points)], device=points.device)
    if batch.shape != (len(points),):
        raise ValueError(f"batch is {list(batch.shape)} for {len(points)} points; it needs one "
                         "entry for each")
    size = torch.bincount(batch, minlength=batch_size or 0)
    return torch.cat([size.new_zeros(1), size.cumsum(0)])


def grid_cluster(pos: Tensor, size: Tensor, start: Tensor | None = None,
                 end: Tensor | None = None) -> Tensor:
    """[N]: the number of the voxel that each point of ``pos`` [N, F] is in; the first dimension
    counts fastest. ``size`` [F]: of a voxel. ``start`` and ``end`` [F]: of the grid, by default
    those of the points. Raises ValueError for sizes of another number of dimensions."""
    pos = pos.flatten(1) if pos.dim() > 1 else pos.unsqueeze(1)
    if size.numel() != pos.size(1):
        raise ValueError(f"size has {size.numel()} entries for points of {pos.size(1)} dimensions")
    start = pos.amin(0) if start is None else start
    end = pos.amax(0) if end is None else end
    voxels = ((end - start) / size).long() + 1
    stride = torch.cat([voxels.new_ones(1), voxels[:-1].cumprod(0)])
    return (((pos - start) / size).long() * stride).sum(1)


def graclus_cluster(row: Tensor, col: Tensor, weight: Tensor | None = None,
                    num_nodes: int | None = None) -> Tensor:
    """[nodes]: a greedy matching. Nodes come in random order; each that is free is joined with its
    free neighbour of the greatest weight, or a random one, and both get the smaller number of the
    two. Runs on the CPU. ``row``, ``col``: int64; ``weight``: one per edge, not negative."""
    if num_nodes is None:
        num_nodes = max(int(ids.max()) + 1 if ids.numel() else 0 for ids in (row, col))
    rank = torch.rand(row.shape, device=row.device) if weight is None else weight.detach()
    order = rank.argsort(descending=True)
    order = order[row[order].argsort(stable=True)]
    row, col = row[order], col[order]
    ends = torch.bincount(row, minlength=num_nodes).cumsum(0).tolist()
    neighbours, cluster = col.tolist(), [-1] * num_nodes
    for node in torch.randperm(num_nodes, device="cpu").tolist():
        if cluster[node] >= 0:
            continue
        begin = ends[node - 1] if node else 0
        free = (neighbour for neighbour in neighbours[begin:ends[node]]
                if cluster[neighbour] < 0 and neighbour != node)
        neighbour = next(free, node)
        cluster[node] = cluster[neighbour] = min(node, neighbour)
    return torch.tensor(cluster, dtype=torch.int64, device=row.device)
