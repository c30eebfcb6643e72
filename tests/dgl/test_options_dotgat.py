"""DotGatConv: every constructor and call option against DGL's own layer."""
from __future__ import annotations

import pytest
import torch
from dgl.nn import DotGatConv

import gnnaccel
from tests.dgl import graphs
from tests.dgl.graphs import F, M
from tests.dgl.judge import compare, on_routes

SHAPES = [(8, 2), (1, 1), (5, 3)]
MORE_SHAPES = [(16, 4), (7, 1), (64, 1), (128, 1), (20, 12), (2, 40), (511, 1), (512, 2)]


@on_routes("shape", SHAPES, MORE_SHAPES)
def test_shapes(route, shape):
    width, heads = shape
    compare(route, DotGatConv(F, width, heads), graphs.square(), graphs.features())


def test_in_eval_mode_without_gradients(route):
    compare(route, DotGatConv(F, 8, 2).requires_grad_(False), graphs.square(), graphs.features(),
            train=False, require=False)


@pytest.mark.parametrize("features", [(F, 7), (F, F)], ids=str)
def test_pairs(route, features):
    compare(route, DotGatConv(features, 8, 2), graphs.bipartite(),
            (graphs.features(), graphs.features(M, features[1])))


def test_blocks(route):
    block = graphs.block()
    x = graphs.features(block.num_src_nodes())
    compare(route, DotGatConv(F, 8, 2), block, x)
    compare(route, DotGatConv((F, F), 8, 2), block, (x, x[:block.num_dst_nodes()].clone()))


@pytest.mark.parametrize("pair", [True, False])
def test_the_other_kind_of_features(route, pair):
    """The host raises its own error."""
    x = graphs.features().to(route.device)
    layer = DotGatConv((F, F) if not pair else F, 8, 2).to(route.device)
    with route.on(on_fallback="native"), pytest.raises(AttributeError, match="fc"):
        layer(graphs.square().to(route.device), (x, x) if pair else x)
    assert gnnaccel.stats()["DotGatConv"]["reasons"] == {"GA206": 1}


def test_a_pair_for_one_set_of_nodes_is_left_to_dgl(route):
    """The host's frame holds one "ft" then, that of the destinations."""
    layer, g = DotGatConv((F, F), 8, 2).to(route.device), graphs.square().to(route.device)
    x, y = graphs.features().to(route.device), graphs.features().to(route.device)
    expected = layer(g, (x, y))
    with route.on(on_fallback="native"):
        assert torch.equal(layer(g, (x, y)), expected)
    assert gnnaccel.stats()["DotGatConv"]["reasons"] == {"GA206": 1}


def test_attention_weights(route):
    layer, g, x = route.put(DotGatConv(F, 8, 2), graphs.square(), graphs.features())
    native = layer(g, x, get_attention=True)
    with route.on(on_fallback="native"):
        got = layer(g, x, get_attention=True)
    assert gnnaccel.stats()["DotGatConv"]["reasons"] == {"GA208": 1}
    assert torch.equal(got[0], native[0]) and torch.equal(got[1], native[1])


@pytest.mark.parametrize("scale,floor", [(5.0, 4e-6), (1e-3, 2e-7)])
def test_large_and_small_scores(route, scale, floor):
    """Scores of some dozens: the rounding of a score is then a relative error of its weight."""
    compare(route, DotGatConv(F, 8, 2), graphs.square(), graphs.features() * scale, floor=floor)
