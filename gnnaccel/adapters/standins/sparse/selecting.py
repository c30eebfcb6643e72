"""Parts of a sparse matrix: transposed, by ranges, by ids, by masks."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.standins.sparse.storage import SparseStorage, get_layout, row_major


def t(src):
    """The transpose. Index arrays that were derived go along."""
    old, order, value = src.storage, src.storage.csr2csc(), src.storage.value()
    return src.from_storage(SparseStorage(
        row=old.col()[order], col=old.row()[order], value=None if value is None else value[order],
        rowptr=old._colptr, colptr=old._rowptr, rowcount=old._colcount, colcount=old._rowcount,
        csr2csc=old.csc2csr(), csc2csr=order, sparse_sizes=old.sparse_sizes()[::-1],
        is_sorted=True, trust_data=True))


def select(src, dim: int, idx: int):
    """Row, column or place ``idx``, as a part of size one."""
    return narrow(src, dim, idx if idx >= 0 else idx + src.size(dim), 1)


def narrow(src, dim: int, start: int, length: int):
    """``length`` rows, columns or places of the values from ``start`` on."""
    dim = _dim(src, dim)
    start = start if start >= 0 else start + src.size(dim)
    if start < 0 or length < 0 or start + length > src.size(dim):
        raise IndexError(f"{length} from {start} on are not within dimension {dim}, of size "
                         f"{src.size(dim)}")
    if dim > 1:
        return src.set_value(src.storage.value().narrow(dim - 1, start, length), layout="coo")
    ids = src.storage.row() if dim == 0 else src.storage.col()
    sizes = _with_size(src, dim, length)
    if dim == 1:
        return _masked(src, (ids >= start) & (ids < start + length), sizes, col=ids - start)
    rowptr = src.storage.rowptr()[start:start + length + 1]
    first, last = (int(end) for end in rowptr[[0, -1]])
    return _part(src, slice(first, last), sizes, row=ids - start)


def __narrow_diag__(src, start: tuple[int, int], length: tuple[int, int]):
    """One block of a matrix that was made by `cat` along both dimensions."""
    return narrow(narrow(src, 0, start[0], length[0]), 1, start[1], length[1])


def index_select(src, dim: int, idx: Tensor):
    """The rows, columns or places of the values ``idx``: int64 of one dimension, in that order."""
    dim = _dim(src, dim)
    if dim > 1:
        return src.set_value(src.storage.value().index_select(dim - 1, idx), layout="coo")
    storage = src.storage
    offsets, counts = ((storage.rowptr(), storage.rowcount()) if dim == 0
                       else (storage.colptr(), storage.colcount()))
    counts = counts[idx]
    entry = ranges(offsets[idx], counts)
    group = torch.repeat_interleave(counts, output_size=entry.numel())
    sizes = _with_size(src, dim, idx.numel())
    if dim == 0:
        return _part(src, entry, sizes, taken_row=group)
    entry = storage.csr2csc()[entry]
    order = row_major(storage.row()[entry], group, sizes)
    return _part(src, entry[order], sizes, taken_col=group[order])


def index_select_nnz(src, idx: Tensor, layout: str | None = None):
    """The entries ``idx``, counted in the order of ``layout``."""
    if get_layout(layout) == "csc":
        idx = src.storage.csc2csr()[idx]
    return _part(src, idx, src.sparse_sizes())


def masked_select(src, dim: int, mask: Tensor):
    """The rows, columns or places of the values where ``mask``, bool of one dimension, is true.
    Raises IndexError for a mask of another length."""
    if mask.shape != (src.size(_dim(src, dim)),):
        raise IndexError(f"a mask of {list(mask.shape)} for dimension {dim}, of size "
                         f"{src.size(dim)}")
    return index_select(src, dim, mask.nonzero().flatten())


def masked_select_nnz(src, mask: Tensor, layout: str | None = None):
    """The entries where ``mask``, bool in the order of ``layout``, is true."""
    if get_layout(layout) == "csc":
        mask = mask[src.storage.csc2csr()]
    return _masked(src, mask, src.sparse_sizes())


def permute(src, perm: Tensor):
    """Rows and columns of a quadratic matrix in the order ``perm``."""
    if not src.is_quadratic():
        raise ValueError(f"rows and columns of a matrix of {src.sparse_sizes()} cannot have one "
                         "order; it must be quadratic")
    return index_select(index_select(src, 0, perm), 1, perm)


def get_item(src, index: Any):
    """``src[index]``: ids, slices without steps, masks, lists, arrays and one ellipsis; a single id
    keeps its dimension. Raises IndexError and ValueError for other indices."""
    items = list(index) if isinstance(index, tuple) else [index]
    if sum(item is Ellipsis for item in items) > 1:
        raise IndexError("an index takes one ellipsis only")
    if len(items) - (Ellipsis in [i for i in items if i is Ellipsis]) > src.dim():
        raise IndexError(f"{len(items)} indices for a sparse tensor of {src.dim()} dimensions")
    dim, part = 0, src
    for place, item in enumerate(items):
        if item is Ellipsis:
            dim = src.dim() - (len(items) - place - 1)
        else:
            part = _item(part, dim, item)
            dim += 1
    return part


def _item(src, dim: int, item: Any):
    if isinstance(item, slice):
        if item.step not in (None, 1):
            raise ValueError(f"a slice with step {item.step} of a sparse tensor; select by ids "
                             "instead")
        start, stop, _ = item.indices(src.size(dim))
        return narrow(src, dim, start, max(stop - start, 0))
    if isinstance(item, int):
        if not -src.size(dim) <= item < src.size(dim):
            raise IndexError(f"id {item} is not within dimension {dim}, of size {src.size(dim)}")
        return select(src, dim, item)
    if not isinstance(item, Tensor):
        item = torch.as_tensor(item, device="cpu")
    item = item.to(src.device())
    return masked_select(src, dim, item) if item.dtype == torch.bool else index_select(
        src, dim, item.long())


def ranges(starts: Tensor, counts: Tensor) -> Tensor:
    """``starts[i], starts[i] + 1, ...``, ``counts[i]`` of them, for one i after the other."""
    ends = counts.cumsum(0)
    total = int(ends[-1]) if counts.numel() else 0
    shift = torch.repeat_interleave(starts - ends + counts, counts, output_size=total)
    return torch.arange(total, device=counts.device) + shift


def _dim(src, dim: int) -> int:
    if not -src.dim() <= dim < src.dim():
        raise IndexError(f"dimension {dim} of a sparse tensor with {src.dim()} dimensions")
    return dim + src.dim() if dim < 0 else dim


def _with_size(src, dim: int, size: int) -> tuple[int, int]:
    rows, cols = src.sparse_sizes()
    return (size, cols) if dim == 0 else (rows, size)


def _masked(src, mask: Tensor, sizes: tuple[int, int], col: Tensor | None = None):
    return _part(src, mask, sizes, col=col)


def _part(src, which, sizes, row=None, col=None, taken_row=None, taken_col=None):
    """The entries ``which`` of a matrix, of rows ``row`` and columns ``col`` if given, else its
    own. ``taken_row`` and ``taken_col`` are of these entries already."""
    old_row, old_col, value = src.coo()
    if taken_row is None:
        taken_row = (old_row if row is None else row)[which]
    if taken_col is None:
        taken_col = (old_col if col is None else col)[which]
    return type(src)(row=taken_row, col=taken_col, value=None if value is None else value[which],
                     sparse_sizes=sizes, is_sorted=True, trust_data=True)
