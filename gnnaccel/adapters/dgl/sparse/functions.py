"""The functions of DGL's C++ library for sparse matrices, by their names in ``torch.ops``.

Products with dense matrices, products at entries and softmax are calls of operations over a graph
from columns to rows. They go through the router for operations: with gnnaccel enabled, kernels run
them on a GPU. All else, and everything without it, is torch's own operations.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from gnnaccel.adapters.dgl.sparse.matrix import Matrix, Pattern, at_keys, error, of_compressed
from gnnaccel.adapters.dgl.sparse.matrix import compact as compact
from gnnaccel.adapters.guards import context_reason
from gnnaccel.adapters.standins.sparse import product
from gnnaccel.adapters.standins.sparse.tensor import SparseTensor
from gnnaccel.dispatch.ops import calls, operands, route, torch_ops
from gnnaccel.dispatch.ops.call import OpCall
from gnnaccel.dispatch.policy.config import current
from gnnaccel.dispatch.policy.reasons import Reason

_REDUCES = {"sum": "sum", "smin": "amin", "smax": "amax", "smean": "mean", "sprod": "prod"}


# --- made of tensors ------------------------------------------------------------------------------

def from_coo(indices: Tensor, value: Tensor, shape: Sequence[int]) -> Matrix:
    """The matrix of ``indices`` [2, nnz]: rows and columns."""
    if indices.dim() != 2 or indices.shape[0] != 2:
        raise error(f"indices are of shape {list(indices.shape)}; [2, entries] is needed")
    return Matrix(Pattern(indices, _pair(shape)), value)


def from_csr(indptr: Tensor, indices: Tensor, value: Tensor, shape: Sequence[int]) -> Matrix:
    """The matrix of ``indptr`` [rows + 1] and ``indices`` [nnz]: columns."""
    return of_compressed(indptr, indices, value, _pair(shape), 0)


def from_csc(indptr: Tensor, indices: Tensor, value: Tensor, shape: Sequence[int]) -> Matrix:
    """The matrix of ``indptr`` [columns + 1] and ``indices`` [nnz]: rows."""
    return of_compressed(indptr, indices, value, _pair(shape), 1)


def from_diag(value: Tensor, shape: Sequence[int]) -> Matrix:
    """The diagonal matrix of ``value`` [min(shape)] or [min(shape), channels]."""
    places = torch.arange(min(shape), device=value.device)
    return Matrix(Pattern(torch.stack([places, places]), _pair(shape), diagonal=True), value)


def val_like(matrix: Matrix, value: Tensor) -> Matrix:
    """A matrix with other values at the same places."""
    return Matrix(matrix.pattern, value)


def _pair(shape: Sequence[int]) -> tuple[int, int]:
    if len(shape) != 2:
        raise error(f"the shape is {tuple(shape)}; a sparse matrix has two dimensions")
    return int(shape[0]), int(shape[1])


# --- with dense matrices --------------------------------------------------------------------------

def spmm(matrix: Matrix, dense: Tensor) -> Tensor:
    """The product [rows, width], or by channel [rows, width, channels]."""
    value, columns = matrix.value, matrix.pattern.shape[1]
    batched = value.dim() == 2 or dense.dim() == 3
    if (dense.dim() not in (1, 2, 3) or dense.shape[0] != columns
        or batched and (dense.dim() != value.dim() + 1 or dense.shape[2] != value.shape[1])):
        raise error(f"spmm: a matrix of {matrix.shape()} with values {list(value.shape)} cannot be "
                    f"multiplied by {list(dense.shape)}; valid are (n, m) by (m,) or (m, k), and "
                    "(n, m, b) by (m, k, b)")
    if value.dtype != dense.dtype or value.device != dense.device:
        raise error(f"spmm: values are {value.dtype} on {value.device}, the dense matrix is "
                    f"{dense.dtype} on {dense.device}; both must be alike")
    if dense.dim() == 1:
        return spmm(matrix, dense.unsqueeze(-1)).squeeze(-1)
    weight = value.unsqueeze(1)
    pair: Any = operands.prepare("mul", dense, weight)
    call = pair if type(pair) is Reason else calls.gspmm(matrix.pattern.graph(), pair, "sum")
    return _run("dgl.sparse.spmm", call, lambda: _product(matrix, dense, weight, call))


def _product(matrix: Matrix, dense: Tensor, weight: Tensor, call: OpCall | Reason) -> Tensor:
    """The product by torch's for a CSR matrix where it has one, else edge by edge."""
    if matrix.value.dim() == 1 and dense.dtype in (torch.float32, torch.float64):
        return product.spmm(_sorted(matrix), dense)
    if type(call) is OpCall:
        return call.plain()
    row, col = matrix.pattern.indices
    out = dense.new_zeros(matrix.pattern.shape[0], *dense.shape[1:])
    return out.index_add(0, row, dense.index_select(0, col) * weight)


