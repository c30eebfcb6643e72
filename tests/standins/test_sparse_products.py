"""Products, sums and samples of sparse matrices against dense ones and naive loops."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.adapters.standins.sparse import arithmetic, functions, product
from gnnaccel.adapters.standins.sparse.tensor import SparseTensor
from tests.standins.test_sparse_tensor import M, N, consistent, dense_of, matrix


def naive(dense, other, reduce):
    """``dense`` [rows, columns] of which zeros are absent, ``other`` [columns, width]."""
    rows = []
    for row in dense:
        there = row.nonzero().flatten()
        messages = row[there, None] * other[there]
        if not len(there):
            rows.append(other.new_zeros(other.size(1)))
        else:
            rows.append({"sum": messages.sum(0), "add": messages.sum(0), "mean": messages.mean(0),
                         "min": messages.amin(0), "max": messages.amax(0)}[reduce])
    return torch.stack(rows)


@pytest.mark.parametrize("reduce", ["sum", "add", "mean", "min", "max"])
@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_by_a_dense_matrix(reduce, value, dtype):
    sparse, dense = matrix(value)
    other = torch.randint(-5, 6, (N, 3)).to(dtype)
    got = product.matmul(sparse, other, reduce)
    expected = naive(dense, other.double(), reduce)
    assert got.shape == expected.shape
    if dtype == torch.int64 and reduce == "mean":
        assert got.dtype.is_floating_point
    else:
        assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6,
                               atol=1e-6)
    assert torch.equal(sparse.matmul(other, reduce), got)
    if dtype == torch.float64:
        torch.testing.assert_close(product.matmul(sparse, torch.stack([other, 2 * other]), reduce),
                                   torch.stack([expected, 2 * expected]))
        torch.testing.assert_close(product.matmul(sparse, other[:, 0], reduce), expected[:, 0])


@pytest.mark.parametrize("reduce", ["sum", "mean", "min", "max"])
@pytest.mark.parametrize("by_csr", [True, False])
def test_gradients(reduce, by_csr, monkeypatch):
    if not by_csr:
        monkeypatch.setattr(product, "_by_csr", lambda src, other: False)
    torch.manual_seed(0)
    sparse, _ = matrix()
    value = torch.randn(sparse.nnz(), dtype=torch.float64, requires_grad=True)
    other = torch.randn(N, 2, dtype=torch.float64, requires_grad=True)

    def function(value, other):
        return sparse.set_value(value, "coo").matmul(other, reduce)

    assert torch.autograd.gradcheck(function, (value, other))
    assert torch.autograd.gradgradcheck(function, (value, other))
    out = sparse.set_value(None).matmul(other, reduce)
    assert torch.autograd.grad(out.sum(), other)[0].shape == other.shape


def test_two_sparse_matrices():
    first, dense = matrix()
    second, dense2 = matrix(rows=N, cols=3, seed=1)
    assert torch.equal(consistent(first @ second), dense @ dense2)
    counted = first.set_value(None) @ second.set_value(None)
    assert not counted.has_value()
    assert torch.equal(consistent((first.long() @ second.long()).double()), dense @ dense2)
    value = first.storage.value().clone().requires_grad_()
    (first.set_value(value, "coo") @ second).sum().backward()
    row, col, _ = first.coo()
    torch.testing.assert_close(value.grad, dense2.sum(1)[col])
    index, values = functions.spspmm(torch.stack([row, col]), first.storage.value(),
                                     torch.stack(second.coo()[:2]), second.storage.value(), M, N, 3)
    assert torch.equal(torch.sparse_coo_tensor(index, values, (M, 3)).to_dense(), dense @ dense2)
    with pytest.raises(NotImplementedError):
        product.matmul(first, second, "max")


def test_products_that_do_not_fit():
    sparse, _ = matrix()
    with pytest.raises(ValueError, match="needs 4 rows"):
        sparse @ torch.ones(3, 2)
    with pytest.raises(ValueError, match="cannot be multiplied by one of"):
        sparse @ sparse
    with pytest.raises(ValueError, match="'mul' is not known"):
        sparse.matmul(torch.ones(N, 2), "mul")
    with pytest.raises(ValueError, match="cannot be multiplied by a float"):
        sparse @ 2.0


def test_functions_of_indices():
    sparse, dense = matrix()
    row, col, value = sparse.coo()
    index, x = torch.stack([row, col]), torch.randn(N, 3, dtype=torch.float64)
    torch.testing.assert_close(functions.spmm(index, value, M, N, x), dense @ x)
    torch.testing.assert_close(functions.spmm(index, value, M, N, x[:, 0]), dense @ x[:, :1])
    with pytest.raises(ValueError, match="matrix has 3 rows; n=4"):
        functions.spmm(index, value, M, N, x[:3])
    total, values = functions.spadd(index, value, index.flip(1), value.flip(0), M, N)
    assert torch.equal(torch.sparse_coo_tensor(total, values, (M, N)).to_dense(), 2 * dense)
    back, values = functions.from_scipy(functions.to_scipy(index, value, M, N))
    assert torch.equal(back, index) and torch.equal(values, value)
    tensor = functions.to_torch_sparse(index, value, M, N).coalesce()
    assert torch.equal(functions.from_torch_sparse(tensor)[0], index)


@pytest.mark.parametrize("value", [True, False])
def test_broadcast(value):
    sparse, dense = matrix(value)
    there = dense != 0
    for other in (torch.arange(1.0, M + 1).view(-1, 1), torch.arange(1.0, N + 1).view(1, -1)):
        assert torch.equal(dense_of(sparse * other), dense * other)
        assert torch.equal(dense_of(sparse + other), (dense + other) * there)
        assert torch.equal(dense_of(sparse.clone().mul_(other)), dense * other)
        assert torch.equal(dense_of(sparse.clone().add_(other)), (dense + other) * there)
    with pytest.raises(ValueError, match="must be \\[5, 1, ...\\] or \\[1, 4, ...\\]"):
        sparse * torch.ones(3)
    entries = torch.arange(1.0, sparse.nnz() + 1)
    expected = torch.zeros(M, N, dtype=torch.float64).index_put(sparse.coo()[:2], entries.double())
    assert torch.equal(dense_of(sparse.mul_nnz(entries, "coo")), dense * expected)
    assert torch.equal(dense_of(sparse.add_nnz(entries, "coo")), (dense + expected) * there)
    assert torch.equal(dense_of(sparse.clone().add_nnz_(entries, "coo")), (dense + expected) * there)
    assert torch.equal(dense_of(sparse.clone().mul_nnz_(entries, "coo")), dense * expected)


def test_the_operands_of_a_broadcast_are_left_alone():
    sparse, dense = matrix()
    other = torch.ones(M, 1, dtype=torch.float64)
    _ = sparse * other, sparse + other, sparse.set_value(None) + other
    assert torch.equal(other, torch.ones_like(other)) and torch.equal(dense_of(sparse), dense)


def test_two_sparse_operands():
    first, dense = matrix()
    second, dense2 = matrix(rows=3, seed=1)
    padded = torch.cat([dense2, torch.zeros(M - 3, N)])
    assert torch.equal(consistent(first + second), dense + padded)
    assert torch.equal(consistent(first * second), dense * padded)
    assert not (first + second.set_value(None)).has_value()
    with pytest.raises(ValueError, match="the second .* has no values"):
        arithmetic.mul(first, second.set_value(None))
    with pytest.raises(NotImplementedError, match="with a float"):
        first + 1.0
    twice = SparseTensor(row=torch.tensor([0, 0]), col=torch.tensor([1, 1]), value=torch.ones(2))
    with pytest.raises(ValueError, match="come twice"):
        twice * twice


# --- samples --------------------------------------------------------------------------------------

def ring(size=20):
    """Each node points to the five after it; values number the entries."""
    row = torch.arange(size).repeat_interleave(5)
    col = (row + torch.arange(1, 6).repeat(size)) % size
    return SparseTensor(row=row, col=col, value=row * size + col, sparse_sizes=(size, size))


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("count", [-1, 0, 3, 9])
def test_sampled_neighbours(count, replace):
    torch.manual_seed(0)
    adj, subset = ring(), torch.tensor([7, 3, 19])
    part, nodes = adj.sample_adj(subset, count, replace)
    assert nodes[:3].tolist() == subset.tolist() and nodes.unique().numel() == nodes.numel()
    row, col, value = part.coo()
    assert torch.equal(value, subset[row] * 20 + nodes[col])
    expected = 5 if count < 0 else count if replace else min(count, 5)
    assert part.storage.rowcount().tolist() == [expected] * 3
    if not replace:
        assert part.is_coalesced()
    consistent(part)


def test_samples_differ_and_are_even():
    torch.manual_seed(0)
    drawn = torch.cat([ring().sample(200, torch.tensor([4])), ring().sample(200)[4:5]], 1)
    counts = torch.bincount(drawn.flatten(), minlength=20)
    assert counts.nonzero().flatten().tolist() == [5, 6, 7, 8, 9] and counts[5:10].min() > 40
    with pytest.raises(ValueError, match="a row without entries"):
        SparseTensor(row=torch.tensor([0]), col=torch.tensor([0]), sparse_sizes=(2, 2)).sample(1)


def test_subgraph_and_walk():
    adj, nodes = ring(), torch.tensor([5, 0, 4, 2])
    part, entry = adj.saint_subgraph(nodes)
    assert torch.equal(consistent(part), adj.to_dense().double()[nodes][:, nodes])
    assert torch.equal(part.storage.value(), adj.storage.value()[entry])
    walk = adj.random_walk(torch.arange(20), 6)
    steps = (walk[:, 1:] - walk[:, :-1]) % 20
    assert walk.shape == (20, 7) and 1 <= steps.min() and steps.max() <= 5
