"""The diagonal of a sparse matrix, and symmetry."""
from __future__ import annotations

import torch
from torch import Tensor


def remove_diag(src, k: int = 0):
    """The matrix without the entries on diagonal ``k``; positive numbers are above the main one."""
    row, col, value = src.coo()
    keep = row != col - k
    return type(src)(row=row[keep], col=col[keep], value=None if value is None else value[keep],
                     sparse_sizes=src.sparse_sizes(), is_sorted=True, trust_data=True)


def set_diag(src, values: Tensor | None = None, k: int = 0):
    """The matrix with one entry at every place of diagonal ``k``.

    ``values``: of these entries, broadcast; ones if None. No effect on a matrix without values.
    """
    src = remove_diag(src, k)
    row, col, value = src.coo()
    first, count = max(-k, 0), _length(src, k)
    place = torch.arange(first, first + count, device=row.device)
    if value is not None:
        shape = (count, *value.shape[1:])
        if values is None:
            values = value.new_ones(shape)
        value = torch.cat([value, values.to(value.dtype).expand(shape)])
    return type(src)(row=torch.cat([row, place]), col=torch.cat([col, place + k]), value=value,
                     sparse_sizes=src.sparse_sizes(), trust_data=True)


def fill_diag(src, fill_value: float, k: int = 0):
    """`set_diag` with one number."""
    value = src.storage.value()
    return set_diag(src, None if value is None else value.new_full((1,) * value.dim(), fill_value),
                    k)


def get_diag(src) -> Tensor:
    """[shorter size, ...]: the values on the main diagonal, 0 where there is no entry."""
    row, col, value = src.coo()
    if value is None:
        value = torch.ones(row.numel(), device=row.device)
    on = row == col
    shape = (min(src.sparse_sizes()), *value.shape[1:])
    return value.new_zeros(shape).index_put((row[on],), value[on])


def is_symmetric(src) -> bool:
    """Whether it equals its transpose."""
    return src.is_quadratic() and src == src.t()


def to_symmetric(src, reduce: str = "sum"):
    """The matrix joined with its transpose, quadratic; ``reduce`` ("sum", "mean", "min" or "max")
    combines values at the same place."""
    row, col, value = src.coo()
    size = max(src.sparse_sizes())
    both = type(src)(row=torch.cat([row, col]), col=torch.cat([col, row]),
                     value=None if value is None else torch.cat([value, value]),
                     sparse_sizes=(size, size), trust_data=True)
    return both.coalesce(reduce)


def _length(src, k: int) -> int:
    rows, cols = src.sparse_sizes()
    return max(min(rows, cols - k) if k >= 0 else min(rows + k, cols), 0)
