"""`SparseTensor` against dense matrices."""
from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch

from gnnaccel.adapters.standins.sparse import functions, joining, totals
from gnnaccel.adapters.standins.sparse.storage import SparseStorage
from gnnaccel.adapters.standins.sparse.tensor import SparseTensor

M, N = 5, 4


def matrix(value=True, wide=(), rows=M, cols=N, seed=0):
    torch.manual_seed(seed)
    dense = torch.randint(1, 9, (rows, cols, *wide)).double() * (
        torch.rand(rows, cols, *(1 for _ in wide)) < 0.5)
    return SparseTensor.from_dense(dense, has_value=value), dense if value else (dense != 0).double()


def dense_of(sparse):
    """Built from the entries, without `to_dense`."""
    row, col, value = sparse.coo()
    out = torch.zeros(sparse.sizes(), dtype=torch.float64)
    for i, (r, c) in enumerate(zip(row.tolist(), col.tolist())):
        out[r, c] += 1 if value is None else value[i]
    return out


def consistent(sparse):
    """Whether all index arrays say the same; gives back the dense matrix."""
    row, col, _ = sparse.coo()
    m, n = sparse.sparse_sizes()
    fresh = SparseStorage(row=row, col=col, value=None, sparse_sizes=sparse.sparse_sizes())
    keys = row * n + col
    assert bool((keys[1:] >= keys[:-1]).all())
    storage = sparse.storage
    for name in ("rowptr", "rowcount", "colptr", "colcount"):
        assert torch.equal(getattr(storage, name)(), getattr(fresh, name)()), name
    flipped = col[storage.csr2csc()] * m + row[storage.csr2csc()]
    assert bool((flipped[1:] >= flipped[:-1]).all())
    assert torch.equal(storage.csr2csc()[storage.csc2csr()], torch.arange(len(row)))
    assert storage.rowptr().tolist()[-1] == len(row) and storage.colcount().numel() == n
    return dense_of(sparse)


@pytest.mark.parametrize("value", [True, False])
def test_construction(value):
    sparse, dense = matrix(value)
    assert torch.equal(consistent(sparse), dense) and torch.equal(sparse.to_dense().double(), dense)
    row, col, values = sparse.coo()
    order = torch.randperm(len(row))
    shuffled = SparseTensor(row=row[order], col=col[order],
                            value=None if values is None else values[order], sparse_sizes=(M, N))
    by_ptr = SparseTensor(rowptr=sparse.csr()[0], col=col, value=values, sparse_sizes=(M, N))
    by_edges = SparseTensor.from_edge_index(torch.stack([row, col]), values, (M, None))
    for other in (shuffled, by_ptr, by_edges, sparse.copy(), sparse.clone(),
                  SparseTensor.from_torch_sparse_coo_tensor(
                      sparse.to_torch_sparse_coo_tensor(), value),
                  SparseTensor.from_torch_sparse_csr_tensor(
                      sparse.to_torch_sparse_csr_tensor(), value),
                  SparseTensor.from_scipy(sparse.to_scipy("csc"), value),
                  copy.deepcopy(sparse)):
        assert other == sparse and not other != sparse
    assert sparse != sparse.fill_value(2.5) and sparse != 1
    csc = sparse.to_torch_sparse_csc_tensor()
    assert torch.equal(csc.to_dense().double(), dense)
    assert sparse.sizes() == [M, N] and sparse.size(-1) == N and sparse.dim() == 2
    assert sparse.nnz() == sparse.numel() == int((dense != 0).sum())
    assert sparse.density() == pytest.approx(sparse.nnz() / (M * N))
    assert repr(sparse).startswith("SparseTensor(row=tensor(") and "nnz=" in repr(sparse)