def _sorted(matrix: Matrix) -> SparseTensor:
    """The matrix with its entries by row; the sorted pattern is kept."""
    pattern = matrix.pattern
    indptr, others, order = pattern.by(0)
    if pattern.sorted is None:
        row = pattern.indices[0] if order is None else pattern.indices[0][order]
        pattern.sorted = SparseTensor(row=row.long(), rowptr=indptr.long(), col=others.long(),
                                      sparse_sizes=pattern.shape, is_sorted=True, trust_data=True)
        pattern.sorted.storage.csr2csc()
        pattern.sorted.storage.colptr()
    value = matrix.value if order is None else matrix.value.index_select(0, order)
    return pattern.sorted.set_value(value, layout="coo")


def sddmm(matrix: Matrix, first: Tensor, second: Tensor) -> Matrix:
    """A matrix that holds at each entry its value times the product of a row of ``first`` [rows, k]
    and a column of ``second`` [k, columns], or by channel where these have a third dimension."""
    first = first.unsqueeze(1) if first.dim() == 1 else first
    second = second.unsqueeze(0) if second.dim() == 1 else second
    value = matrix.value
    if (first.dim() != second.dim() or first.dim() not in (2, 3)
        or (first.shape[0], second.shape[1]) != matrix.pattern.shape
        or first.shape[1] != second.shape[0] or first.shape[2:] != second.shape[2:]
        or (value.dim() == 2 and first.shape[2:] != value.shape[1:])):
        raise error(f"sddmm: a matrix of {matrix.shape()} with values {list(value.shape)} does not "
                    f"go with {list(first.shape)} and {list(second.shape)}; valid are (n, m) with "
                    "(n, k) and (k, m) or (n,) and (m,), and (n, m) or (n, m, b) with (n, k, b) "
                    "and (k, m, b)")
    if first.dtype != second.dtype or not first.device == second.device == value.device:
        raise error("sddmm: all must be on one device, and the dense matrices of one dtype")
    graph = matrix.pattern.graph()
    at_rows, at_columns = first, second.transpose(0, 1)
    if first.dim() == 3:  # products go over the last dimension
        at_rows, at_columns = at_rows.transpose(1, 2), at_columns.transpose(1, 2)
    pair: Any = operands.prepare("dot", at_columns, at_rows)
    if type(pair) is Reason:
        row, col = matrix.pattern.indices
        products = (at_rows.index_select(0, row) * at_columns.index_select(0, col)).sum(-1)
    else:
        call = calls.gsddmm(graph, pair, ("u", "v"))
        products = _run("dgl.sparse.sddmm", call, call.plain).squeeze(-1)
    return Matrix(matrix.pattern, products * (value.unsqueeze(-1) if value.dim() < products.dim()
                                              else value))


def softmax(matrix: Matrix, dim: int) -> Matrix:
    """Softmax over the entries of each row (``dim`` 1) or column (0)."""
    if not matrix.value.is_floating_point():
        raise error(f"softmax: values are {matrix.value.dtype}; floating numbers are needed")
    graph, by = matrix.pattern.graph(), "v" if dim == 1 else "u"
    call = calls.edge_softmax(graph, matrix.value, by)
    return Matrix(matrix.pattern,
                  _run("dgl.sparse.softmax", call,
                       lambda: torch_ops.edge_softmax(graph, matrix.value, by)))


def _run(name: str, call: OpCall | Reason, native: Callable[[], Tensor]) -> Tensor:
    config = None if is_compiling() else current()
    if config is None or type(call) is OpCall and call.device.type == "cpu" and (
            route.on_cpu_native(name, config)):
        return native()
    return route.run(name, context_reason() or call, native, config)


# --- with sparse matrices -------------------------------------------------------------------------

def spsp_add(first: Matrix, second: Matrix) -> Matrix:
    """The sum; entries row by row, each place once."""
    _check_alike(first, second)
    if first.is_diag() and second.is_diag():
        return val_like(first, first.value + second.value)
    joined = torch.cat([first.pattern.indices, second.pattern.indices], 1)
    return Matrix(Pattern(joined, first.pattern.shape),
                  torch.cat([first.value, second.value])).coalesce()


def spsp_mul(first: Matrix, second: Matrix) -> Matrix:
    """The product place by place, at places that both have."""
    _check_alike(first, second)
    if first.is_diag() and second.is_diag():
        return val_like(first, first.value * second.value)
    _check_single("multiplying place by place", first, second)
    (keys, order), (others, places) = (m.pattern.keys().sort() for m in (first, second))
    position = torch.searchsorted(others, keys).clamp(max=max(len(others) - 1, 0))
    both = others[position] == keys if len(others) else torch.zeros_like(keys, dtype=torch.bool)
    return at_keys(keys[both], first.value[order[both]] * second.value[places[position[both]]],
                   first.pattern.shape)


