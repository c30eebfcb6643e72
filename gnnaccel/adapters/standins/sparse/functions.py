"""Functions of torch_sparse that take a matrix as ``index`` [2, entries] and ``value``."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.standins.scatter.reduce import scatter_sum
from gnnaccel.adapters.standins.sparse import product
from gnnaccel.adapters.standins.sparse.selecting import t as t
from gnnaccel.adapters.standins.sparse.storage import SparseStorage
from gnnaccel.adapters.standins.sparse.tensor import SparseTensor


def coalesce(index: Tensor, value: Tensor | None, m: int, n: int,
             op: str = "add") -> tuple[Tensor, Tensor | None]:
    """(index, value) of an ``m`` by ``n`` matrix, sorted by row, with entries that come several
    times made one; ``op`` ("add", "mean", "min" or "max") combines their values."""
    storage = SparseStorage(row=index[0], col=index[1], value=value, sparse_sizes=(m, n))
    storage = storage.coalesce(reduce=op)
    return torch.stack([storage.row(), storage.col()]), storage.value()


def transpose(index: Tensor, value: Tensor | None, m: int, n: int,
              coalesced: bool = True) -> tuple[Tensor, Tensor | None]:
    """(index, value) of the transpose of an ``m`` by ``n`` matrix, sorted and coalesced unless
    ``coalesced`` is False."""
    index = torch.stack([index[1], index[0]])
    return coalesce(index, value, n, m) if coalesced else (index, value)


def eye(m: int, dtype: torch.dtype | None = None, device: Any = None) -> tuple[Tensor, Tensor]:
    """(index, value) of ``m`` ones on the diagonal."""
    place = torch.arange(m, device=device)
    return torch.stack([place, place]), torch.ones(m, dtype=dtype, device=device)


def spmm(index: Tensor, value: Tensor, m: int, n: int, matrix: Tensor) -> Tensor:
    """[..., m, width]: the product of an ``m`` by ``n`` matrix with ``matrix`` [..., n, width] or
    [n], which counts as [n, 1]. Raises ValueError where ``matrix`` has not n rows."""
    matrix = matrix.unsqueeze(-1) if matrix.dim() < 2 else matrix
    if matrix.size(-2) != n:
        raise ValueError(f"matrix has {matrix.size(-2)} rows; n={n} are needed")
    messages = matrix.index_select(-2, index[1]) * value.unsqueeze(-1)
    return scatter_sum(messages, index[0], -2, dim_size=m)


def spspmm(indexA: Tensor, valueA: Tensor, indexB: Tensor, valueB: Tensor, m: int, k: int, n: int,
           coalesced: bool = False) -> tuple[Tensor, Tensor | None]:
    """(index, value) of the product of an ``m`` by ``k`` and a ``k`` by ``n`` matrix. Entries are
    sorted and joined first, whatever ``coalesced`` says."""
    first = SparseTensor(row=indexA[0], col=indexA[1], value=valueA, sparse_sizes=(m, k))
    second = SparseTensor(row=indexB[0], col=indexB[1], value=valueB, sparse_sizes=(k, n))
    row, col, value = product.spspmm(first, second).coo()
    return torch.stack([row, col]), value


def spadd(indexA: Tensor, valueA: Tensor, indexB: Tensor, valueB: Tensor, m: int,
          n: int) -> tuple[Tensor, Tensor | None]:
    """(index, value) of the sum of two ``m`` by ``n`` matrices."""
    return coalesce(torch.cat([indexA, indexB], -1), torch.cat([valueA, valueB]), m, n)


def to_torch_sparse(index: Tensor, value: Tensor, m: int, n: int) -> Tensor:
    """A COO tensor of torch."""
    return torch.sparse_coo_tensor(index.detach(), value, (m, n), device=value.device)


def from_torch_sparse(A: Tensor) -> tuple[Tensor, Tensor]:
    """(index, value) of a coalesced COO tensor of torch."""
    return A.indices().detach(), A.values()


def to_scipy(index: Tensor, value: Tensor, m: int, n: int) -> Any:
    """A COO matrix of SciPy. Raises ImportError without SciPy."""
    import scipy.sparse

    row, col = index.detach().cpu().numpy()
    return scipy.sparse.coo_matrix((value.detach().cpu().numpy(), (row, col)), (m, n))


def from_scipy(A: Any) -> tuple[Tensor, Tensor]:
    """(index, value) of a sparse matrix of SciPy."""
    A = A.tocoo()
    index = torch.stack([torch.as_tensor(ids, device="cpu").long() for ids in (A.row, A.col)])
    return index, torch.as_tensor(A.data, device="cpu")
