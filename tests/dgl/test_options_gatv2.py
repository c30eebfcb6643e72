"""GATv2Conv: every constructor and call option against DGL's own layer."""
from __future__ import annotations

import pytest
import torch
from dgl.nn import GATv2Conv

import gnnaccel
from tests.dgl import graphs
from tests.dgl.graphs import F, M
from tests.dgl.judge import close, compare, on_routes, took
from tests.helpers import FLOOR

SHAPES = [(8, 2), (1, 1), (5, 3)]
MORE_SHAPES = [(16, 4), (7, 1), (64, 1), (128, 1), (20, 12), (2, 40), (511, 1), (512, 2)]
LAYER = [{}, dict(residual=True), dict(bias=False), dict(share_weights=True),
         dict(residual=True, bias=False), dict(share_weights=True, bias=False, residual=True),
         dict(negative_slope=0.0), dict(negative_slope=1.5), dict(activation=torch.tanh),
         dict(activation=torch.nn.ReLU(inplace=True)), dict(activation=torch.nn.Sequential()),
         dict(activation=torch.nn.ELU(), residual=True)]


@on_routes("shape", SHAPES, MORE_SHAPES)
def test_shapes(route, shape):
    width, heads = shape
    # the gradient of attn is then one number, left over from a sum that cancels
    floor = 3e-6 if shape == (1, 1) else FLOOR
    compare(route, GATv2Conv(F, width, heads), graphs.square(), graphs.features(), floor=floor)


@on_routes("options", LAYER)
def test_layer_options(route, options):
    compare(route, GATv2Conv(F, 8, 2, **options), graphs.square(), graphs.features())


@on_routes("options", LAYER[:4])
def test_residual_without_a_map(route, options):
    layer = GATv2Conv(F, F // 2, 2, **{**options, "residual": True})
    assert not list(layer.res_fc.parameters())
    compare(route, layer, graphs.square(), graphs.features())


@on_routes("options", LAYER[:6])
def test_in_eval_mode_without_gradients(route, options):
    layer = GATv2Conv(F, 8, 2, feat_drop=0.5, attn_drop=0.5, **options).requires_grad_(False)
    compare(route, layer, graphs.square(), graphs.features(), train=False, require=False)


@on_routes("options", LAYER[:6])
def test_pairs(route, options):
    compare(route, GATv2Conv(F, 8, 2, **options), graphs.bipartite(),
            (graphs.features(), graphs.features(M)))
    if not options.get("share_weights"):
        compare(route, GATv2Conv((F, 7), 8, 2, **options), graphs.bipartite(),
                (graphs.features(), graphs.features(M, 7)))


@on_routes("options", LAYER[:6])
def test_blocks(route, options):
    block = graphs.block()
    compare(route, GATv2Conv(F, 8, 2, **options), block, graphs.features(block.num_src_nodes()))


@pytest.mark.parametrize("share", [False, True])
def test_a_layer_for_pairs_given_one_tensor(route, share):
    block, square = graphs.block(), graphs.square()
    for g in (block, square):
        compare(route, GATv2Conv((F, F), 8, 2, share_weights=share, residual=True), g,
                graphs.features(g.num_src_nodes()), require=False)


def test_hooks_on_the_maps_see_what_the_host_gives_them(route):
    block = graphs.block().to(route.device)
    x, layer = route.put(graphs.features(block.num_src_nodes()), GATv2Conv(F, 8, 2))
    seen = []
    layer.fc_dst.register_forward_hook(lambda module, args, out: seen.append(args[0].shape))
    expected = layer(block, x)
    with route.on():
        assert close(layer(block, x), expected)
    assert seen[0] == seen[1] == x.shape


def test_feature_dropout_draws_what_dgl_draws(route):
    g, x = graphs.square().to(route.device), graphs.features().to(route.device)
    for layer, feat in ((GATv2Conv(F, 8, 2, feat_drop=0.5, residual=True), x),
                        (GATv2Conv((F, F), 8, 2, feat_drop=0.5, residual=True), (x, x))):
        layer.to(route.device)
        torch.manual_seed(1)
        expected = layer(g, feat)
        torch.manual_seed(1)
        with route.on():
            assert close(layer(g, feat), expected)


def test_attention_weights(route):
    layer, g, x = route.put(GATv2Conv(F, 8, 2), graphs.square(), graphs.features())
    native = layer(g, x, get_attention=True)
    with route.on(on_fallback="native"):
        got = layer(g, x, get_attention=True)
    assert gnnaccel.stats()["GATv2Conv"]["reasons"] == {"GA208": 1}
    assert torch.equal(got[0], native[0]) and torch.equal(got[1], native[1])
    gnnaccel.reset_stats()
    with route.on():
        assert close(layer(g, x, False),
                     native[0]) and close(layer(graph=g, feat=x, get_attention=False), native[0])
    took(route, 2)


@pytest.mark.parametrize("scale", [30.0, 1e-3])
def test_large_and_small_scores(route, scale):
    compare(route, GATv2Conv(F, 8, 2), graphs.square(), graphs.features() * scale)
