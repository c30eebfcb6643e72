"""EdgeGATConv: every constructor and call option against DGL's own layer."""
from __future__ import annotations

import pytest
import torch
from dgl.nn import EdgeGATConv

import gnnaccel
from tests.dgl import graphs
from tests.dgl.graphs import F, M
from tests.dgl.judge import close, compare, on_routes, took
from tests.dgl.layers import EDGE, edge_features

SHAPES = [(8, 2), (1, 1), (5, 3)]
MORE_SHAPES = [(16, 4), (7, 1), (64, 1), (128, 1), (20, 12), (2, 40)]
LAYER = [{}, dict(residual=False), dict(bias=False), dict(residual=False, bias=False),
         dict(negative_slope=0.0), dict(negative_slope=1.5), dict(activation=torch.tanh),
         dict(activation=torch.nn.ReLU(inplace=True), residual=False, bias=False)]


@on_routes("shape", SHAPES, MORE_SHAPES)
def test_shapes(route, shape):
    width, heads = shape
    g = graphs.square()
    compare(route, EdgeGATConv(F, EDGE, width, heads), g, graphs.features(), edge_features(g),
            floor=1e-6)


@on_routes("features", [1, 3, 40])
def test_more_and_fewer_features_of_edges_than_channels(route, features):
    g = graphs.square()
    compare(route, EdgeGATConv(F, features, 5, 2), g, graphs.features(), edge_features(g, features),
            floor=1e-6)


@on_routes("options", LAYER)
def test_layer_options(route, options):
    g = graphs.square()
    compare(route, EdgeGATConv(F, EDGE, 8, 2, **options), g, graphs.features(), edge_features(g),
            floor=1e-6)


@on_routes("options", LAYER[:4])
def test_in_eval_mode_without_gradients(route, options):
    g, layer = graphs.square(), EdgeGATConv(F, EDGE, 8, 2, feat_drop=0.5, attn_drop=0.5,
                                            **options).requires_grad_(False)
    compare(route, layer, g, graphs.features(), edge_features(g), train=False, require=False)


@on_routes("options", LAYER[:4])
def test_pairs(route, options):
    for features, width in ((F, F), ((F, 7), 7)):
        g = graphs.bipartite()
        compare(route, EdgeGATConv(features, EDGE, 8, 2, **options), g,
                (graphs.features(), graphs.features(M, width)), edge_features(g), floor=1e-6)


@on_routes("options", LAYER[:4])
def test_blocks(route, options):
    block = graphs.block()
    compare(route, EdgeGATConv(F, EDGE, 8, 2, **options), block,
            graphs.features(block.num_src_nodes()), edge_features(block), floor=1e-6)


def test_features_of_the_edges_alone_want_gradients(route):
    g, layer = graphs.square(), EdgeGATConv(F, EDGE, 8, 2).requires_grad_(False)
    compare(route, layer, g, graphs.features(), edge_features(g).requires_grad_(), require=False,
            floor=1e-6)


def test_feature_dropout_draws_what_dgl_draws(route):
    g = graphs.square().to(route.device)
    x, e = graphs.features().to(route.device), edge_features(g).to(route.device)
    for features, feat in ((F, x), ((F, F), (x, x))):
        layer = EdgeGATConv(features, EDGE, 8, 2, feat_drop=0.5).to(route.device)
        torch.manual_seed(1)
        expected = layer(g, feat, e)
        torch.manual_seed(1)
        with route.on():
            assert close(layer(g, feat, e), expected)


def unusual(name: str):
    """(layer, keyword arguments, the reason's code)."""
    layer = EdgeGATConv(F, EDGE, 8, 2)
    if name == "get_attention":
        return layer, dict(get_attention=True), "GA208"
    if name == "hook":
        layer.fc_edge.register_forward_hook(lambda *args: None)
        return layer, {}, "GA501"
    layer.fc_edge = (torch.nn.Sequential(layer.fc_edge)
                     if name == "wrapped" else torch.nn.Linear(EDGE, 16))
    return layer, {}, "GA205"


@pytest.mark.parametrize("name", ["get_attention", "hook", "wrapped", "bias"])
def test_what_is_left_to_dgl(route, name):
    layer, kwargs, code = unusual(name)
    g, layer = graphs.square().to(route.device), layer.to(route.device)
    x, e = graphs.features().to(route.device), edge_features(g).to(route.device)
    expected = layer(g, x, e, **kwargs)
    with route.on(on_fallback="native"):
        torch.testing.assert_close(layer(g, x, e, **kwargs), expected, rtol=0, atol=0)
    assert gnnaccel.stats()["EdgeGATConv"]["reasons"] == {code: 1}


def test_arguments_by_name(route):
    g, layer = graphs.square().to(route.device), EdgeGATConv(F, EDGE, 8, 2).to(route.device)
    x, e = graphs.features().to(route.device), edge_features(g).to(route.device)
    expected = layer(g, x, e)
    with route.on():
        assert close(layer(edge_feat=e, feat=x, graph=g),
                     expected) and close(layer(g, x, e, False), expected)
    took(route, 2)


@pytest.mark.parametrize("scale", [10.0, 1e-3])
def test_large_and_small_scores(route, scale):
    g = graphs.square()
    compare(route, EdgeGATConv(F, EDGE, 8, 2), g, graphs.features() * scale,
            edge_features(g) * scale, floor=1e-6)
