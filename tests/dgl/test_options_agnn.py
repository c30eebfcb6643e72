"""AGNNConv: every constructor and call option against DGL's own layer."""
from __future__ import annotations

import pytest
import torch
from dgl.nn import AGNNConv

import gnnaccel
from tests.dgl import graphs
from tests.dgl.graphs import M
from tests.dgl.judge import close, compare, on_routes

LAYER = [{}, dict(learn_beta=False), dict(init_beta=-2.0), dict(init_beta=0.0),
         dict(init_beta=20.0, learn_beta=False)]


@on_routes("width", [1, 7, 12, 16], [2, 33, 64, 100, 128, 511, 512])
def test_widths(route, width):
    # one number for beta, and for one channel cosines of 1 whose gradients vanish: what is left
    # over from sums that cancel
    compare(route, AGNNConv(), graphs.square(), graphs.features(width=width), floor=1e-6)


@on_routes("options", LAYER)
def test_layer_options(route, options):
    got = compare(route, AGNNConv(**options), graphs.square(), graphs.features())
    assert ("beta" in got) == options.get("learn_beta", True)


@on_routes("options", LAYER)
def test_in_eval_mode_without_gradients(route, options):
    compare(route, AGNNConv(**options).requires_grad_(False), graphs.square(), graphs.features(),
            train=False, require=False)


def test_a_gradient_for_beta_alone(route):
    assert set(compare(route, AGNNConv(), graphs.square(), graphs.features(),
                       require=False)) == {"out", "beta"}


@on_routes("options", LAYER[:3])
def test_pairs(route, options):
    compare(route, AGNNConv(**options), graphs.bipartite(), (graphs.features(), graphs.features(M)))


@on_routes("options", LAYER[:3])
def test_blocks(route, options):
    block = graphs.block()
    compare(route, AGNNConv(**options), block, graphs.features(block.num_src_nodes()))


def test_one_tensor_as_both_ends(route):
    layer, g, x = route.put(AGNNConv(), graphs.square(), graphs.features())
    expected = layer(g, (x, x))
    with route.on():
        assert close(layer(g, (x, x)), expected)


def test_a_pair_for_one_set_of_nodes_is_left_to_dgl(route):
    """The host's frame holds one "norm_h" then, that of the destinations."""
    layer, g = AGNNConv().to(route.device), graphs.square().to(route.device)
    x, y = graphs.features().to(route.device), graphs.features().to(route.device)
    expected = layer(g, (x, y))
    with route.on(on_fallback="native"):
        assert torch.equal(layer(g, (x, y)), expected)
    assert gnnaccel.stats()["AGNNConv"]["reasons"] == {"GA206": 1}


def test_rows_of_zeros_and_of_tiny_and_huge_numbers(route):
    x = graphs.features()
    x[3], x[5], x[7], x[9] = 0.0, x[5] * 1e-9, x[7] * 1e6, x[9] * 1e-14
    compare(route, AGNNConv(learn_beta=False), graphs.square(), x, floor=2e-6, require=False)


def test_zeros_at_either_end_of_a_pair(route):
    x, y = graphs.features(), graphs.features(M)
    x[5], y[3] = 0.0, 0.0
    compare(route, AGNNConv(), graphs.bipartite(), (x, y), require=False)


def test_ends_of_different_widths(route):
    """The host raises its own error."""
    x, layer = (graphs.features().to(route.device),
                graphs.features(M, 7).to(route.device)), AGNNConv().to(route.device)
    with route.on(on_fallback="native"), pytest.raises(Exception):  # noqa: B017  whatever DGL raises
        layer(graphs.bipartite().to(route.device), x)
    assert gnnaccel.stats()["AGNNConv"]["reasons"] == {"GA206": 1}


def test_features_of_more_dimensions_are_left_to_dgl(route):
    layer, g, x = route.put(AGNNConv(), graphs.square(), torch.randn(graphs.N, 3, 4))
    expected = layer(g, x)
    with route.on(on_fallback="native"):
        assert torch.equal(layer(g, x), expected)
    assert gnnaccel.stats()["AGNNConv"]["reasons"] == {"GA206": 1}


@pytest.mark.parametrize("called", [False, True])
def test_a_beta_for_each_of_several_heads(route, called):
    """DGL multiplies scores with it, so there are as many softmaxes."""
    g, x = graphs.square().to(route.device), graphs.features(width=5).to(route.device)
    layer = AGNNConv().to(route.device)
    with route.on():
        for _ in range(3 * called):
            layer(g, x)
    layer.beta.data = torch.linspace(0.0, 4.0, 5, device=route.device)
    expected = layer(g, x)
    gnnaccel.reset_stats()
    with route.on(on_fallback="native"):
        assert close(layer(g, x), expected)
    assert gnnaccel.stats()["AGNNConv"]["reasons"] == {"GA206": 1}
