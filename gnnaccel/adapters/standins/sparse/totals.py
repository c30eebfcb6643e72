"""Reductions of a sparse matrix over all entries, rows, columns or a dimension of the values.

Absent entries take no part, as in torch_sparse: the mean of a row is that of its entries. A row
without any is 0; without values every entry counts as one, and so do the mean and the extrema of
an empty row.
"""
from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.adapters.standins.scatter.reduce import scatter, unknown
from gnnaccel.adapters.standins.scatter.segment import segment_csr

_REDUCES = ("sum", "add", "mean", "min", "max")


def sum(src, dim=None) -> Tensor:
    """Sum of the values; of each column for ``dim=0``, of each row for ``dim=1``."""
    return reduction(src, dim, "sum")


def mean(src, dim=None) -> Tensor:
    """Mean of the values that are there; dimensions as in `sum`."""
    return reduction(src, dim, "mean")


def min(src, dim=None) -> Tensor:
    """Smallest of the values that are there; dimensions as in `sum`."""
    return reduction(src, dim, "min")


def max(src, dim=None) -> Tensor:
    """Greatest of the values that are there; dimensions as in `sum`."""
    return reduction(src, dim, "max")


def reduction(src, dim=None, reduce: str = "sum") -> Tensor:
    """The reduction named by ``reduce``: "sum", "add", "mean", "min" or "max". Raises ValueError
    for another name, IndexError for a dimension that is not there."""
    if reduce not in _REDUCES:
        raise unknown(reduce, _REDUCES)
    if dim is not None and not -src.dim() <= dim < src.dim():
        raise IndexError(f"dimension {dim} of a sparse tensor with {src.dim()} dimensions")
    dim = dim + src.dim() if dim is not None and dim < 0 else dim
    value = src.storage.value()
    if value is None:
        return _of_ones(src, dim, reduce in ("sum", "add"))
    if dim == 0:
        return scatter(value, src.storage.col(), 0, None, src.sparse_size(1), reduce)
    if dim == 1:
        return segment_csr(value, src.storage.rowptr(), None, reduce)
    function = getattr(torch, {"add": "sum", "min": "amin", "max": "amax"}.get(reduce, reduce))
    if dim is None:
        return function(value)
    if reduce in ("min", "max"):  # the first of equal ones gets the gradient
        return getattr(value, reduce)(dim=dim - 1)[0]
    return function(value, dim=dim - 1)


def _of_ones(src, dim, count) -> Tensor:
    if dim is None:
        return torch.tensor(src.nnz() if count else 1, dtype=src.dtype(), device=src.device())
    if count:
        counts = src.storage.rowcount() if dim == 1 else src.storage.colcount()
        return counts.to(src.dtype())
    return torch.ones(src.sparse_size(1 - dim), dtype=src.dtype(), device=src.device())