def spsp_div(first: Matrix, second: Matrix) -> Matrix:
    """The quotient place by place, of matrices that have the same places."""
    _check_alike(first, second)
    if first.is_diag() and second.is_diag():
        return val_like(first, first.value / second.value)
    _check_single("dividing", first, second)
    (keys, order), (others, places) = (m.pattern.keys().sort() for m in (first, second))
    if not torch.equal(keys, others):
        raise error("matrices with entries at different places cannot be divided")
    return val_like(first, first.value / second.value[places[order.argsort()]])


def spspmm(first: Matrix, second: Matrix) -> Matrix:
    """The product of two sparse matrices with one value an entry."""
    (rows, inner), (outer, cols) = first.pattern.shape, second.pattern.shape
    if inner != outer:
        raise error(f"spspmm: {first.shape()} cannot be multiplied by {second.shape()}")
    if first.value.dim() != 1 or second.value.dim() != 1:
        raise error("spspmm: values must be one number an entry")
    if first.value.dtype != second.value.dtype or first.device() != second.device():
        raise error("spspmm: both matrices must be of one dtype, on one device")
    _check_single("spspmm", first, second)
    if first.is_diag() and rows == inner:
        if second.is_diag():
            return _diagonals(first, second)
        return val_like(second, first.value[second.pattern.indices[0]] * second.value)
    if second.is_diag() and outer == cols:
        return val_like(first, second.value[first.pattern.indices[1]] * first.value)
    if first.is_diag() and second.is_diag():
        return _diagonals(first, second)
    dtype = first.value.dtype
    through = dtype if dtype in (torch.float32, torch.float64) else torch.float64
    result = torch.sparse.mm(*(_torch_coo(m, through) for m in (first, second))).coalesce()
    return Matrix(Pattern(result.indices(), (rows, cols)), result.values().to(dtype))


def _torch_coo(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    return torch.sparse_coo_tensor(matrix.pattern.indices, matrix.value.to(dtype),
                                   matrix.pattern.shape, device=matrix.device(),
                                   check_invariants=False).coalesce()


def _diagonals(first: Matrix, second: Matrix) -> Matrix:
    """The product of two diagonal matrices: zeros where one of them has ended."""
    rows, cols = first.pattern.shape[0], second.pattern.shape[1]
    both = min(len(first.value), len(second.value), rows, cols)
    value = first.value[:both] * second.value[:both]
    return from_diag(torch.nn.functional.pad(value, (0, min(rows, cols) - both)), (rows, cols))


def _check_alike(first: Matrix, second: Matrix) -> None:
    if first.value.dtype != second.value.dtype or first.pattern.shape != second.pattern.shape:
        raise error(f"matrices of {first.shape()}, {first.value.dtype} and {second.shape()}, "
                    f"{second.value.dtype}; both must be of one shape and dtype")


def _check_single(what: str, *matrices: Matrix) -> None:
    if any(matrix.has_duplicate() for matrix in matrices):
        raise error(f"{what}: a matrix has several entries at one place; call coalesce() first")


# --- reductions -----------------------------------------------------------------------------------

def reduce(matrix: Matrix, name: str, dim: int | None = None) -> Tensor:
    """"sum", "smin", "smax", "smean" or "sprod" of the entries: of each row (``dim`` 1), of each
    column (0), of all (None). 0 where there are none."""
    if name not in _REDUCES:
        raise error(f"there is no reduction {name!r}; use one of {', '.join(_REDUCES)}")
    value = matrix.value
    if dim is None:
        return getattr(value, _REDUCES[name])(0)
    index = matrix.pattern.indices[1 - dim].long().view(-1, *(1,) * (value.dim() - 1))
    out = value.new_zeros(matrix.pattern.shape[1 - dim], *value.shape[1:])
    return out.scatter_reduce(0, index.expand_as(value), value, _REDUCES[name], include_self=False)


def sum(matrix: Matrix, dim: int | None = None) -> Tensor:
    return reduce(matrix, "sum", dim)


def smin(matrix: Matrix, dim: int | None = None) -> Tensor:
    return reduce(matrix, "smin", dim)


def smax(matrix: Matrix, dim: int | None = None) -> Tensor:
    return reduce(matrix, "smax", dim)


def smean(matrix: Matrix, dim: int | None = None) -> Tensor:
    return reduce(matrix, "smean", dim)


def sprod(matrix: Matrix, dim: int | None = None) -> Tensor:
    return reduce(matrix, "sprod", dim)
