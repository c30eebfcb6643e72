"""Adjacencies that are sparse matrices in CSR or CSC: sums over them by kernels, against PyG's own
products in float64."""
from __future__ import annotations

import copy
import gc
import inspect
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch_geometric import nn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from torch_geometric.transforms import ToSparseTensor
from torch_geometric.utils import spmm

import gnnaccel
from gnnaccel.adapters.pyg.propagate import adjacency, reading
from gnnaccel.adapters.pyg.propagate import calls as propagate_calls
from gnnaccel.dispatch.graph import cache
from tests.pyg import graphs
from tests.pyg.graphs import E, F, M, N
from tests.pyg.judge import took
from tests.pyg.own_layers import Rectifying

pytestmark = [pytest.mark.filterwarnings("ignore:Sparse (CS|invariant).*:UserWarning"),
              pytest.mark.filterwarnings("ignore:Converting sparse tensor:UserWarning")]
INDICES = (torch.int64, torch.int32)
LAYERS = {"GCN2Conv": lambda: nn.GCN2Conv(F, 0.5, 0.5, 1, normalize=False),
          "GCNConv": lambda: nn.GCNConv(F, 5), "SGConv": lambda: nn.SGConv(F, 5, K=2),
          "SAGEConv": lambda: nn.SAGEConv(F, 5), "GraphConv": lambda: nn.GraphConv(F, 5),
          "SAGEConv sum": lambda: nn.SAGEConv(F, 5, aggr="sum"),
          "GINConv": lambda: nn.GINConv(torch.nn.Linear(F, 5)),
          "TAGConv": lambda: nn.TAGConv(F, 5, K=2), "APPNP": lambda: nn.APPNP(2, 0.1)}


class Weighing(MessagePassing):
    """A user's layer, which makes messages of the matrix's values."""

    def forward(self, x, edge_index, edge_weight=None):
        return self.propagate(edge_index, x=x, edge_weight=edge_weight)

    def message(self, x_j, edge_weight):
        return x_j * edge_weight.view(-1, 1)


class Copying(MessagePassing):
    """A user's layer, whose messages leave the values out."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j


class Typing(MessagePassing):
    """A user's layer, for which PyG takes a matrix's values for types of edges."""

    def forward(self, x, edge_index, edge_type=None):
        return self.propagate(edge_index, x=x, edge_type=edge_type)

    def message(self, x_j, edge_type):
        return x_j if edge_type is None else x_j * edge_type.view(-1, 1)


class Forgetting(MessagePassing):
    """A user's layer that gives no weight where its message takes one: PyG fails."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j, edge_weight=None):
        return x_j if edge_weight is None else x_j * edge_weight.view(-1, 1)


def matrix(edges=None, values=None, sizes=(N, N), index=torch.int64, layout=torch.sparse_csr):
    """[destinations, sources] of ``edges`` [2, E], one number each, ones where there are no
    ``values``."""
    edges = graphs.square() if edges is None else edges
    values = torch.ones(edges.shape[1]) if values is None else values
    found = torch.sparse_coo_tensor(edges.flip(0), values, sizes).coalesce().to_sparse(
        layout=layout)
    pointers, ids = parts(found)
    return made(pointers.to(index), ids.to(index), found.values(), found)


def parts(found):
    return ((found.crow_indices(), found.col_indices()) if found.layout is torch.sparse_csr else
            (found.ccol_indices(), found.row_indices()))


def made(pointers, ids, values, like):
    return torch.sparse_compressed_tensor(pointers, ids, values, like.shape, layout=like.layout)


def trained(layer, x, adj, device="cpu", dtype=torch.float32):
    """The result, and the gradients of features, values and parameters, on ``device``. Of a matrix
    in CSC torch has no gradients of values."""
    layer = copy.deepcopy(layer).to(device, dtype)
    pair = x if isinstance(x, tuple) else (x,)
    xs = [t.detach().to(device, dtype).requires_grad_() for t in pair]
    values = adj.values().detach().to(device, dtype)
    values.requires_grad_(adj.layout is torch.sparse_csr)
    moved = made(*(t.to(device) for t in parts(adj)), values, adj)
    given = (tuple(xs) if isinstance(x, tuple) else xs[0])
    out = layer(given, *([xs[0]] if isinstance(layer, nn.GCN2Conv) else []), moved)
    out.square().sum().backward()
    return [t.detach().cpu().double() for t in
            (out, *(one.grad for one in (*xs, values, *layer.parameters())
                    if one.grad is not None))]