def test_saved_ones_load(stood_in):
    """By the names of the real package, so that files of either load with the other."""
    sparse, _ = matrix()
    text, file = pickle.dumps(sparse), io.BytesIO()
    assert b"torch_sparse.tensor" in text and b"torch_sparse.storage" in text
    assert pickle.loads(text) == sparse
    torch.save({"adj": sparse}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["adj"] == sparse


@pytest.mark.parametrize("fields, text", [
    (dict(row=[0, 9], col=[0, 1], sparse_sizes=(3, 3)), "row holds ids from 0 to 9"),
    (dict(row=[0, 1], col=[-1, 1], sparse_sizes=(3, 3)), "col holds ids from -1 to 1"),
    (dict(row=[0, 1], col=[0, 1, 2]), "row has 2 entries; 3 are needed"),
    (dict(rowptr=[0, 1], col=[0], sparse_sizes=(3, 3)), "rowptr has 2 entries; 4 are needed"),
    (dict(col=[0]), "either row or rowptr"),
    (dict(row=[0], col=[0], value=[1.0, 2.0]), "value is \\[2\\]"),
    (dict(row=[0.0], col=[0]), "row is torch.float32"),
])
def test_what_does_not_fit_is_refused(fields, text):
    given = {name: torch.tensor(field) if isinstance(field, list) else field
             for name, field in fields.items()}
    with pytest.raises(ValueError, match=text):
        SparseTensor(**given)


def test_huge_matrices_are_sorted():
    """Where rows times columns is more than 64 bits hold."""
    row = torch.tensor([2**40, 1, 2**40])
    sparse = SparseTensor(row=row, col=torch.tensor([5, 2**39, 3]), value=torch.tensor([1, 2, 3]),
                          sparse_sizes=(2**41, 2**40))
    assert sparse.coo()[1].tolist() == [2**39, 3, 5] and sparse.coo()[2].tolist() == [2, 3, 1]


@pytest.mark.parametrize("m, n", [(3, 3), (2, 4), (4, 2)])
def test_eye(m, n):
    sparse = SparseTensor.eye(m, n, fill_cache=True)
    assert torch.equal(consistent(sparse), torch.eye(m, n, dtype=torch.float64))
    assert not SparseTensor.eye(m, has_value=False).has_value()
    index, value = functions.eye(m)
    assert torch.equal(torch.sparse_coo_tensor(index, value).to_dense(), torch.eye(m))


def test_values():
    sparse, dense = matrix()
    other = torch.arange(sparse.nnz()).double()
    by_column = sparse.set_value(other, layout="csc")
    assert torch.equal(by_column.csc()[2], other)
    assert sparse.has_value() and not sparse.set_value(None).has_value()
    assert torch.equal(dense_of(sparse.fill_value(3.0)), 3 * (dense != 0))
    changed = sparse.copy().fill_value_(2)
    assert changed.dtype() == torch.int64 and sparse.dtype() == torch.float64
    assert sparse.float().dtype() == torch.float32 and sparse.to(torch.half).dtype() == torch.half
    assert sparse.long().dtype() == torch.int64 and not sparse.long().is_floating_point()
    with pytest.warns(UserWarning, match="layout is not given"):
        sparse.set_value(other)
    with pytest.raises(ValueError, match="layout='rows'"):
        sparse.set_value(other, "rows")


def test_devices_and_gradients():
    sparse, _ = matrix(value=False)
    assert sparse.device() == torch.device("cpu") and not sparse.is_cuda()
    assert sparse.cpu() == sparse.to("cpu") == sparse
    assert sparse.to("meta").device().type == "meta"
    assert not sparse.requires_grad()
    sparse.requires_grad_()
    assert sparse.requires_grad() and sparse.storage.value().tolist() == [1.0] * sparse.nnz()
    assert not sparse.detach().requires_grad() and sparse.requires_grad()
    assert sparse.share_memory_().is_shared()


@pytest.mark.parametrize("value", [True, False])
def test_transpose_and_symmetry(value):
    sparse, dense = matrix(value)
    assert torch.equal(consistent(sparse.t()), dense.t()) and sparse.t().t() == sparse
    square, dense = matrix(value, rows=4)
    assert not square.is_symmetric() and not sparse.is_symmetric()
    for reduce in ("sum", "mean", "min", "max"):
        made = square.to_symmetric(reduce)
        assert made.is_symmetric()
        both = torch.stack([dense, dense.t()])
        there = (both != 0).sum(0).clamp(min=1)
        expected = {"sum": both.sum(0), "mean": both.sum(0) / there, "max": both.amax(0),
                    "min": torch.where(both == 0, torch.inf, both).amin(0).nan_to_num(posinf=0)}
        expected = expected[reduce] if value else (both.sum(0) != 0).double()
        torch.testing.assert_close(consistent(made), expected)


def test_coalesce():
    index = torch.tensor([[1, 0, 1, 1], [0, 2, 0, 1]])
    value = torch.tensor([1.0, 2.0, 5.0, 4.0], requires_grad=True)
    for op, joined in (("add", 6.0), ("mean", 3.0), ("min", 1.0), ("max", 5.0)):
        found, values = functions.coalesce(index, value, 2, 3, op)
        assert found.tolist() == [[0, 1, 1], [2, 0, 1]] and values.tolist() == [2, joined, 4]
    sparse = SparseTensor.from_edge_index(index, value)
    assert not sparse.is_coalesced() and sparse.coalesce().is_coalesced()
    values.sum().backward()
    assert value.grad.tolist() == [0, 1, 1, 1]
    flipped, values = functions.transpose(index, value, 2, 3)
    assert flipped.tolist() == [[0, 1, 2], [1, 1, 0]] and values.tolist() == [6, 4, 2]


@pytest.mark.parametrize("k", [-5, -2, -1, 0, 1, 3])
@pytest.mark.parametrize("value", [True, False])
def test_diagonals(k, value):
    sparse, dense = matrix(value)
    rows, cols = torch.meshgrid(torch.arange(M), torch.arange(N), indexing="ij")
    on = cols - rows == k
    assert torch.equal(consistent(sparse.remove_diag(k)), dense * ~on)
    assert torch.equal(consistent(sparse.set_diag(k=k)), torch.where(on, 1.0, dense))
    filled = sparse.fill_diag(7.0, k)
    assert torch.equal(consistent(filled), torch.where(on, 7.0 if value else 1.0, dense))
    if value:
        given = torch.arange(1.0, int(on.sum()) + 1)
        expected = dense.clone()
        expected[on] = given.double()
        assert torch.equal(consistent(sparse.set_diag(given, k)), expected)
    assert torch.equal(sparse.get_diag().double(), dense.diagonal())


INDICES = [1, -1, slice(1, 3), slice(None), slice(-2, None), slice(3, 1), [2, 0, 2],
           torch.tensor([3, 0, 0]), np.array([1, 2]), torch.tensor([True, False, True, True]),
           (slice(1, 4), torch.tensor([3, 1])), (..., 2), (torch.tensor([0, 2]), ...),
           (slice(None), slice(1, 3)), (2, 1), (slice(None), [True, False, False, True])]


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_items(index, value):
    """A single id keeps its dimension."""
    sparse, dense = matrix(value, rows=4)
    sparse.fill_cache_()
    items = index if isinstance(index, tuple) else (index,)
    if items[0] is ...:
        items = (slice(None), *items[1:])
    expected = dense
    for dim, item in enumerate(item for item in items if item is not ...):
        if isinstance(item, int):
            item = [item]
        if not isinstance(item, slice):
            item = torch.as_tensor(item)
        expected = expected[(slice(None),) * dim + (item,)]
    assert torch.equal(consistent(sparse[index]), expected)


def test_items_that_cannot_be_taken():
    sparse, _ = matrix()
    for index in (9, -6, (..., ...), (0, 0, 0), torch.tensor([True, False])):
        with pytest.raises(IndexError):
            sparse[index]
    with pytest.raises(ValueError, match="step 2"):
        sparse[::2]


def test_items_of_values():
    sparse, dense = matrix(wide=(3,))
    assert torch.equal(dense_of(sparse), dense)
    assert torch.equal(dense_of(sparse[1:3, :, torch.tensor([2, 0])]), dense[1:3, :, [2, 0]])
    assert torch.equal(dense_of(sparse[..., 1]), dense[..., 1:2])
    assert torch.equal(dense_of(sparse.masked_select(2, torch.tensor([True, False, True]))),
                       dense[..., [0, 2]])


def test_entries():
    sparse, dense = matrix()
    mask = torch.arange(sparse.nnz()) % 2 == 0
    for layout, order in (("coo", torch.arange(sparse.nnz())), ("csc", sparse.storage.csr2csc())):
        by_mask = sparse.masked_select_nnz(mask, layout)
        kept = order[mask].sort()[0]
        assert torch.equal(by_mask.coo()[2], sparse.coo()[2][kept])
        assert torch.equal(consistent(by_mask) != 0, (dense != 0) & (consistent(by_mask) != 0))
    picked = sparse.index_select_nnz(torch.tensor([0, 2]), "coo")
    assert torch.equal(picked.coo()[2], sparse.coo()[2][[0, 2]])
    square, dense = matrix(rows=4)
    perm = torch.tensor([2, 0, 3, 1])
    assert torch.equal(consistent(square.permute(perm)), dense[perm][:, perm])
    with pytest.raises(ValueError, match="must be quadratic"):
        sparse.permute(perm)


@pytest.mark.parametrize("reduce", ["sum", "mean", "min", "max"])
@pytest.mark.parametrize("dim", [None, 0, 1, -1, 2])
@pytest.mark.parametrize("wide", [(), (3,)])
def test_totals(reduce, dim, wide):
    sparse, dense = matrix(wide=wide)
    if dim == 2 and not wide:
        with pytest.raises(IndexError):
            sparse.sum(dim)
        return
    there = (dense.reshape(M, N, -1) != 0).any(-1)
    got = getattr(sparse, reduce)(dim)
    assert torch.equal(got, getattr(totals, reduce)(sparse, dim))
    dim = dim + sparse.dim() if dim is not None and dim < 0 else dim
    if dim is None or dim > 1:
        values = sparse.storage.value()
        function = getattr(torch, {"min": "amin", "max": "amax"}.get(reduce, reduce))
        expected = function(values) if dim is None else function(values, dim - 1)
    else:
        groups = [dense[i][there[i]] if dim == 1 else dense[:, i][there[:, i]]
                  for i in range(dense.size(1 - dim))]
        function = {"sum": lambda g: g.sum(0), "mean": lambda g: g.mean(0),
                    "min": lambda g: g.amin(0), "max": lambda g: g.amax(0)}[reduce]
        expected = torch.stack([function(g) if len(g) else dense.new_zeros(wide) for g in groups])
    torch.testing.assert_close(got, expected)


def test_totals_without_values():
    sparse, dense = matrix(value=False)
    assert torch.equal(sparse.sum(1).double(), dense.sum(1)) and sparse.sum(1).dtype == torch.float
    assert torch.equal(sparse.sum(0).double(), dense.sum(0)) and int(sparse.sum()) == sparse.nnz()
    assert sparse.mean(0).tolist() == [1.0] * N and sparse.max(1).tolist() == [1.0] * M
    with pytest.raises(ValueError, match="'mul' is not known"):
        totals.reduction(sparse, 0, "mul")


@pytest.mark.parametrize("value", [True, False])
def test_cat(value):
    first, dense = matrix(value)
    second, dense2 = matrix(value, rows=3, seed=1)
    third, dense3 = matrix(value, cols=2, seed=2)
    assert torch.equal(consistent(joining.cat([first, second], 0)), torch.cat([dense, dense2]))
    assert torch.equal(consistent(joining.cat([first, third], -1)), torch.cat([dense, dense3], 1))
    blocks = joining.cat([first, second, third], (0, 1))
    assert torch.equal(consistent(blocks), torch.block_diag(dense, dense2, dense3))
    assert blocks.__narrow_diag__((M, N), (3, N)) == second
    with pytest.raises(IndexError):
        joining.cat([first], 2)
    with pytest.raises(ValueError):
        joining.cat([], 0)
    wide, dense = matrix(wide=(2,))
    assert torch.equal(dense_of(joining.cat([wide, wide], 2)), torch.cat([dense, dense], 2))


def test_reshape_and_resize():
    sparse, dense = matrix()
    assert torch.equal(consistent(sparse.sparse_reshape(2, -1)), dense.reshape(2, 10))
    assert consistent(sparse.sparse_resize((7, 6))).shape == (7, 6)
    with pytest.raises(ValueError, match="cannot be reshaped to \\(3, 6\\)"):
        sparse.sparse_reshape(3, -1)
    assert sparse.bandwidth() == int((sparse.coo()[0] - sparse.coo()[1]).abs().max())
    assert 0 <= sparse.bandwidth_proportion(1) <= 1 and sparse.avg_row_length() > 0
    square = matrix(rows=4)[0].to_symmetric()
    ordered, perm = square.reverse_cuthill_mckee()
    assert ordered == square.permute(perm) and perm.sort()[0].tolist() == [0, 1, 2, 3]


def test_cache():
    storage = matrix()[0].fill_cache_().storage
    assert storage.num_cached_keys() == 5 and "csr2csc" in storage.cached_keys()
    assert storage.clear_cache_().num_cached_keys() == 0
    assert SparseStorage.empty().sparse_sizes() == (0, 0)
