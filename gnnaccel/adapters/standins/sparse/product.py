"""Products of a sparse matrix with a dense or another sparse one.

Sums of fp32 and fp64 rows run as torch's product by a CSR matrix, all else by gathering and
scattering. Gradients of any order go to the dense matrix and to the values.
"""
from __future__ import annotations

import warnings

import torch
from torch import Tensor

from gnnaccel.adapters.standins.scatter.reduce import extremum, unknown
from gnnaccel.adapters.standins.scatter.segment import _trailing
from gnnaccel.dispatch.run.autograd import Closed

_REDUCES = ("sum", "add", "mean", "min", "max")
warnings.filterwarnings("ignore", ".*Sparse CSR tensor support is in beta state.*")


def matmul(src, other, reduce: str = "sum"):
    """``src @ other``: `spmm` for a tensor, `spspmm` for a sparse matrix."""
    if isinstance(other, Tensor):
        return spmm(src, other, reduce)
    if isinstance(other, type(src)):
        return spspmm(src, other, reduce)
    raise ValueError(f"a sparse tensor cannot be multiplied by a {type(other).__name__}; pass a "
                     "tensor or a SparseTensor")


def spmm(src, other: Tensor, reduce: str = "sum") -> Tensor:
    """[..., rows, width]: for each row the sum, mean, minimum or maximum of ``value * other[col]``
    over its entries; 0 where there are none. ``other``: [..., columns, width] or [columns].

    Raises ValueError for another ``reduce``, other sizes and values of further dimensions.
    """
    if reduce not in _REDUCES:
        raise unknown(reduce, _REDUCES)
    if other.dim() == 1:
        return spmm(src, other.unsqueeze(-1), reduce).squeeze(-1)
    if other.size(-2) != src.sparse_size(1) or src.dim() > 2:
        raise ValueError(f"a sparse tensor of {src.sizes()} cannot be multiplied by a tensor of "
                         f"{list(other.shape)}; it needs {src.sparse_size(1)} rows, and one value "
                         "per entry")
    if reduce in ("min", "max"):
        return _extremum(src, other, reduce == "max")
    total = _sums(src, other)
    if reduce != "mean":
        return total
    return total / src.storage.rowcount().clamp(min=1).to(other.dtype).unsqueeze(-1)


def spspmm(src, other, reduce: str = "sum"):
    """The product of two sparse matrices; without values if neither has any. Raises ValueError for
    sizes that do not fit, NotImplementedError for "mean", "min" and "max"."""
    if reduce not in ("sum", "add"):
        if reduce in _REDUCES:
            raise NotImplementedError(f"reduce={reduce!r} of two sparse tensors; use \"sum\"")
        raise unknown(reduce, _REDUCES)
    if src.sparse_size(1) != other.sparse_size(0):
        raise ValueError(f"a sparse tensor of {src.sizes()} cannot be multiplied by one of "
                         f"{other.sizes()}")
    dtype = torch.promote_types(src.dtype(), other.dtype())
    through = dtype if dtype in (torch.float32, torch.float64) else torch.float64
    first, second = (matrix.to_torch_sparse_coo_tensor().to(through).coalesce()
                     for matrix in (src, other))
    product = torch.sparse.mm(first, second).coalesce()
    row, col = product.indices()
    value = product.values().to(dtype) if src.has_value() or other.has_value() else None
    return type(src)(row=row, col=col, value=value, sparse_sizes=tuple(product.shape),
                     is_sorted=True, trust_data=True)


# --- sums -----------------------------------------------------------------------------------------

def _sums(src, other: Tensor) -> Tensor:
    value = src.storage.value()
    value = None if value is None else value.to(other.dtype)
    if _by_csr(src, other):
        wanted = torch.is_grad_enabled() and other.requires_grad
        arrays = _Arrays(src, transposed=wanted)
        if value is None:
            value = torch.ones(src.nnz(), dtype=other.dtype, device=other.device)
        return _Sums(arrays).apply(value, other)
    row, col, _ = src.coo()
    messages = other.index_select(-2, col)
    if value is not None:
        messages = messages * value.unsqueeze(-1)
    shape = (*other.shape[:-2], src.sparse_size(0), other.size(-1))
    return other.new_zeros(shape).index_add(-2, row, messages)


def _by_csr(src, other: Tensor) -> bool:
    return (other.dim() == 2 and other.dtype in (torch.float32, torch.float64) and src.nnz() > 0
            and (other.is_cuda or other.is_cpu and torch.backends.mkl.is_available()))


class _Arrays:
    """Index arrays of a matrix and, if ``transposed``, of its transpose, which backward needs."""

    def __init__(self, src, transposed: bool):
        self.src = src
        self.rowptr, self.col, _ = src.csr()
        if transposed:
            src.storage.colptr()

    def csr(self, value: Tensor) -> Tensor:
        return torch.sparse_csr_tensor(self.rowptr, self.col, value, self.src.sparse_sizes(),
                                       device=value.device, check_invariants=False)

    def flipped(self) -> _Arrays:
        return _Arrays(self.src.set_value(None).t(), transposed=False)


class _Sums(Closed):
    """The product of a CSR matrix with a dense one. Its gradients are such products again, and
    products of pairs of rows."""

    __slots__ = ("arrays",)

    def __init__(self, arrays: _Arrays):
        self.arrays = arrays

    def forward(self, needs, value, other):
        return torch.sparse.mm(self.arrays.csr(value.detach()), other), (value, other)

    def backward(self, needs, saved, grad):
        arrays, (value, other) = self.arrays, saved
        to_value = to_other = None
        if needs[0]:
            row, col, _ = arrays.src.coo()
            to_value = (grad.index_select(0, row) * other.index_select(0, col)).sum(-1)
        if needs[1]:
            order = arrays.src.storage.csr2csc()
            to_other = _Sums(arrays.flipped()).apply(value.index_select(0, order), grad)
        return to_value, to_other


# --- extrema --------------------------------------------------------------------------------------

def _extremum(src, other: Tensor, greatest: bool) -> Tensor:
    row, col, value = src.coo()
    messages = other.index_select(-2, col)
    if value is not None:
        messages = messages * value.to(other.dtype).unsqueeze(-1)
    index = _trailing(row, messages.movedim(-2, 0)).movedim(0, -2)
    return extremum(messages, index, messages.dim() - 2, None, src.sparse_size(0), greatest)[0]
