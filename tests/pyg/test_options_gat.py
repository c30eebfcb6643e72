"""GATConv: every constructor and call option against the host's own layer."""
from __future__ import annotations

import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.nn import GATConv

import gnnaccel
from gnnaccel.adapters.pyg.layers import gat
from tests.helpers import relative
from tests.pyg import graphs
from tests.pyg.graphs import EDGE, F, M, N
from tests.pyg.judge import compare, native_again, on_routes

SHAPES = [(8, 2), (1, 1), (5, 3)]
MORE_SHAPES = [(8, 8), (7, 1), (64, 1), (128, 1), (20, 12), (2, 40), (511, 1), (512, 2)]
LAYER = [{}, dict(concat=False), dict(residual=True), dict(bias=False),
         dict(concat=False, residual=True, bias=False), dict(add_self_loops=False),
         dict(negative_slope=0.0), dict(negative_slope=1.5), dict(add_self_loops=False, bias=False)]
FILLS = [1.5, 2, "mean", "add", "sum", "max", "min", "mul", torch.tensor([0.5, -1.0, 2.0, 0.0]),
         torch.randn(1, EDGE)]


@on_routes("shape", SHAPES, MORE_SHAPES)
def test_shapes(route, shape):
    width, heads = shape
    compare(route, GATConv(F, width, heads), graphs.features(), graphs.square())


@on_routes("options", LAYER)
def test_layer_options(route, options):
    compare(route, GATConv(F, 8, 2, **options), graphs.features(), graphs.square())


@on_routes("options", LAYER[:5])
def test_in_eval_mode_without_gradients(route, options):
    compare(route, GATConv(F, 8, 2, dropout=0.5, **options).requires_grad_(False),
            graphs.features(), graphs.square(), train=False, require=False)


@on_routes("fill", FILLS)
def test_fill_values(route, fill):
    compare(route, GATConv(F, 8, 2, edge_dim=EDGE, fill_value=fill), graphs.features(),
            graphs.square(), graphs.edge_features())


@on_routes("fill", [0.5, "mean", "mul", torch.tensor(3.0)])
def test_fill_values_of_one_feature_per_edge(route, fill):
    compare(route, GATConv(F, 8, 2, edge_dim=1, fill_value=fill), graphs.features(),
            graphs.square(), graphs.edge_features(width=None))


@on_routes("options", LAYER)
@pytest.mark.parametrize("folded", [False, True])
def test_edge_features(route, options, folded, monkeypatch):
    """``folded``: as over many edges, whose rows of all heads are never made."""
    if folded:
        monkeypatch.setattr(gat, "_FOLDED_FROM", 0)
    compare(route, GATConv(F, 5, 3, edge_dim=EDGE, **options), graphs.features(), graphs.square(),
            edge_attr=graphs.edge_features())


def test_edge_features_that_the_layer_ignores(route):
    compare(route, GATConv(F, 8, 2), graphs.features(), graphs.square(),
            graphs.edge_features().requires_grad_(False), require=False)


def test_edge_dim_without_edge_features(route):
    got = compare(route, GATConv(F, 8, 2, edge_dim=EDGE), graphs.features(), graphs.square())
    assert got["lin_edge.weight"] is None and got["att_edge"] is None


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("channels", [F, (F, F), (F, 7)], ids=str)
def test_bipartite(route, channels, loops):
    width = channels[1] if isinstance(channels, tuple) else F
    x = (graphs.features(), graphs.features(M, width))
    compare(route, GATConv(channels, 8, 2, add_self_loops=loops), x, graphs.bipartite())


def test_bipartite_with_residual_and_edge_features(route):
    x = (graphs.features(), graphs.features(M, 7))
    layer = GATConv((F, 7), 8, 2, residual=True, concat=False, edge_dim=EDGE, add_self_loops=False)
    compare(route, layer, x, graphs.bipartite(), graphs.edge_features())


def test_fewer_sources_than_destinations(route):
    x = (graphs.features(M), graphs.features(N))
    compare(route, GATConv((F, F), 8, 2), x, graphs.bipartite(M, N))


def test_a_list_as_the_pair(route):
    compare(route, GATConv((F, 7), 8, 2), [graphs.features(), graphs.features(M, 7)],
            graphs.bipartite())


def test_two_maps_for_one_set_of_nodes(route):
    compare(route, GATConv((F, F), 8, 2), graphs.features(), graphs.square())


