"""The arrays behind a `SparseTensor`: entries sorted by row and column, and arrays derived from
them, each when first asked for.

Attributes are called as in torch_sparse 0.6.18, so that pickles go both ways. The stand-in's
`_value` may be of any dtype; all index arrays are int64.
"""
from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from gnnaccel.adapters.standins.scatter.segment import segment_csr

_INDICES = ("_row", "_rowptr", "_col", "_rowcount", "_colptr", "_colcount", "_csr2csc", "_csc2csr")
_CACHED = ("_rowcount", "_colptr", "_colcount", "_csr2csc", "_csc2csr")


def get_layout(layout: str | None = None) -> str:
    """``layout`` if it is "coo", "csr" or "csc"; "coo" with a warning if it is None. Raises
    ValueError otherwise."""
    if layout is None:
        warnings.warn('layout is not given and taken to be "coo"; pass layout="coo", "csr" or '
                      '"csc"', stacklevel=3)
        return "coo"
    if layout not in ("coo", "csr", "csc"):
        raise ValueError(f'layout={layout!r} is not known; use "coo", "csr" or "csc"')
    return layout


def _has(name: str) -> Callable[[SparseStorage], bool]:
    """The method that returns whether the array of this name is there."""
    return lambda self: getattr(self, name) is not None


