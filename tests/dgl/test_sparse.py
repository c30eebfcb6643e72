"""`dgl.sparse` where DGL has no library for it: against the same computed with dense matrices."""
from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import dgl
import pytest
import torch
import torch.nn.functional as F

import gnnaccel
from gnnaccel.adapters.dgl.sparse import finder
from tests.routes import opened
from tests.undone import no_sparse_of_dgl

N, M, E = 7, 5, 14


@pytest.fixture
def sp():
    """``dgl.sparse``, stood in for."""
    before, files = list(sys.meta_path), _cached()
    if gnnaccel.standins("dgl.sparse") != ("dgl.sparse",):
        pytest.skip("this DGL has a sparse library for this torch")
    try:
        yield importlib.import_module("dgl.sparse")
    finally:
        no_sparse_of_dgl()
    assert sys.meta_path == before and "dgl.sparse" not in sys.modules and _cached() == files
    assert "dgl_sparse" not in vars(torch.ops)


def _cached():
    """What is compiled of DGL's package: nothing of ours must be among it."""
    folder = Path(dgl.__path__[0]) / "sparse" / "__pycache__"
    return {file.name: file.read_bytes() for file in folder.glob("__init__*")}


def places():
    """Different places of a matrix [N, M], in no order."""
    keys = torch.randperm(N * M)[:E]
    return torch.stack([keys // M, keys % M])


def dense(matrix):
    """Entries at one place added up."""
    out = matrix.val.new_zeros(*matrix.shape, *matrix.val.shape[1:])
    return out.index_put((matrix.row, matrix.col), matrix.val, accumulate=True)


def agree(made, plain, *inputs):
    """The same results and gradients of both."""
    outs = []
    for make in (made, plain):
        given = [t.detach().clone().requires_grad_() for t in inputs]
        out = make(*given)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype,
                                device=out.device).view(out.shape)
        outs.append((out, *torch.autograd.grad((out * weight).sum(), given)))
    for got, want in zip(*outs):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def placed(indices, value):
    """A dense matrix of these values."""
    return value.new_zeros(N, M, *value.shape[1:]).index_put((indices[0], indices[1]), value)


# --- values ---------------------------------------------------------------------------------------

def test_made_of_each_format(sp):
    indices, val = places(), torch.rand(E)
    want = placed(indices, val)
    a = sp.spmatrix(indices, val, (N, M))
    row_starts, cols, order = a.csr()
    col_starts, rows, other = a.csc()
    for b in (a, sp.from_coo(*indices, val, (N, M)), a.T.T, a.coalesce(),
              sp.from_csr(row_starts, cols, val[order], (N, M)),
              sp.from_csc(col_starts, rows, val[other], (N, M)),
              sp.from_torch_sparse(sp.to_torch_sparse_csr(a)),
              sp.from_torch_sparse(sp.to_torch_sparse_coo(a))):
        assert torch.equal(dense(b), want) and b.nnz == E and b.shape == (N, M)
    assert torch.equal(dense(a.T), want.T) and torch.equal(a.to_dense(), want)
    assert torch.equal(dense(sp.val_like(a, val * 2)), want * 2)
    b = sp.from_csr(row_starts, cols, val[order], (N, M))
    assert b.csr()[2] is None and torch.equal(b.csr()[0], row_starts)
    assert repr(a).startswith("SparseMatrix(indices=tensor(")


@pytest.mark.parametrize("channels", [(), (3,)])
def test_products_with_dense(sp, channels):
    indices, val, x = places(), torch.randn(E, *channels), torch.randn(M, 4, *channels)
    agree(lambda v, x: sp.spmatrix(indices, v, (N, M)) @ x,
          lambda v, x: torch.einsum("nm...,mk...->nk...", placed(indices, v), x), val, x)
    if not channels:
        agree(lambda v, x: sp.spmatrix(indices, v, (N, M)) @ x,
              lambda v, x: placed(indices, v) @ x, val, x[:, 0])


def test_products_of_whole_and_half_numbers(sp):
    indices = places()
    for dtype in (torch.int64, torch.bfloat16):
        a, x = torch.randint(5, (E,)).to(dtype), torch.randint(5, (M, 3)).to(dtype)
        assert torch.equal(sp.spmatrix(indices, a, (N, M)) @ x, placed(indices, a) @ x)


@pytest.mark.parametrize("form", ["plain", "vectors", "channels", "value of channels"])
def test_products_at_entries(sp, form):
    indices = places()
    val = torch.randn(E, 3) if form == "value of channels" else torch.randn(E)
    tail = (3,) if "channels" in form else ()
    x, y = torch.randn(N, 4, *tail), torch.randn(4, M, *tail)
    if form == "vectors":
        x, y = torch.randn(N), torch.randn(M)

    def plain(v, x, y):
        if form == "vectors":
            full = x[:, None] * y
        else:
            full = torch.einsum("nk...,km...->nm...", x, y)
        at = full[indices[0], indices[1]]
        return at * (v[:, None] if v.dim() < at.dim() else v)

    agree(lambda v, x, y: sp.sddmm(sp.spmatrix(indices, v, (N, M)), x, y).val, plain, val, x, y)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("channels", [(), (3,)])
def test_softmax(sp, dim, channels):
    indices = places()

    def plain(v):
        full = torch.full((N, M, *channels), -torch.inf).index_put((indices[0], indices[1]), v)
        return full.softmax(dim)[indices[0], indices[1]]

    agree(lambda v: sp.softmax(sp.spmatrix(indices, v, (N, M)), dim).val, plain,
          torch.randn(E, *channels))


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("name", ["sum", "smean", "smax", "smin", "sprod"])
def test_reductions(sp, name, dim):
    indices, val = places(), torch.randn(E, 2)
    got = getattr(sp.spmatrix(indices, val, (N, M)), name)(dim)
    full = {"sum": torch.sum, "smean": torch.mean, "smax": torch.amax, "smin": torch.amin,
            "sprod": torch.prod}[name]
    if dim is None:
        want = full(val, 0)
    else:
        want = torch.stack([full(val[indices[1 - dim] == i], 0)
                            if (indices[1 - dim] == i).any() else torch.zeros(2)
                            for i in range((M, N)[dim])])
    torch.testing.assert_close(got, want)
    assert torch.equal(got, sp.reduce(sp.spmatrix(indices, val, (N, M)), dim, name))


def test_arithmetic(sp):
    first, second = places(), places()
    v, w = torch.rand(E) + 1, torch.rand(E) + 1

    def of(function):
        return lambda v, w: dense(function(sp.spmatrix(first, v, (N, M)),
                                           sp.spmatrix(second, w, (N, M))))

    agree(of(lambda a, b: a + b), lambda v, w: placed(first, v) + placed(second, w), v, w)
    agree(of(lambda a, b: a - b), lambda v, w: placed(first, v) - placed(second, w), v, w)
    agree(of(lambda a, b: a * b), lambda v, w: placed(first, v) * placed(second, w), v, w)
    agree(of(lambda a, b: a @ b.T), lambda v, w: placed(first, v) @ placed(second, w).T, v, w)
    turned = torch.randperm(E)
    agree(lambda v, w: (sp.spmatrix(first, v, (N, M))
                        / sp.spmatrix(first[:, turned], w[turned], (N, M))).val,
          lambda v, w: v / w, v, w)
    a = sp.spmatrix(first, v, (N, M))
    for b, want in ((2 * a, 2 * v), (a / 2, v / 2), (a ** 2, v ** 2), (-a, -v)):
        assert torch.equal(b.val, want)


def test_diagonals(sp):
    d, e = sp.diag(torch.rand(N)), sp.diag(torch.rand(M), (N, M))
    a = sp.spmatrix(places(), torch.rand(E), (N, M))
    for product, want in ((d @ a, dense(d) @ dense(a)), (d @ e, dense(d) @ dense(e)),
                          (e.T @ e, dense(e).T @ dense(e)), (e @ e.T, dense(e) @ dense(e).T),
                          (e.T @ a, dense(e).T @ dense(a)), (a @ e.T, dense(a) @ dense(e).T)):
        assert product.shape == tuple(want.shape)
        torch.testing.assert_close(dense(product), want)
    assert (d @ d + d).is_diag() and not a.is_diag() and d.T.is_diag()
    torch.testing.assert_close(dense(d.inv()) @ dense(d), torch.eye(N))
    assert torch.equal(dense(sp.identity((N, N)) + a @ a.T), dense(a @ a.T) + torch.eye(N))


def test_entries_at_one_place(sp):
    a = sp.spmatrix(torch.tensor([[0, 0, 1], [1, 1, 0]]), torch.tensor([1., 2., 3.]), (2, 2))
    assert a.has_duplicate() and not a.coalesce().has_duplicate()
    assert a.coalesce().val.tolist() == [3., 3.]
    assert (a @ torch.eye(2)).tolist() == [[0., 3.], [3., 0.]]
    for do in (lambda: a @ a, lambda: a * a, lambda: a / a):
        with pytest.raises(RuntimeError, match="coalesce"):
            do()


# --- choosing -------------------------------------------------------------------------------------

@pytest.mark.parametrize("dim", [0, 1])
def test_choosing(sp, dim):
    a = sp.spmatrix(places(), torch.rand(E), (N, M))
    ids = torch.tensor([3, 0, 3])
    assert torch.equal(dense(a.index_select(dim, ids)), dense(a).index_select(dim, ids))
    assert torch.equal(dense(a.range_select(dim, slice(1, 3))), dense(a).narrow(dim, 1, 2))
    with pytest.raises(RuntimeError, match="numbers from 0"):
        a.index_select(dim, torch.tensor([9]))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_sampling(sp, dim, replace, bias):
    val = torch.rand(E) + 1
    val[::2] *= 0 if bias else 1
    a = sp.spmatrix(places(), val, (N, M))
    possible = (dense(a) > 0).sum(1 - dim)
    for ids in (None, torch.tensor([4, 1])):
        b = a.sample(dim, 2, ids, replace, bias)
        whole = dense(a) if ids is None else dense(a).index_select(dim, ids)
        assert b.shape == tuple(whole.shape) and (b.val > 0).all()
        assert torch.equal(whole[b.row, b.col], b.val) and (replace or not b.has_duplicate())
        of = possible if ids is None else possible[ids]
        counts = torch.bincount((b.row, b.col)[dim], minlength=len(of))
        assert torch.equal(counts, 2 * (of > 0) if replace else of.clamp(max=2))


def test_sampling_by_weight(sp):
    torch.manual_seed(0)
    a = sp.spmatrix(torch.tensor([[0] * 2, [0, 1]]), torch.tensor([3., 1.]), (1, 2))
    for replace in (False, True):
        drawn = sum(a.sample(0, 1, torch.tensor([0]), replace, True).col for _ in range(400))
        assert 60 < int(drawn) < 140  # 100 of 400


@pytest.mark.parametrize("dim", [0, 1])
def test_renumbering(sp, dim):
    a = sp.spmatrix(torch.tensor([[5, 2, 5], [4, 2, 1]]), torch.rand(3), (N, M))
    b, ids = a.compact(dim, torch.tensor([3, 2]))
    assert ids.tolist() == ([3, 2, 5] if dim == 0 else [3, 2, 1, 4])
    assert torch.equal(dense(b), dense(a).index_select(dim, ids))


# --- errors ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("do,match", [
    (lambda sp, a: a @ torch.rand(N, 2), r"spmm: a matrix of \[7, 5\]"),
    (lambda sp, a: a @ torch.rand(M, 2).double(), "must be alike"),
    (lambda sp, a: sp.sddmm(a, torch.rand(N, 2), torch.rand(3, M)), "sddmm"),
    (lambda sp, a: a @ a, r"spspmm: \[7, 5\] cannot"),
    (lambda sp, a: a + a.T, "one shape"),
    (lambda sp, a: sp.val_like(a, torch.rand(3)), r"\[3\] values are given for 14"),
    (lambda sp, a: sp.from_csr(torch.tensor([0, 1]), torch.tensor([0]), shape=(3, 3)),
     "one more than"),
    (lambda sp, a: sp.reduce(a, 0, "median"), "use one of sum"),
])
def test_errors(sp, do, match):
    with pytest.raises(RuntimeError, match=match):
        do(sp, sp.spmatrix(places(), torch.rand(E), (N, M)))


