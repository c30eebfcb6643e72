"""EGATConv: every constructor and call option against DGL's own layer, the features of edges that
it returns included."""
from __future__ import annotations

import dgl
import pytest
import torch
from dgl.nn import EGATConv

import gnnaccel
from tests.dgl import graphs
from tests.dgl.graphs import F, M, N
from tests.dgl.judge import close, compare, on_routes, took
from tests.dgl.layers import EDGE, edge_features

SHAPES = [(8, 5, 2), (1, 1, 1), (5, 8, 3)]
MORE_SHAPES = [(16, 4, 4), (7, 1, 1), (128, 3, 1), (20, 12, 12), (2, 2, 40), (512, 3, 2)]


@on_routes("shape", SHAPES, MORE_SHAPES)
def test_shapes(route, shape):
    width, edge_width, heads = shape
    g = graphs.square()
    compare(route, EGATConv(F, EDGE, width, edge_width, heads), g, graphs.features(),
            edge_features(g), floor=1e-6)


def test_in_eval_mode_without_gradients(route):
    g, layer = graphs.square(), EGATConv(F, EDGE, 8, 5, 2).requires_grad_(False)
    compare(route, layer, g, graphs.features(), edge_features(g), train=False, require=False)


@pytest.mark.parametrize("features", [(F, 7), (F, F), F], ids=str)
def test_pairs(route, features):
    g, width = graphs.bipartite(), 7 if features == (F, 7) else F
    x = (graphs.features(), graphs.features(M, width))
    compare(route, EGATConv(features, EDGE, 8, 5, 2), g, x, edge_features(g), floor=1e-6)


def test_blocks(route):
    block = graphs.block()
    x = graphs.features(block.num_src_nodes())
    compare(route, EGATConv(F, EDGE, 8, 5, 2), block, (x, x[:block.num_dst_nodes()].clone()),
            edge_features(block), floor=1e-6)


def placed(route):
    """A layer and its arguments."""
    g = graphs.square().to(route.device)
    return EGATConv(F, EDGE, 8, 5,
                    2).to(route.device), g, graphs.features().to(route.device), edge_features(g).to(
                        route.device)


@pytest.mark.parametrize("kwargs",
                         [dict(get_attention=True), dict(edge_weight=torch.rand(graphs.E))],
                         ids=["get_attention", "edge_weight"])
def test_what_is_left_to_dgl(route, kwargs):
    layer, g, x, e = placed(route)
    kwargs = {k: v.to(route.device) if isinstance(v, torch.Tensor) else v
              for k, v in kwargs.items()}
    expected = layer(g, x, e, **kwargs)
    with route.on(on_fallback="native"):
        torch.testing.assert_close(layer(g, x, e, **kwargs), expected, rtol=0, atol=0)
    assert gnnaccel.stats()["EGATConv"]["reasons"] == {"GA208": 1}


def test_arguments_by_name(route):
    layer, g, x, e = placed(route)
    expected = layer(g, x, e)
    with route.on():
        for got in (layer(graph=g, nfeats=x, efeats=e, get_attention=False), layer(g, x, e, None)):
            assert close(got[0], expected[0]) and close(got[1], expected[1])
    took(route, 2)


def test_a_loss_of_one_of_the_results_alone(route):
    layer, g, x, e = placed(route)
    for i in (0, 1):
        expected = torch.autograd.grad(layer(g, x, e)[i].square().sum(), list(layer.parameters()),
                                       allow_unused=True)
        with route.on():
            got = torch.autograd.grad(layer(g, x, e)[i].square().sum(), list(layer.parameters()),
                                      allow_unused=True)
        for a, b in zip(got, expected):
            assert (a is None) == (b is None) and (a is None or close(a, b, 1e-4))


def test_one_tensor_for_a_block(route):
    """The host raises its own error."""
    block = graphs.block().to(route.device)
    layer, x, e = placed(route)[0], graphs.features(block.num_src_nodes()).to(
        route.device), edge_features(block).to(route.device)
    with route.on(on_fallback="native"), pytest.raises(dgl.DGLError):
        layer(block, x, e)
    assert gnnaccel.stats()["EGATConv"]["reasons"] == {"GA206": 1}


def test_nodes_without_edges(route):
    """The host raises its own error."""
    g = dgl.graph((torch.arange(N - 1), torch.arange(N - 1)), num_nodes=N).to(route.device)
    layer, _, x, _ = placed(route)
    with route.on(on_fallback="native"), pytest.raises(dgl.DGLError, match="0-in-degree"):
        layer(g, x, edge_features(g).to(route.device))
    assert gnnaccel.stats()["EGATConv"]["reasons"] == {"GA204": 1}