class SparseStorage:
    """Entries of a sparse matrix.

    ``row`` or ``rowptr``, and ``col``: int64 of one dimension. ``value``: one entry per column id,
    or None. ``sparse_sizes``: numbers of rows and of columns, found out where None. Entries are
    sorted unless ``is_sorted``; ids are checked against the sizes unless ``trust_data``. Raises
    ValueError for arrays that do not fit together.
    """

    def __init__(self, row: Tensor | None = None, rowptr: Tensor | None = None,
                 col: Tensor | None = None, value: Tensor | None = None,
                 sparse_sizes: tuple[int | None, int | None] | None = None,
                 rowcount: Tensor | None = None, colptr: Tensor | None = None,
                 colcount: Tensor | None = None, csr2csc: Tensor | None = None,
                 csc2csr: Tensor | None = None, is_sorted: bool = False,
                 trust_data: bool = False) -> None:
        if col is None or (row is None and rowptr is None):
            raise ValueError("a sparse matrix needs col and either row or rowptr")
        rows, cols = sparse_sizes if sparse_sizes is not None else (None, None)
        if rows is None:
            rows = _size(row) if rowptr is None else rowptr.numel() - 1
        if cols is None:
            cols = _size(col)
        count = col.numel()
        for name, array, length in (
                ("row", row, count), ("rowptr", rowptr, rows + 1), ("col", col, count),
                ("rowcount", rowcount, rows), ("colptr", colptr, cols + 1),
                ("colcount", colcount, cols), ("csr2csc", csr2csc, count),
                ("csc2csr", csc2csr, count)):
            _check_index(name, array, length, col.device)
        if not trust_data:
            _check_ids("row", row, rows)
            _check_ids("col", col, cols)
        _check_value(value, count, col.device)
        self._row = _contiguous(row)
        self._rowptr = _contiguous(rowptr)
        self._col = col.contiguous()
        self._value = _contiguous(value)
        self._sparse_sizes = (int(rows), int(cols))
        self._rowcount = _contiguous(rowcount)
        self._colptr = _contiguous(colptr)
        self._colcount = _contiguous(colcount)
        self._csr2csc = _contiguous(csr2csc)
        self._csc2csr = _contiguous(csc2csr)
        if not is_sorted:
            self._sort()

    @classmethod
    def empty(cls) -> SparseStorage:
        """A matrix without rows and columns, on the CPU."""
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        return cls(row=none, col=none, sparse_sizes=(0, 0), is_sorted=True, trust_data=True)

    def _sort(self) -> None:
        row, col = self.row(), self._col
        if not bool(((row[1:] < row[:-1])
                     | ((row[1:] == row[:-1]) & (col[1:] < col[:-1]))).any()):
            return
        order = row_major(row, col, self._sparse_sizes)
        self._row, self._col = row[order], col[order]
        if self._value is not None:
            self._value = self._value[order]
        self._csr2csc = self._csc2csr = None

    has_row, has_rowptr, has_value = _has("_row"), _has("_rowptr"), _has("_value")
    has_rowcount, has_colptr, has_colcount = _has("_rowcount"), _has("_colptr"), _has("_colcount")
    has_csr2csc, has_csc2csr = _has("_csr2csc"), _has("_csc2csr")

    # --- index arrays -----------------------------------------------------------------------------

    def row(self) -> Tensor:
        """Row of each entry."""
        if self._row is None:
            self._row = torch.repeat_interleave(self.rowcount(), output_size=self._col.numel())
        return self._row

    def rowptr(self) -> Tensor:
        """Offsets of the rows, [rows + 1]: where each begins, and the end of the last."""
        if self._rowptr is None:
            self._rowptr = _offsets(torch.bincount(self.row(), minlength=self._sparse_sizes[0]))
        return self._rowptr

    def col(self) -> Tensor:
        """Column of each entry."""
        return self._col

    def rowcount(self) -> Tensor:
        """Number of entries of each row."""
        if self._rowcount is None:
            self._rowcount = self.rowptr().diff()
        return self._rowcount

    def colptr(self) -> Tensor:
        """Offsets of the columns, [columns + 1], among the entries sorted by column."""
        if self._colptr is None:
            self._colptr = _offsets(self.colcount())
        return self._colptr

    def colcount(self) -> Tensor:
        """Number of entries of each column."""
        if self._colcount is None:
            if self._colptr is not None:
                self._colcount = self._colptr.diff()
            else:
                self._colcount = torch.bincount(self._col, minlength=self._sparse_sizes[1])
        return self._colcount

    def csr2csc(self) -> Tensor:
        """The order that sorts the entries by column, then row."""
        if self._csr2csc is None:
            self._csr2csc = self._col.argsort(stable=True)
        return self._csr2csc

    def csc2csr(self) -> Tensor:
        """The order that undoes `csr2csc`."""
        if self._csc2csr is None:
            self._csc2csr = self.csr2csc().argsort()
        return self._csc2csr

    # --- values and sizes -------------------------------------------------------------------------

    def value(self) -> Tensor | None:
        """Value of each entry; None where all are one."""
        return self._value

    def set_value_(self, value: Tensor | None, layout: str | None = None) -> SparseStorage:
        """Set other values, in place; in the order of columns for ``layout="csc"``."""
        if value is not None:
            _check_value(value, self._col.numel(), self._col.device)
            if get_layout(layout) == "csc":
                value = value[self.csc2csr()]
        self._value = _contiguous(value)
        return self

    def set_value(self, value: Tensor | None, layout: str | None = None) -> SparseStorage:
        """A copy over the same index arrays with other values."""
        return self.copy().set_value_(value, layout)

    def sparse_sizes(self) -> tuple[int, int]:
        return self._sparse_sizes

    def sparse_size(self, dim: int) -> int:
        return self._sparse_sizes[dim]

    def sparse_resize(self, sparse_sizes: tuple[int, int]) -> SparseStorage:
        """A matrix of other sizes with these entries. Entries outside are not looked for."""
        return SparseStorage(row=self.row(), col=self._col, value=self._value,
                             sparse_sizes=sparse_sizes, is_sorted=True, trust_data=True)

    def sparse_reshape(self, num_rows: int, num_cols: int) -> SparseStorage:
        """A matrix of other sizes with these entries in row-major order; one size may be -1.
        Raises ValueError where the numbers of elements differ."""
        total = self._sparse_sizes[0] * self._sparse_sizes[1]
        if num_rows == -1 and num_cols > 0:
            num_rows = total // num_cols
        elif num_cols == -1 and num_rows > 0:
            num_cols = total // num_rows
        if num_rows * num_cols != total or num_rows < 0:
            raise ValueError(f"a matrix of {self._sparse_sizes} cannot be reshaped to "
                             f"({num_rows}, {num_cols})")
        place = self.row() * self._sparse_sizes[1] + self._col
        return SparseStorage(row=place // num_cols, col=place % num_cols, value=self._value,
                             sparse_sizes=(num_rows, num_cols), is_sorted=True, trust_data=True)

    def is_coalesced(self) -> bool:
        """Whether no entry comes twice."""
        return bool(self._first().all())

    def coalesce(self, reduce: str = "add") -> SparseStorage:
        """The matrix with entries that come several times made one, by the "sum", "mean", "min" or
        "max" of their values. The matrix itself if there are none."""
        first = self._first()
        if bool(first.all()):
            return self
        value = self._value
        if value is not None:
            begins = first.nonzero().flatten()
            value = segment_csr(value, torch.cat([begins, begins.new_tensor([first.numel()])]),
                                reduce=reduce)
        return SparseStorage(row=self.row()[first], col=self._col[first], value=value,
                             sparse_sizes=self._sparse_sizes, is_sorted=True, trust_data=True)

    def _first(self) -> Tensor:
        """Whether each entry is at another place than the one before, [entries] bool."""
        row, col = self.row(), self._col
        first = torch.ones_like(col, dtype=torch.bool)
        first[1:] = (row[1:] != row[:-1]) | (col[1:] != col[:-1])
        return first

    def fill_cache_(self) -> SparseStorage:
        """Derive all index arrays now."""
        for derive in (self.row, self.rowptr, self.rowcount, self.colptr, self.colcount,
                       self.csr2csc, self.csc2csr):
            derive()
        return self

    def clear_cache_(self) -> SparseStorage:
        """Forget the derived arrays, but for rows and their offsets."""
        for name in _CACHED:
            setattr(self, name, None)
        return self

    def cached_keys(self) -> list[str]:
        return [name[1:] for name in _CACHED if getattr(self, name) is not None]

    def num_cached_keys(self) -> int:
        return len(self.cached_keys())

    # --- copies -----------------------------------------------------------------------------------

    def mapped(self, indices: Callable, values: Callable | None = None) -> SparseStorage:
        """A copy whose index arrays went through ``indices`` and values through ``values``."""
        new = object.__new__(type(self))
        new._sparse_sizes = self._sparse_sizes
        for name in (*_INDICES, "_value"):
            array = getattr(self, name)
            through = values if name == "_value" and values is not None else indices
            setattr(new, name, None if array is None else through(array))
        return new

    def copy(self) -> SparseStorage:
        return self.mapped(lambda array: array)

    def clone(self) -> SparseStorage:
        return self.mapped(Tensor.clone)

    def type(self, dtype: torch.dtype, non_blocking: bool = False) -> SparseStorage:
        """A copy with values of another dtype."""
        return self.mapped(lambda array: array,
                           lambda array: array.to(dtype, non_blocking=non_blocking))

    def type_as(self, tensor: Tensor, non_blocking: bool = False) -> SparseStorage:
        return self.type(tensor.dtype, non_blocking)

    def to_device(self, device: torch.device | str, non_blocking: bool = False) -> SparseStorage:
        return self.mapped(lambda array: array.to(device, non_blocking=non_blocking))

    def device_as(self, tensor: Tensor, non_blocking: bool = False) -> SparseStorage:
        return self.to_device(tensor.device, non_blocking)

    def cuda(self) -> SparseStorage:
        return self.mapped(lambda array: array.cuda())

    def pin_memory(self) -> SparseStorage:
        return self.mapped(lambda array: array.pin_memory())

    def is_pinned(self) -> bool:
        return all(array.is_pinned() for array in self._arrays())

    def share_memory_(self) -> SparseStorage:
        for array in self._arrays():
            array.share_memory_()
        return self

    def is_shared(self) -> bool:
        return all(array.is_shared() for array in self._arrays())

    def _arrays(self) -> list[Tensor]:
        arrays = (getattr(self, name) for name in (*_INDICES, "_value"))
        return [array for array in arrays if array is not None]