@pytest.mark.parametrize("channels", [F, (F, 7)], ids=str)
def test_sources_only(route, channels):
    got = compare(route, GATConv(channels, 8, 2, residual=True, add_self_loops=False),
                  (graphs.features(), None), graphs.bipartite(), size=(N, M))
    assert got["out"].shape[0] == M and got["att_dst"] is None


@pytest.mark.parametrize("size", [None, (N, N), (N, M)], ids=str)
def test_sources_only_with_self_loops(route, size):
    compare(route, GATConv(F, 8, 2), (graphs.features(), None), graphs.bipartite(), None, size)


@pytest.mark.parametrize("size", [(N, N), [N, N], torch.Size([N, N])],
                         ids=lambda s: type(s).__name__)
def test_size_that_says_nothing_new(route, size):
    compare(route, GATConv(F, 8, 2), graphs.features(), graphs.square(), size=size)


@pytest.mark.parametrize("sizes", [(N, N), (None, None), (N, None)], ids=str)
@pytest.mark.parametrize("order", [None, "row", "col"])
def test_edge_index_class(route, order, sizes):
    edges = graphs.square()
    edges[:, 0] = N - 1  # or sorting would make it a graph of fewer nodes
    index = EdgeIndex(edges, sparse_size=sizes)
    if order:
        index = index.sort_by(order).values
        index.validate()
    compare(route, GATConv(F, 8, 2, edge_dim=EDGE), graphs.features(), index,
            graphs.edge_features())


def test_edge_index_class_of_another_size(route):
    layer, x = route.put(GATConv(F, 8, 2, add_self_loops=False), graphs.features())
    index = EdgeIndex(graphs.square(N - 4), sparse_size=(N - 4, N - 4)).to(route.device)
    with pytest.raises(ValueError) as native:
        layer(x, index)
    with route.on(on_fallback="native"), pytest.raises(ValueError) as got:
        layer(x, index)
    assert str(got.value) == str(native.value) and gnnaccel.stats()["GATConv"]["reasons"] == {
        "GA204": 1}


# the host's 'mean' has wrong gradients
@pytest.mark.parametrize("fill", [1.5, torch.randn(EDGE)], ids=["number", "tensor"])
def test_int32_edges(route, fill):
    layer = GATConv(F, 8, 2, edge_dim=EDGE, fill_value=fill)
    compare(route, layer, graphs.features(), graphs.square().int(), graphs.edge_features())


@pytest.mark.parametrize("fill", ["mean", "max", "add"])
def test_int32_edges_give_what_int64_edges_do(route, fill):
    layer, x = route.put(GATConv(F, 8, 2, edge_dim=EDGE, fill_value=fill), graphs.features())
    ei, attr = graphs.square().to(route.device), graphs.edge_features().to(
        route.device).requires_grad_()
    with route.on():
        grads = [torch.autograd.grad(layer(x, edges, attr).pow(2).sum(), attr)[0]
                 for edges in (ei, ei.int())]
    assert relative(grads[0], grads[1]) < 1e-6


@pytest.mark.parametrize("form", ["transposed", "columns", "expanded"])
def test_edge_index_in_odd_strides(route, form):
    ei = graphs.square()
    view = {"transposed": ei.t().contiguous().t(), "columns": ei[:, ::2],
            "expanded": ei[:, :1].expand(2, 9)}[form]
    compare(route, GATConv(F, 8, 2), graphs.features(), view)


@pytest.mark.parametrize("weights", [True, False, None])
def test_attention_weights(route, weights):
    layer, x, ei = route.put(GATConv(F, 8, 2), graphs.features(), graphs.square())
    native = layer(x, ei, return_attention_weights=weights)
    with route.on(on_fallback="native"):
        got = layer(x, ei, return_attention_weights=weights)
    if weights is None:
        torch.testing.assert_close(got, native)
        assert gnnaccel.stats()["GATConv"]["routes"] == {route.backend: 1}
        return
    # also for False, which asks for weights in PyG before 2.8
    assert gnnaccel.stats()["GATConv"]["reasons"] == {"GA208": 1}
    assert native_again(got[0], native[0]) and torch.equal(got[1][0],
                                                           native[1][0]) and native_again(got[1][1],
                                                                                          native[1][
                                                                                              1])


@pytest.mark.parametrize("scale", [30.0, 1e-3])
def test_large_and_small_scores(route, scale):
    compare(route, GATConv(F, 8, 2), graphs.features() * scale, graphs.square())
