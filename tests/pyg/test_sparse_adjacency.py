"""Adjacencies that are sparse matrices in CSR or CSC: sums over them by kernels, against PyG's own
products in float64."""
from __future__ import annotations

import contextlib
import copy
import inspect
from types import SimpleNamespace

import pytest
import torch
from torch_geometric import nn
from torch_geometric.data import Data
from torch_geometric.transforms import ToSparseTensor
from torch_geometric.utils import spmm

import gnnaccel
from gnnaccel.adapters.pyg.propagate import adjacency
from tests.pyg import graphs
from tests.pyg.graphs import E, F, M, N
from tests.pyg.judge import took
from tests.pyg.matrices import (INDICES, QUIET, Weighing, by_kernels, calls, made, matrix,
                                parts, trained)
from tests.pyg.own_layers import Copying
from tests.routes import opened

pytestmark = QUIET
LAYERS = {"GCN2Conv": lambda: nn.GCN2Conv(F, 0.5, 0.5, 1, normalize=False),
          "GCNConv": lambda: nn.GCNConv(F, 5), "SGConv": lambda: nn.SGConv(F, 5, K=2),
          "SAGEConv": lambda: nn.SAGEConv(F, 5), "GraphConv": lambda: nn.GraphConv(F, 5),
          "SAGEConv sum": lambda: nn.SAGEConv(F, 5, aggr="sum"),
          "GINConv": lambda: nn.GINConv(torch.nn.Linear(F, 5)),
          "TAGConv": lambda: nn.TAGConv(F, 5, K=2), "APPNP": lambda: nn.APPNP(2, 0.1)}


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


@pytest.mark.parametrize("aggr", ["max", "min"])
@pytest.mark.parametrize("name", ["torch", "emulated"])  # on a CPU: PyG has none for a GPU
def test_extrema_of_zero(name, aggr):
    """All of the gradient goes to the row that is one, as in torch's product; of messages it is
    shared with the zero that nodes start from."""
    chain = torch.stack([torch.arange(5), torch.arange(1, 6)])
    matrix = torch.sparse_coo_tensor(chain.flip(0), torch.ones(5), (6, 6)).to_sparse_csr()
    x, found = torch.zeros(6, F), []
    with opened(name) as route, route.on():
        for on in (gnnaccel.disabled(), contextlib.nullcontext()):
            rows = x.clone().requires_grad_()
            with on:
                out = nn.SimpleConv(aggr=aggr)(rows, matrix)
            found.append(torch.autograd.grad(out.sum(), rows)[0])
    assert torch.equal(*found)


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
