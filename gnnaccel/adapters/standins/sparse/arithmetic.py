"""Sums and products of a sparse matrix with a tensor broadcast over it, or with another matrix."""
from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.adapters.standins.sparse.storage import row_major


def add(src, other):
    """``src + other``. ``other``: [rows, 1, ...] or [1, columns, ...], added to the entries that
    are there; or a sparse matrix, whose entries join. A matrix without values counts as ones, but
    two of which one has none have none. Raises ValueError for other shapes."""
    if isinstance(other, Tensor):
        return src.set_value(_plus(src.storage.value(), _spread(src, other)), layout="coo")
    (row, col, value), (row2, col2, value2) = src.coo(), _sparse(src, other).coo()
    joined = None if value is None or value2 is None else torch.cat([value, value2])
    sum_ = type(src)(row=torch.cat([row, row2]), col=torch.cat([col, col2]), value=joined,
                     sparse_sizes=_both_sizes(src, other), trust_data=True)
    return sum_.coalesce("sum")


def add_(src, other: Tensor):
    """`add` of a dense ``other``, in place."""
    spread, value = _spread(src, other), src.storage.value()
    value = spread + 1 if value is None else value.add_(spread.to(value.dtype))
    return src.set_value_(value, layout="coo")


def add_nnz(src, other: Tensor, layout: str | None = None):
    """``other`` [entries, ...] added entry by entry."""
    return src.set_value(_plus(src.storage.value(), other), layout)


def add_nnz_(src, other: Tensor, layout: str | None = None):
    """`add_nnz` in place."""
    value = src.storage.value()
    value = other + 1 if value is None else value.add_(other.to(value.dtype))
    return src.set_value_(value, layout)


def mul(src, other):
    """``src * other``. ``other``: [rows, 1, ...] or [1, columns, ...]; or a sparse matrix, where
    the entries that both have remain. Raises ValueError for other shapes, and for sparse matrices
    without values or with entries that come twice."""
    if isinstance(other, Tensor):
        return src.set_value(_times(src.storage.value(), _spread(src, other)), layout="coo")
    for name, matrix in (("first", src), ("second", _sparse(src, other))):
        if not matrix.has_value():
            raise ValueError(f"the {name} of two sparse tensors to multiply has no values; call "
                             "its fill_value(1.0)")
        if not matrix.is_coalesced():
            raise ValueError(f"the {name} of two sparse tensors to multiply has entries that come "
                             "twice; call its coalesce()")
    (row, col, value), (row2, col2, value2) = src.coo(), other.coo()
    row, col = torch.cat([row, row2]), torch.cat([col, col2])
    value, sizes = torch.cat([value, value2]), _both_sizes(src, other)
    order = row_major(row, col, sizes)
    row, col, value = row[order], col[order], value[order]
    twin = ((row[1:] == row[:-1]) & (col[1:] == col[:-1])).nonzero().flatten()
    return type(src)(row=row[twin], col=col[twin], value=value[twin] * value[twin + 1],
                     sparse_sizes=sizes, is_sorted=True, trust_data=True)


def mul_(src, other: Tensor):
    """`mul` by a dense ``other``, in place."""
    spread, value = _spread(src, other), src.storage.value()
    return src.set_value_(spread if value is None else value.mul_(spread.to(value.dtype)),
                          layout="coo")


def mul_nnz(src, other: Tensor, layout: str | None = None):
    """``other`` [entries, ...] multiplied entry by entry."""
    return src.set_value(_times(src.storage.value(), other), layout)


def mul_nnz_(src, other: Tensor, layout: str | None = None):
    """`mul_nnz` in place."""
    value = src.storage.value()
    return src.set_value_(other if value is None else value.mul_(other.to(value.dtype)), layout)


def _plus(value: Tensor | None, other: Tensor) -> Tensor:
    return other + 1 if value is None else other.to(value.dtype) + value


def _times(value: Tensor | None, other: Tensor) -> Tensor:
    return other if value is None else other.to(value.dtype) * value


def _spread(src, other: Tensor) -> Tensor:
    """The value of ``other`` at each entry."""
    rows, cols = src.sparse_sizes()
    if other.dim() > 1 and other.size(0) == rows and other.size(1) == 1:
        return other.squeeze(1)[src.storage.row()]
    if other.dim() > 1 and other.size(0) == 1 and other.size(1) == cols:
        return other.squeeze(0)[src.storage.col()]
    raise ValueError(f"a tensor of {list(other.shape)} cannot be broadcast over a sparse tensor of "
                     f"{rows} rows and {cols} columns; it must be [{rows}, 1, ...] or "
                     f"[1, {cols}, ...]")


def _sparse(src, other):
    if not isinstance(other, type(src)):
        raise NotImplementedError(f"a sparse tensor with a {type(other).__name__}; pass a tensor "
                                  "or a SparseTensor")
    return other


def _both_sizes(src, other) -> tuple[int, int]:
    (rows, cols), (more_rows, more_cols) = src.sparse_sizes(), other.sparse_sizes()
    return max(rows, more_rows), max(cols, more_cols)