def agree(found, truth):
    assert len(found) == len(truth)
    for one, exact in zip(found, truth):
        assert (one - exact).norm() <= 3e-6 * exact.norm().clamp(min=1e-3)


def by_kernels(route, layer, x, adj, calls=None):
    truth = trained(layer, x, adj, dtype=torch.float64)
    with route.on():
        agree(trained(layer, x, adj, route.device), truth)
    if calls is not None:
        took(route, calls)


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernels(request):
    from tests.routes import opened
    with opened(request.param) as found:
        yield found


# ---- results ----

@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(kernels, name, index):
    layer = LAYERS[name]()
    by_kernels(kernels, layer, graphs.features(), matrix(values=torch.rand(E), index=index))
    by_kernels(kernels, layer, graphs.features(), matrix(index=index))


@pytest.mark.parametrize("aggr", ["sum", "mean"])
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
@pytest.mark.parametrize("index", INDICES)
def test_rectangular_with_empty_rows(kernels, aggr, layout, index):
    edges = graphs.bipartite()
    edges = edges[:, edges[1] % 3 != 0]
    adj = matrix(edges, torch.randn(edges.shape[1]), (M, N), index, layout)
    x = graphs.features(), graphs.features(M)
    by_kernels(kernels, nn.SAGEConv((F, F), 5, aggr=aggr), x, adj, 1)


def test_extrema_of_weighted_rows(kernels):
    """PyG has no such product on a GPU; kernels run there however small the graph is."""
    layer, x, adj = nn.SAGEConv(F, 5, aggr="max"), graphs.features(), matrix(values=torch.randn(E))
    by_kernels(kernels, layer, x, adj, 1)
    if kernels.device.type == "cuda":
        gnnaccel.reset_stats()
        with gnnaccel.enabled():
            trained(layer, x, adj, kernels.device)
        took(kernels, 1)


@pytest.mark.parametrize("aggr", ["sum", "mean", "max", ["sum", "mean"]])
def test_messages_of_users(route, aggr):
    adj, x = matrix(values=torch.rand(E)), graphs.features()
    by_kernels(route, Weighing(aggr=aggr), x, adj, 1)
    layer, moved, x = Copying(aggr=aggr), adj.to(route.device), x.to(route.device)
    expected = layer(x, moved)
    with route.on():
        for _ in range(2):
            torch.testing.assert_close(layer(x, moved), expected)


def test_weights_that_were_given_win_over_values(route):
    adj, x = matrix(values=torch.rand(E)).to(route.device), graphs.features().to(route.device)
    layer, weight = Weighing(), torch.rand(adj._nnz(), device=route.device)
    expected = layer(x, adj, weight)
    with route.on():
        for _ in range(2):
            torch.testing.assert_close(layer(x, adj, weight), expected)


@pytest.mark.parametrize("name", adjacency._MULTIPLYING)
def test_layers_that_are_known_multiply(name):
    """All that the product reads of a layer is ``aggr``, and of its features the first."""
    function, x, adj = getattr(nn, name).message_and_aggregate, graphs.features(), matrix()
    parameters = inspect.signature(function).parameters
    pair = "Tuple" in str(parameters["x"].annotation)
    more = {"edge_weight": None} if "edge_weight" in parameters else {}
    for aggr in ("sum", "mean", "max"):
        out = function(SimpleNamespace(aggr=aggr), adj, x=(x, None) if pair else x, **more)
        assert torch.equal(out, spmm(adj, x, aggr))


def test_extrema_need_not_gain_where_the_host_has_no_code(emulated, monkeypatch):
    """As on a GPU."""
    layer, x, adj = nn.SAGEConv(F, 5, aggr="max"), graphs.features(), matrix(values=torch.rand(E))
    expected = layer(x, adj)
    monkeypatch.setattr(adjacency, "host_refuses", lambda *args: True)
    with gnnaccel.enabled():
        for out in calls(layer, x, adj):
            torch.testing.assert_close(out, expected)
    assert gnnaccel.stats()["SAGEConv"]["routes"] == {"cuda": 3}


