"""`SparseTensor`: a sparse matrix of entries, sorted by row, that may have values of any shape.

The interface is that of torch_sparse 0.6.18. `device`, `dtype`, `requires_grad` and `is_cuda` are
methods, as there.
"""
from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gnnaccel.adapters.standins.sparse.methods import Casts, Operations
from gnnaccel.adapters.standins.sparse.storage import SparseStorage, get_layout

if TYPE_CHECKING:
    import builtins


class SparseTensor(Casts, Operations):
    """A sparse matrix.

    ``row`` or ``rowptr``, and ``col``: int64 of one dimension. ``value``: [entries, ...] of any
    dtype; None for ones. ``sparse_sizes``: (rows, columns), found out where None. ``is_sorted``:
    the entries are sorted by row and column. ``trust_data``: ids are not checked. Raises ValueError
    for arrays that do not fit together.
    """

    storage: SparseStorage

    def __init__(self, row: Tensor | None = None, rowptr: Tensor | None = None,
                 col: Tensor | None = None, value: Tensor | None = None,
                 sparse_sizes: tuple[int | None, int | None] | None = None,
                 is_sorted: bool = False, trust_data: bool = False) -> None:
        self.storage = SparseStorage(row=row, rowptr=rowptr, col=col, value=value,
                                     sparse_sizes=sparse_sizes, is_sorted=is_sorted,
                                     trust_data=trust_data)

    # --- construction -----------------------------------------------------------------------------

    @classmethod
    def from_storage(cls, storage: SparseStorage) -> SparseTensor:
        """A matrix over the arrays of ``storage``."""
        new = object.__new__(cls)
        new.storage = storage.copy()
        return new

    @classmethod
    def from_edge_index(cls, edge_index: Tensor, edge_attr: Tensor | None = None,
                        sparse_sizes: tuple[int | None, int | None] | None = None,
                        is_sorted: builtins.bool = False,
                        trust_data: builtins.bool = False) -> SparseTensor:
        """A matrix with rows and columns ``edge_index`` [2, edges] and values ``edge_attr``."""
        return cls(row=edge_index[0], col=edge_index[1], value=edge_attr,
                   sparse_sizes=sparse_sizes, is_sorted=is_sorted, trust_data=trust_data)

    @classmethod
    def from_dense(cls, mat: Tensor, has_value: builtins.bool = True) -> SparseTensor:
        """The entries of ``mat`` [rows, columns, ...] that are not all zero."""
        filled = mat.detach() != 0
        row, col = (filled.flatten(2).any(-1) if mat.dim() > 2 else filled).nonzero().unbind(1)
        return cls(row=row, col=col, value=mat[row, col] if has_value else None,
                   sparse_sizes=(mat.size(0), mat.size(1)), is_sorted=True, trust_data=True)

    @classmethod
    def from_torch_sparse_coo_tensor(cls, mat: Tensor,
                                     has_value: builtins.bool = True) -> SparseTensor:
        mat = mat.coalesce()
        row, col = mat.indices()
        return cls(row=row, col=col, value=mat.values() if has_value else None,
                   sparse_sizes=(mat.size(0), mat.size(1)), is_sorted=True, trust_data=True)

    @classmethod
    def from_torch_sparse_csr_tensor(cls, mat: Tensor,
                                     has_value: builtins.bool = True) -> SparseTensor:
        return cls(rowptr=mat.crow_indices().long(), col=mat.col_indices().long(),
                   value=mat.values() if has_value else None,
                   sparse_sizes=(mat.size(0), mat.size(1)), is_sorted=True, trust_data=True)

    @classmethod
    def eye(cls, M: int, N: int | None = None, has_value: builtins.bool = True,
            dtype: torch.dtype | None = None, device: Any = None,
            fill_cache: builtins.bool = False) -> SparseTensor:
        """Ones on the diagonal of a matrix of ``M`` rows and ``N`` columns, ``M`` by default."""
        N = M if N is None else N
        place = torch.arange(min(M, N), device=device)
        value = torch.ones(place.numel(), dtype=dtype, device=device) if has_value else None
        new = cls(row=place, col=place, value=value, sparse_sizes=(M, N), is_sorted=True,
                  trust_data=True)
        return new.fill_cache_() if fill_cache else new

    @classmethod
    def from_scipy(cls, mat: Any, has_value: builtins.bool = True) -> SparseTensor:
        """A matrix with the entries of a sparse matrix of SciPy."""
        mat = mat.tocoo()
        row, col = (torch.as_tensor(ids, device="cpu").long() for ids in (mat.row, mat.col))
        value = torch.as_tensor(mat.data, device="cpu") if has_value else None
        return cls(row=row, col=col, value=value, sparse_sizes=tuple(mat.shape))

    def copy(self) -> SparseTensor:
        """Another object over the same arrays."""
        return self.from_storage(self.storage)

    def clone(self) -> SparseTensor:
        return self.from_storage(self.storage.clone())

    # --- its arrays -------------------------------------------------------------------------------

    def coo(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """(row, column, value or None) of each entry."""
        return self.storage.row(), self.storage.col(), self.storage.value()

    def csr(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """(where rows begin, column, value or None)."""
        return self.storage.rowptr(), self.storage.col(), self.storage.value()

    def csc(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """(where columns begin, row, value or None) of the entries sorted by column."""
        order, value = self.storage.csr2csc(), self.storage.value()
        return (self.storage.colptr(), self.storage.row()[order],
                None if value is None else value[order])

    def has_value(self) -> builtins.bool:
        return self.storage.has_value()

    def set_value_(self, value: Tensor | None, layout: str | None = None) -> SparseTensor:
        """Set other values, in place; in the order of columns for ``layout="csc"``."""
        self.storage.set_value_(value, layout)
        return self

    def set_value(self, value: Tensor | None, layout: str | None = None) -> SparseTensor:
        """A copy of the matrix with other values."""
        return self.from_storage(self.storage.set_value(value, layout))

    def fill_value_(self, fill_value: float, dtype: torch.dtype | None = None) -> SparseTensor:
        """Set one number for all entries, in place."""
        return self.set_value_(self._filled(fill_value, dtype), layout="coo")

    def fill_value(self, fill_value: float, dtype: torch.dtype | None = None) -> SparseTensor:
        """A copy of the matrix with one number for all entries."""
        return self.set_value(self._filled(fill_value, dtype), layout="coo")

    def _filled(self, number: float, dtype: torch.dtype | None) -> Tensor:
        return torch.full((self.nnz(),), number, dtype=dtype, device=self.device())

    def fill_cache_(self) -> SparseTensor:
        """Derive all index arrays now."""
        self.storage.fill_cache_()
        return self

    def clear_cache_(self) -> SparseTensor:
        self.storage.clear_cache_()
        return self

    def is_coalesced(self) -> builtins.bool:
        """Whether no entry comes twice."""
        return self.storage.is_coalesced()

    def coalesce(self, reduce: str = "sum") -> SparseTensor:
        """The matrix with entries that come several times made one, by the "sum", "mean", "min" or
        "max" of their values."""
        return self.from_storage(self.storage.coalesce(reduce))

    # --- sizes ------------------------------------------------------------------------------------

    def sparse_sizes(self) -> tuple[int, int]:
        return self.storage.sparse_sizes()

    def sparse_size(self, dim: int) -> int:
        return self.storage.sparse_size(dim)

    def sparse_resize(self, sparse_sizes: tuple[int, int]) -> SparseTensor:
        return self.from_storage(self.storage.sparse_resize(sparse_sizes))

    def sparse_reshape(self, num_rows: int, num_cols: int) -> SparseTensor:
        return self.from_storage(self.storage.sparse_reshape(num_rows, num_cols))

    def sizes(self) -> list[int]:
        """Rows, columns, and the further dimensions of the values."""
        value = self.storage.value()
        return [*self.sparse_sizes(), *(() if value is None else value.shape[1:])]

    def size(self, dim: int) -> int:
        return self.sizes()[dim]

    def dim(self) -> int:
        return len(self.sizes())

    def nnz(self) -> int:
        """Number of entries."""
        return self.storage.col().numel()

    def numel(self) -> int:
        """Number of values."""
        value = self.storage.value()
        return self.nnz() if value is None else value.numel()

    def density(self) -> float:
        places = self.sparse_size(0) * self.sparse_size(1)
        return self.nnz() / places if places else 0.0

    def sparsity(self) -> float:
        return 1 - self.density()

    def avg_row_length(self) -> float:
        return self.nnz() / self.sparse_size(0)

    def avg_col_length(self) -> float:
        return self.nnz() / self.sparse_size(1)

    def bandwidth(self) -> int:
        """Distance of the farthest entry from the diagonal."""
        return int(self._distances().max())

    def avg_bandwidth(self) -> float:
        return float(self._distances().float().mean())

    def bandwidth_proportion(self, bandwidth: int) -> float:
        """Share of the entries that are no farther from the diagonal."""
        return int((self._distances() <= bandwidth).sum()) / self.nnz()

    def _distances(self) -> Tensor:
        return (self.storage.row() - self.storage.col()).abs()

    def is_quadratic(self) -> builtins.bool:
        return self.sparse_size(0) == self.sparse_size(1)

    # --- equality, text ---------------------------------------------------------------------------

    def __eq__(self, other: object) -> builtins.bool:
        """Whether sizes, entries and values are the same."""
        if not isinstance(other, SparseTensor) or self.sizes() != other.sizes():
            return False
        pairs = zip(self.csr(), other.csr())
        return all(torch.equal(mine, its) if mine is not None and its is not None else mine is its
                   for mine, its in pairs)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        names = zip(("row", "col", "val"), self.coo())
        parts = [f"{name}=" + textwrap.indent(repr(array), " " * 6)[6:]
                 for name, array in names if array is not None]
        parts.append(f"size={tuple(self.sizes())}, nnz={self.nnz()}, "
                     f"density={100 * self.density():.02f}%")
        return "SparseTensor(" + textwrap.indent(",\n".join(parts), " " * 13)[13:] + ")"

    # --- conversion -------------------------------------------------------------------------------

    def to_dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """[rows, columns, ...]; ``dtype`` for a matrix without values. Of an entry that comes twice
        one value is taken."""
        row, col, value = self.coo()
        value = self._values(dtype) if value is None else value
        return value.new_zeros(self.sizes()).index_put((row, col), value)

    def to_torch_sparse_coo_tensor(self, dtype: torch.dtype | None = None) -> Tensor:
        row, col, _ = self.coo()
        return torch.sparse_coo_tensor(torch.stack([row, col]), self._values(dtype), self.sizes(),
                                       device=row.device, check_invariants=False)

    def to_torch_sparse_csr_tensor(self, dtype: torch.dtype | None = None) -> Tensor:
        rowptr, col, _ = self.csr()
        return torch.sparse_csr_tensor(rowptr, col, self._values(dtype), self.sizes(),
                                       device=col.device, check_invariants=False)

    def to_torch_sparse_csc_tensor(self, dtype: torch.dtype | None = None) -> Tensor:
        colptr, row, value = self.csc()
        value = self._values(dtype) if value is None else value
        return torch.sparse_csc_tensor(colptr, row, value, self.sizes(), device=row.device,
                                       check_invariants=False)

    def to_scipy(self, layout: str | None = None, dtype: torch.dtype | None = None) -> Any:
        """A matrix of SciPy, with ``layout`` "coo", "csr" or "csc". Raises ValueError where values
        have further dimensions, ImportError without SciPy."""
        import scipy.sparse

        if self.dim() != 2:
            raise ValueError(f"SciPy takes one value per entry; these have {self.sizes()[2:]}")
        row, col, _ = self.coo()
        arrays = (array.detach().cpu().numpy() for array in (self._values(dtype), row, col))
        value, row_ids, col_ids = arrays
        matrix = scipy.sparse.coo_matrix((value, (row_ids, col_ids)), self.sizes())
        return matrix.asformat(get_layout(layout))

    def _values(self, dtype: torch.dtype | None) -> Tensor:
        """The values; ones of ``dtype`` where there are none."""
        value = self.storage.value()
        return torch.ones(self.nnz(), dtype=dtype, device=self.device()) if value is None else value


SparseStorage.__module__ = "torch_sparse.storage"  # where pickles look for them
SparseTensor.__module__ = "torch_sparse.tensor"
torch.serialization.add_safe_globals([SparseTensor, SparseStorage])
