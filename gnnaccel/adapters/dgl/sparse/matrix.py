"""The sparse matrix that DGL's C++ library would hold: where entries are, and their values;
its rows and columns chosen, sampled, and renumbered."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.dispatch.ops.graph import OpGraph

#: [major + 1] starts, [nnz] other ends, [nnz] places of values, None where these are in order
Compressed = tuple[Tensor, Tensor, "Tensor | None"]


def error(text: str) -> RuntimeError:
    """The error as the C++ library raises it."""
    return RuntimeError(f"dgl.sparse: {text}")


class Pattern:
    """Places of the entries of a matrix of ``shape``: ``indices`` [2, nnz], rows and columns.
    ``diagonal``: it was made as a diagonal matrix. Matrices that differ in values alone share it.
    """

    def __init__(self, indices: Tensor, shape: tuple[int, int], diagonal: bool = False):
        self.indices, self.shape, self.diagonal = indices, shape, diagonal
        #: by rows and by columns, once asked for
        self.compressed: list[Compressed | None] = [None, None]
        self._flipped: Pattern | None = None
        self._graph: OpGraph | None = None
        self._duplicate: bool | None = None
        self.sorted: Any = None  # for products: the entries by row, as a SparseTensor

    @property
    def nnz(self) -> int:
        return self.indices.shape[1]

    def by(self, dim: int) -> Compressed:
        """The places compressed by rows (0) or columns (1); entries of a row in the order of the
        matrix."""
        compressed = self.compressed[dim]
        if compressed is None:
            major = self.indices[dim]
            order = torch.argsort(major, stable=True)
            compressed = _starts(major, self.shape[dim]), self.indices[1 - dim][order], order
            self.compressed[dim] = compressed
        return compressed

    def keys(self) -> Tensor:
        """[nnz] one number for each place in the matrix, which grows row by row."""
        row, col = self.indices.long()
        return row * self.shape[1] + col

    def flipped(self) -> Pattern:
        """The pattern of the transpose."""
        if self._flipped is None:
            rows, cols = self.shape
            flipped = self._flipped = Pattern(self.indices.flip(0), (cols, rows), self.diagonal)
            flipped._flipped, flipped.compressed = self, [self.compressed[1], self.compressed[0]]
        return self._flipped

    def graph(self) -> OpGraph:
        """The entries as edges from columns to rows."""
        if self._graph is None:
            rows, cols = self.shape
            self._graph = OpGraph(self.indices, cols, rows, flipped=True)
        return self._graph

    def has_duplicate(self) -> bool:
        """Whether a place comes twice. Waits for the device, the first time."""
        if self._duplicate is None:
            self._duplicate = not self.diagonal and self.keys().unique().numel() < self.nnz
        return self._duplicate


def _starts(major: Tensor, size: int) -> Tensor:
    counts = torch.zeros(size, dtype=major.dtype, device=major.device)
    counts.index_add_(0, major, torch.ones_like(major))
    return torch.cat([counts.new_zeros(1), counts.cumsum(0).to(major.dtype)])


class Matrix:
    """The object behind ``SparseMatrix.c_sparse_matrix``, with the methods that DGL's Python calls.

    ``value`` [nnz] or [nnz, channels], in the order of the pattern's entries. Raises RuntimeError
    where the two do not belong together, as the C++ class does.
    """

    def __init__(self, pattern: Pattern, value: Tensor):
        if value.shape[:1] != (pattern.nnz,):
            raise error(f"{list(value.shape)} values are given for {pattern.nnz} entries; the "
                        "first dimension must be the number of entries")
        if value.device != pattern.indices.device:
            raise error(f"values are on {value.device}, entries on {pattern.indices.device}; put "
                        "both on one device")
        self.pattern, self.value = pattern, value

    def val(self) -> Tensor:
        return self.value

    def nnz(self) -> int:
        return self.pattern.nnz

    def device(self) -> torch.device:
        return self.value.device

    def shape(self) -> list[int]:
        return list(self.pattern.shape)

    def coo(self) -> tuple[Tensor, Tensor]:
        return self.pattern.indices[0], self.pattern.indices[1]

    def indices(self) -> Tensor:
        return self.pattern.indices

    def csr(self) -> Compressed:
        return self.pattern.by(0)

    def csc(self) -> Compressed:
        return self.pattern.by(1)

    def transpose(self) -> Matrix:
        return Matrix(self.pattern.flipped(), self.value)

    def is_diag(self) -> bool:
        return self.pattern.diagonal

    def has_duplicate(self) -> bool:
        return self.pattern.has_duplicate()

    def coalesce(self) -> Matrix:
        """The matrix with entries row by row, those of one place added up."""
        keys, place = self.pattern.keys().unique(return_inverse=True)
        total = self.value.new_zeros(len(keys), *self.value.shape[1:])
        return at_keys(keys, total.index_add(0, place, self.value), self.pattern.shape)

    def index_select(self, dim: int, ids: Tensor) -> Matrix:
        return rows(self, dim, ids)

    def range_select(self, dim: int, start: int, end: int | None) -> Matrix:
        first, last, _ = slice(start, end).indices(self.pattern.shape[dim])
        return self.index_select(dim, torch.arange(first, max(first, last), device=self.device()))

    def sample(self, dim: int, fanout: int, ids: Tensor, replace: bool, bias: bool) -> Matrix:
        return sample(self, dim, fanout, ids, replace, bias)


def at_keys(keys: Tensor, value: Tensor, shape: tuple[int, int]) -> Matrix:
    """A matrix with ``value`` at the places of `Pattern.keys`."""
    cols = max(shape[1], 1)
    return Matrix(Pattern(torch.stack([keys.div(cols, rounding_mode="floor"), keys % cols]), shape),
                  value)


def of_compressed(indptr: Tensor, others: Tensor, value: Tensor, shape: tuple[int, int],
                  dim: int) -> Matrix:
    """A matrix of compressed rows (``dim`` 0) or columns (1)."""
    if indptr.dim() != 1 or indptr.shape[0] != shape[dim] + 1:
        raise error(f"{list(indptr.shape)} starts are given for {shape[dim]} "
                    f"{('rows', 'columns')[dim]}; one more than these is needed")
    major = torch.repeat_interleave(torch.arange(shape[dim], dtype=others.dtype,
                                                 device=others.device), indptr.diff().long(),
                                    output_size=others.shape[0])
    pattern = Pattern(torch.stack([major, others] if dim == 0 else [others, major]), shape)
    pattern.compressed[dim] = indptr, others, None
    return Matrix(pattern, value)


# --- rows and columns: chosen, sampled, and renumbered --------------------------------------------

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