# --- kernels --------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("channels", [(), (3,)])
def test_kernels_run_products_and_softmax(sp, name, channels):
    with opened(name) as route:
        _by_kernels(sp, route, channels)


def _by_kernels(sp, route, channels):
    device, indices = route.device, places()
    val, x = torch.randn(E, *channels), torch.randn(M, 4, *channels)
    y = torch.randn(N, 4, *channels)

    def made(v, x, y):
        a = sp.spmatrix(indices.to(v.device), v, (N, M))
        a = sp.sddmm(a, y, x.transpose(0, 1))
        return a.softmax() @ x

    gnnaccel.reset_stats()
    want = []
    for on in (False, True):
        given = [t.to(device if on else "cpu").requires_grad_() for t in
                 (val.clone(), x.clone(), y.clone())]
        with route.on() if on else gnnaccel.disabled():
            out = made(*given)
            out.square().sum().backward()
        want.append((out, *(t.grad for t in given)))
    for first, second in zip(*want):
        torch.testing.assert_close(second.cpu(), first, rtol=1e-4, atol=1e-5)
    stats = gnnaccel.stats()
    for name in ("spmm", "sddmm", "softmax"):
        assert stats[f"dgl.sparse.{name}"]["routes"] == {"cuda": 1}


def test_on_a_cpu_nothing_is_routed(sp):
    gnnaccel.reset_stats()
    with gnnaccel.enabled():
        sp.spmatrix(places(), torch.rand(E), (N, M)) @ torch.rand(M, 2)
    assert gnnaccel.stats()["dgl.sparse.spmm"]["routes"] == {"native": 1}


