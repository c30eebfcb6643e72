"""Rows and columns of a sparse matrix: chosen, sampled, and renumbered."""
from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.adapters.dgl.sparse.matrix import Matrix, Pattern, error


def rows(matrix: Matrix, dim: int, ids: Tensor) -> Matrix:
    """The rows (``dim`` 0) or columns (1) ``ids``, in this order. RuntimeError for ids out of
    range."""
    size = matrix.pattern.shape[dim]
    if ids.dim() != 1 or (ids.numel() and bool(((ids < 0) | (ids >= size)).any())):
        raise error(f"ids must be a tensor of one dimension, of numbers from 0 to {size - 1}")
    starts, others, order = matrix.pattern.by(dim)
    first, count = starts[:-1][ids], starts.diff()[ids]
    major = torch.repeat_interleave(torch.arange(len(ids), device=ids.device), count.long())
    before = count.cumsum(0) - count
    place = (first - before)[major] + torch.arange(len(major), device=ids.device)
    value = matrix.value.index_select(0, place if order is None else order[place])
    return _built(major.to(others.dtype), others[place], value, matrix, dim, len(ids))


def _built(major: Tensor, others: Tensor, value: Tensor, matrix: Matrix, dim: int,
           size: int) -> Matrix:
    """A matrix with ``size`` rows (``dim`` 0) or columns (1), and as many others as before."""
    num_others = matrix.pattern.shape[1 - dim]
    if dim == 0:
        return Matrix(Pattern(torch.stack([major, others]), (size, num_others)), value)
    return Matrix(Pattern(torch.stack([others, major]), (num_others, size)), value)


@torch.no_grad()
def sample(matrix: Matrix, dim: int, fanout: int, ids: Tensor, replace: bool,
           bias: bool) -> Matrix:
    """At most ``fanout`` entries of each of the rows or columns ``ids``; with ``replace`` exactly
    that many where there are any. ``bias``: values are their weights."""
    size = matrix.pattern.shape[dim]
    if len(ids) == size + 1 and int(ids[-1]) == size:  # DGL's own "all" ends one too late
        ids = ids[:-1]
    chosen = rows(matrix, dim, ids)
    if fanout < 0:
        return chosen
    major = chosen.pattern.indices[dim].long()
    weight = (chosen.value.double() if bias
              else torch.ones(len(major), dtype=torch.float64, device=ids.device))
    if weight.dim() > 1 or bool((weight < 0).any()):
        raise error("weights of a biased sample must be one number an entry, of at least 0")
    place = (_repeated if replace else _distinct)(major, weight, fanout, len(ids))
    return _built(major[place].to(chosen.pattern.indices.dtype),
                  chosen.pattern.indices[1 - dim][place], chosen.value[place], chosen, dim,
                  len(ids))


def _distinct(major: Tensor, weight: Tensor, fanout: int, size: int) -> Tensor:
    """Places of entries, none twice: the first ones when each waits for a time that is exponential
    with its weight as rate."""
    waits = torch.empty_like(weight).exponential_() / weight
    order = torch.argsort(waits)
    order = order[torch.argsort(major[order], stable=True)]
    counts = torch.bincount(major, minlength=size)
    rank = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[major[order]]
    return order[(rank < fanout) & (weight[order] > 0)].sort().values


def _repeated(major: Tensor, weight: Tensor, fanout: int, size: int) -> Tensor:
    """Places of ``fanout`` entries of each row that has weight. ``major`` is sorted."""
    total = weight.new_zeros(size).index_add_(0, major, weight)
    some = (total > 0).nonzero().squeeze(1)
    ends = weight.cumsum(0)
    before = (total.cumsum(0) - total)[some]
    # a draw in (0, 1], so that entries without weight are never met
    draw = 1 - torch.rand(len(some), fanout, dtype=weight.dtype, device=weight.device)
    place = torch.searchsorted(ends, (before[:, None] + draw * total[some][:, None]).flatten())
    counts = torch.bincount(major, minlength=size)
    first, last = (counts.cumsum(0) - counts)[some], counts.cumsum(0)[some] - 1
    # rounding must not lead into another row
    return place.clamp(first.repeat_interleave(fanout), last.repeat_interleave(fanout))


def compact(matrix: Matrix, dim: int, leading: Tensor | None) -> tuple[Matrix, Tensor]:
    """(the matrix without the rows (``dim`` 0) or columns (1) that have no entry, old ids of those
    that stay). ``leading``: ids that come first and stay anyhow."""
    major = matrix.pattern.indices[dim]
    head = major[:0] if leading is None else leading.to(major.dtype)
    used = major.unique()
    ids = torch.cat([head, used[~torch.isin(used, head)]])
    new = torch.zeros(matrix.pattern.shape[dim], dtype=major.dtype, device=major.device)
    new[ids] = torch.arange(len(ids), dtype=major.dtype, device=major.device)
    return _built(new[major], matrix.pattern.indices[1 - dim], matrix.value, matrix, dim,
                  len(ids)), ids