def row_major(row: Tensor, col: Tensor, sizes: tuple[int, int]) -> Tensor:
    """The order that sorts entries by row, then column; equal ones keep their order."""
    if sizes[0] * sizes[1] < 2**63:
        return (row * sizes[1] + col).argsort(stable=True)
    order = col.argsort(stable=True)
    return order[row[order].argsort(stable=True)]


def _size(ids: Tensor | None) -> int:
    return int(ids.max()) + 1 if ids is not None and ids.numel() else 0


def _offsets(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _contiguous(array: Tensor | None) -> Tensor | None:
    return None if array is None else array.contiguous()


def _check_index(name: str, array: Tensor | None, length: int, device: torch.device) -> None:
    if array is None:
        return
    if array.dtype != torch.int64 or array.dim() != 1 or array.device != device:
        raise ValueError(f"{name} is {array.dtype} {list(array.shape)} on {array.device}; it must "
                         f"be int64 of one dimension on the device of col, {device}")
    if array.numel() != length:
        raise ValueError(f"{name} has {array.numel()} entries; {length} are needed")


def _check_ids(name: str, ids: Tensor | None, size: int) -> None:
    if ids is not None and ids.numel():
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if low < 0 or high >= size:
            raise ValueError(f"{name} holds ids from {low} to {high}, but sparse_sizes allow 0 to "
                             f"{size - 1}; correct the ids or pass larger sparse_sizes")


def _check_value(value: Tensor | None, count: int, device: torch.device) -> None:
    if value is not None and (value.dim() == 0 or value.size(0) != count
                              or value.device != device):
        raise ValueError(f"value is {list(value.shape)} on {value.device}; its first dimension "
                         f"must be the number of entries, {count}, on {device}")