# --- scripts --------------------------------------------------------------------------------------

def test_calls_of_dgls_examples(sp):
    """What DGL's examples of GCN, SGC, APPNP and GAT call, with gradients."""
    torch.manual_seed(0)
    g = dgl.to_simple(dgl.graph((torch.randint(0, N, (E,)), torch.randint(0, N, (E,))),
                                num_nodes=N))
    g = dgl.remove_self_loop(g)
    x, weight = torch.randn(N, 4), torch.randn(4, 3)
    a = sp.spmatrix(torch.stack(g.edges()), shape=(N, N))
    hat = a + sp.identity(a.shape)
    scale = sp.diag(hat.sum(1)) ** -0.5
    norm = scale @ hat @ scale
    full = torch.zeros(N, N).index_put(g.edges(), torch.ones(())) + torch.eye(N)
    degree = full.sum(1) ** -0.5
    plain = degree[:, None] * full * degree
    agree(lambda w: F.relu(norm @ (x @ w)), lambda w: F.relu(plain @ (x @ w)), weight)
    agree(lambda w: 0.9 * sp.val_like(norm, norm.val * 2) @ (x @ w) + 0.1 * x @ w,
          lambda w: 0.9 * (2 * plain) @ (x @ w) + 0.1 * x @ w, weight)

    def attention(z):  # heads last
        e = z.sum(1)[hat.row] + 2 * z.sum(1)[hat.col]
        return sp.bspmm(sp.val_like(hat, F.leaky_relu(e)).softmax(), z)

    def plain_attention(z):
        e = F.leaky_relu(z.sum(1)[:, None] + 2 * z.sum(1)[None])
        e = e.masked_fill(full[..., None] == 0, -torch.inf).softmax(1)
        return torch.einsum("nmh,mkh->nkh", e, z)

    agree(attention, plain_attention, torch.randn(N, 5, 2))


