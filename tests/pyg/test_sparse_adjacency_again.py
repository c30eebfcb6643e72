"""Adjacencies that are sparse matrices: what is read again, what is kept, what stays native."""
from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch_geometric import nn

import gnnaccel
from gnnaccel.adapters.pyg.propagate import adjacency, reading
from gnnaccel.adapters.pyg.propagate import calls as propagate_calls
from gnnaccel.dispatch.graph import cache
from tests.pyg import graphs
from tests.pyg.graphs import E, F, N
from tests.pyg.matrices import (INDICES, QUIET, Forgetting, Typing, Weighing, calls, made, matrix,
                                parts, trained)
from tests.pyg.own_layers import Rectifying

pytestmark = QUIET


# ---- what is read again ----

def test_values_are_read_in_each_call(kernels):
    layer, x = nn.GraphConv(F, 5).to(kernels.device), graphs.features().to(kernels.device)
    own = matrix(values=torch.rand(E)).to(kernels.device)
    values = own.values().clone()
    adj = made(*parts(own), values, own)
    with kernels.on():
        before = calls(layer, x, adj)[-1]
        adj.values().mul_(2)  # counted
        twice = calls(layer, x, adj)
        values.mul_(2)  # not counted by the matrix
        four = calls(layer, x, adj)
    root = layer.lin_root(x) + layer.lin_rel.bias
    for out, factor in (*((one, 2) for one in twice), *((one, 4) for one in four)):
        torch.testing.assert_close(out - root, factor * (before - root), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", ["in place", "copied into", "another"])
def test_edges_that_changed(kernels, change):
    layer, x = nn.GraphConv(F, 5).to(kernels.device), graphs.features().to(kernels.device)
    adj = matrix(values=torch.rand(E)).to(kernels.device)
    turned = made(adj.crow_indices(), (N - 1 - adj.col_indices()), adj.values(), adj)
    with kernels.on():
        calls(layer, x, adj)
        if change == "in place":
            adj.col_indices().copy_(turned.col_indices())
        elif change == "copied into":
            adj.copy_(turned)
        else:
            adj = turned
        found = calls(layer, x.requires_grad_(), adj)
        found[-1].square().sum().backward()
    expected = [t.to(kernels.device) for t in trained(layer, x, turned)]
    for out in found:
        torch.testing.assert_close(out.double(), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("index", INDICES)
def test_a_matrix_written_between_forward_and_backward(kernels, index):
    """An error, as with the host."""
    layer, x = nn.GraphConv(F, 5).to(kernels.device), graphs.features().to(kernels.device)
    adj = matrix(values=torch.rand(E), index=index).to(kernels.device)
    with kernels.on():
        out = layer(x.requires_grad_(), adj)
        adj.col_indices().zero_()
        with pytest.raises(RuntimeError, match="inplace operation"):
            out.sum().backward()


@pytest.mark.long
def test_a_new_matrix_in_reused_memory(kernels):
    """Each has other edges, and most lie where one lay before."""
    layer, x = nn.GraphConv(F, 5).to(kernels.device), graphs.features().to(kernels.device)
    for seed in range(8):
        torch.manual_seed(seed)
        adj = matrix(torch.stack([torch.randperm(N), torch.arange(N)])).to(kernels.device)
        expected = trained(layer, x, adj)[0]
        with kernels.on():
            torch.testing.assert_close(layer(x, adj).cpu().double(), expected, rtol=1e-4, atol=1e-5)
        del adj


def test_values_that_begin_to_want_gradients(kernels):
    layer, x = nn.GraphConv(F, 5).to(kernels.device), graphs.features().to(kernels.device)
    adj = matrix(values=torch.rand(E)).to(kernels.device)
    with kernels.on():
        calls(layer, x, adj)
        layer(x, adj.requires_grad_()).square().sum().backward()
    plain = matrix_gradient(layer, x, adj)
    torch.testing.assert_close(adj.grad.values(), plain, rtol=1e-4, atol=1e-5)


def matrix_gradient(layer, x, adj):
    own = adj.detach().cpu().clone().requires_grad_()
    copy.deepcopy(layer).cpu()(x.cpu(), own).square().sum().backward()
    return own.grad.values().to(x.device)


# ---- memory and cost ----

def test_index_arrays_are_read_in_place_and_not_kept_alive(emulated):
    layer, x = nn.GraphConv(F, 5), graphs.features()
    adj = matrix(values=torch.rand(E), index=torch.int32)
    with emulated.on():
        calls(layer, x.requires_grad_(), adj)[-1].sum().backward()
        view = next(iter(cache._entries.values())).view
        rows = view.csc(places=False)
        assert rows.indptr.data_ptr() == adj.crow_indices().data_ptr()
        assert rows.other.data_ptr() == adj.col_indices().data_ptr()
        assert rows.place.shape[0] == 0  # values are read in the order in which they lie
        assert cache.info()["misses"] == 1
    gone = weakref.ref(view), weakref.ref(adjacency.edges_of(adj))
    del view, rows, adj
    gc.collect()
    assert [ref() for ref in gone] == [None, None] and cache.info()["entries"] == 0
    assert not adjacency._kept.entries


def test_a_cached_norm_keeps_one_structure(emulated):
    x, adj = graphs.features(), matrix(values=torch.rand(E))
    for cached, misses in ((True, 1), (False, 4)):
        cache.clear()
        layer = nn.GCNConv(F, 5, cached=cached)
        with emulated.on():
            calls(layer, x, adj, 4)
        assert cache.info()["misses"] == misses


def test_a_comparison_with_the_hosts_product(emulated):
    with gnnaccel.enabled(when="supported", backend="cuda"):
        found = gnnaccel.compare(nn.GraphConv(F, 5), graphs.features(),
                                 matrix(values=torch.rand(E)))
    assert [one.verdict for one in found.layers] == ["same"]


def test_a_new_matrix_in_each_native_call_is_not_read(monkeypatch):
    """What a call over one matrix told holds for the next; not for a list of edges."""
    layer, x, seen = nn.SAGEConv(4, 5), torch.randn(N, 4), []
    ids = torch.stack([torch.arange(N), torch.arange(N).flip(0)]).repeat(1, 1000)
    read = reading.read
    monkeypatch.setattr(reading, "read", lambda *args: seen.append(args) or read(*args))
    monkeypatch.setattr(propagate_calls, "too_small", lambda *args: False)
    with gnnaccel.enabled():
        for _ in range(4):
            layer(x, matrix())
        assert len(seen) == 1
        layer(x, ids)
    assert len(seen) == 2


def test_a_cpu_keeps_torchs_own_product():
    layer, x, adj = nn.SAGEConv(F, 5), graphs.features(), matrix(values=torch.rand(E))
    expected = layer(x, adj)
    with gnnaccel.enabled():
        assert all(torch.equal(out, expected) for out in calls(layer, x, adj))
    assert gnnaccel.stats()["SAGEConv"]["routes"] == {"native": 3}


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True])
def test_large_products_pay_on_a_gpu(gpu, training):
    nodes, edges = 100_000, 4_000_000
    adj = matrix(torch.randint(nodes, (2, edges)), None, (nodes, nodes)).to(gpu.device)
    layer = nn.GraphConv(64, 8).to(gpu.device)
    x = torch.randn(nodes, 64, device=gpu.device, requires_grad=training)
    with gnnaccel.enabled(), torch.set_grad_enabled(training):
        calls(layer, x, adj, 20)
    assert gnnaccel.stats()["GraphConv"]["routes"]["cuda"] >= 4