def test_a_subclass_with_another_message_is_multiplied_as_ever(kernels):
    """As PyG has it: with a matrix, ``message`` of a layer that multiplies is never called."""
    class Doubling(nn.GraphConv):
        def message(self, x_j, edge_weight):
            return 2 * x_j

    by_kernels(kernels, Doubling(F, 5), graphs.features(), matrix(values=torch.rand(E)), 1)


def test_what_a_transform_of_pygs_makes(kernels):
    data = ToSparseTensor()(Data(x=graphs.features(), edge_index=graphs.square(),
                                 edge_weight=torch.rand(E)))
    assert data.adj_t.layout is torch.sparse_csr
    by_kernels(kernels, nn.GraphConv(F, 5), data.x, data.adj_t, 1)


@pytest.mark.parametrize("index", INDICES)
def test_strided_arrays(kernels, index):
    """As torch takes them: every second number of an array."""
    adj, layer, x = matrix(values=torch.rand(E), index=index), nn.GraphConv(F, 5), graphs.features()
    expected = layer(x, adj).to(kernels.device)
    apart = [torch.stack([t, t + 1], 1).to(kernels.device)[:, 0] for t in (*parts(adj), adj.values())]
    layer, x, adj = layer.to(kernels.device), x.to(kernels.device), made(*apart, adj)
    assert not adj.col_indices().is_contiguous()
    with kernels.on():
        torch.testing.assert_close(layer(x.requires_grad_(), adj), expected)
    took(kernels, 1)


def test_second_derivatives(kernels):
    layer, adj, features = nn.GraphConv(F, 5), matrix(values=torch.rand(E)), graphs.features()
    found = []
    for dtype, device in ((torch.float64, "cpu"), (torch.float32, kernels.device)):
        # edge by edge, as torch's product has no second derivatives
        run = copy.deepcopy(layer).to(device, dtype)
        x = features.detach().to(device, dtype).requires_grad_()
        values = adj.values().detach().to(device, dtype).requires_grad_()
        moved = made(*(t.to(device) for t in parts(adj)), values, adj)
        rows = torch.repeat_interleave(torch.arange(N), adj.crow_indices().diff())
        edges = torch.stack([adj.col_indices(), rows]).to(device)
        if found:
            with kernels.on():
                out = run(x, moved)
        else:
            out = run(x, edges, values)
        first, = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), (x, values))
        found.append([t.detach().cpu().double() for t in (first, *second)])
    for one, exact in zip(found[1], found[0]):
        assert (one - exact).norm() <= 1e-5 * exact.norm()
    assert gnnaccel.stats()["GraphConv"]["routes"] == {"cuda": 1}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(kernels, mode):
    layer, x = nn.GraphConv(F, 5), graphs.features()
    adj = matrix(values=torch.rand(E))
    expected = layer(x, adj).detach()
    layer, x, adj = layer.to(kernels.device), x.to(kernels.device), adj.to(kernels.device)
    with mode(), kernels.on():
        for given in (adj, adj, adj.clone()):
            torch.testing.assert_close(layer(x, given).cpu(), expected)
    with kernels.on():  # what was built inside is good for training
        layer(x.clone().requires_grad_(), adj).sum().backward()
    took(kernels, 4)


# ---- what is read again ----

def calls(layer, x, adj, count=3):
    return [layer(x, adj) for _ in range(count)]


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


def test_a_new_matrix_in_reused_memory(kernels):
    """Each has other edges, and most lie where one lay before."""
    layer, x = nn.GraphConv(F, 5).to(kernels.device), graphs.features().to(kernels.device)
    for seed in range(8):
        torch.manual_seed(seed)
        adj = matrix(torch.stack([torch.randperm(N), torch.arange(N)])).to(kernels.device)
        expected = trained(layer, x, adj)[0]
        with kernels.on():
            torch.testing.assert_close(layer(x, adj).cpu().double(), expected,
                                       rtol=1e-4, atol=1e-5)
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
    assert not adjacency._kept._entries


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
        calls(layer, x, adj, 8)
    assert gnnaccel.stats()["GraphConv"]["routes"]["cuda"] >= 4


# ---- what stays native ----

def native(layer, code, *args):
    expected = layer(*args)
    with gnnaccel.enabled(when="supported"):
        assert torch.equal(layer(*args), expected)
    assert gnnaccel.stats()[type(layer).__name__]["reasons"] == {code: 1}


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