def test_adjacency_of_a_graph(sp):
    g = dgl.graph(([0, 1, 2], [1, 2, 3]))
    assert torch.equal(g.adj().to_dense(), torch.diag(torch.ones(3), 1))


def test_int32_and_no_entries(sp):
    a = dgl.graph(([0, 1, 2], [1, 2, 3])).int().adj()
    assert a.indices().dtype == torch.int32 and torch.equal(a @ torch.eye(4), a.to_dense())
    b = sp.spmatrix(torch.zeros(2, 0, dtype=torch.long), torch.zeros(0), (3, 4))
    assert (b @ torch.ones(4, 2)).shape == (3, 2) and not (b @ b.T).nnz and not b.softmax().nnz


# --- asking for it --------------------------------------------------------------------------------

def test_only_where_the_library_is_missing(tmp_path):
    assert not finder.has_library(tmp_path)
    (tmp_path / "dgl_sparse").mkdir()
    version = torch.__version__.partition("+")[0]
    (tmp_path / "dgl_sparse" / "libdgl_sparse_pytorch_1.0.0.so").touch()
    assert not finder.has_library(tmp_path)
    (tmp_path / "dgl_sparse" / f"libdgl_sparse_pytorch_{version}.so").touch()
    assert finder.has_library(tmp_path)
    assert finder.libraries(tmp_path) == (version, sorted(["1.0.0", version]))


@pytest.mark.parametrize("library", [True, False])
def test_a_library_comes_first(library, monkeypatch):
    before = list(sys.meta_path)
    monkeypatch.setattr(finder, "has_library", lambda folder: library)
    try:
        assert gnnaccel.standins("dgl.sparse") == (() if library else ("dgl.sparse",))
    finally:
        no_sparse_of_dgl()
    assert sys.meta_path == before


@pytest.mark.long
def test_in_a_process_of_its_own():
    code = """
import sys, gnnaccel
assert "torch" not in sys.modules and "dgl" not in sys.modules
import dgl.sparse as sp, torch
print((sp.spmatrix(torch.tensor([[0], [1]])) @ torch.ones(2, 1)).tolist())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={**os.environ, "GNNACCEL_STANDINS": "dgl.sparse"})
    if not finder.has_library(Path(dgl.__path__[0])):
        assert done.stdout == "[[1.0]]\n", done.stderr


def test_without_it_dgl_says_that_the_library_is_missing():
    if finder.has_library(Path(dgl.__path__[0])):
        pytest.skip("this DGL has a sparse library for this torch")
    with pytest.raises(FileNotFoundError):
        importlib.import_module("dgl.sparse")