# ---- what stays native ----

def native(layer, code, *args):
    expected = layer(*args)
    with gnnaccel.enabled(when="supported"):
        assert torch.equal(layer(*args), expected)
    assert gnnaccel.stats()[type(layer).__name__]["reasons"] == {code: 1}


@pytest.mark.long
def test_what_stays_native(emulated):
    class Multiplying(nn.SAGEConv):
        def message_and_aggregate(self, adj_t, x):
            return adj_t @ x[0]

    x, adj = graphs.features(), matrix(values=torch.rand(E))
    native(Multiplying(F, 5), "GA211", x, adj)
    gnnaccel.reset_stats()
    native(Rectifying(), "GA204", x, adj, torch.randn(adj._nnz(), F))
    gnnaccel.reset_stats()
    native(nn.GraphConv(F, 5), "GA303", x, matrix(torch.zeros(2, 0, dtype=torch.long)))
    gnnaccel.reset_stats()
    native(nn.GraphConv(F, 5), "GA204", x, adj.to_sparse_coo())
    gnnaccel.reset_stats()
    native(Typing(), "GA204", x, adj)
    gnnaccel.reset_stats()
    columns = adj.to_sparse_csc().requires_grad_()
    native(nn.GraphConv(F, 5), "GA204", x, columns)


def test_hooks_and_errors_are_the_hosts(emulated):
    x, adj = graphs.features(), matrix(values=torch.rand(E))
    layer = nn.GraphConv(F, 5)
    layer.register_message_and_aggregate_forward_hook(lambda module, given, out: 2 * out)
    native(layer, "GA501", x, adj)
    with gnnaccel.enabled(when="supported"):
        with pytest.raises(RuntimeError):
            nn.SAGEConv(F, 5)(x[:-1], adj)
        with pytest.raises(UnboundLocalError):
            Forgetting()(x, adj)
        with pytest.raises(ValueError, match="target_to_source"):
            Weighing(flow="target_to_source")(x, adj)


def test_a_product_that_somebody_replaced(emulated, monkeypatch):
    x, adj, layer = graphs.features(), matrix(values=torch.rand(E)), nn.GraphConv(F, 5)
    with gnnaccel.enabled(when="supported"):
        before = calls(layer, x, adj)[-1]
        monkeypatch.setattr("torch_geometric.nn.conv.graph_conv.spmm",
                            lambda src, other, reduce: torch.zeros(src.shape[0], other.shape[1]))
        after = layer(x, adj)
    torch.testing.assert_close(after, layer.lin_root(x) + layer.lin_rel.bias)
    assert not torch.allclose(before, after)
