"""AGNNConv: every constructor and call option against the host's own layer."""
from __future__ import annotations

import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.nn import AGNNConv

import gnnaccel
from tests.pyg import graphs
from tests.pyg.graphs import N
from tests.pyg.judge import compare, on_routes

LAYER = [{}, dict(requires_grad=False), dict(add_self_loops=False),
         dict(requires_grad=False, add_self_loops=False)]


@pytest.mark.long
@on_routes("width", [1, 7, 12, 16], [2, 33, 64, 100, 128, 511, 512])
def test_widths(route, width):
    compare(route, AGNNConv(), graphs.features(width=width), graphs.square())


@on_routes("options", LAYER)
def test_layer_options(route, options):
    compare(route, AGNNConv(**options), graphs.features(), graphs.square())


@on_routes("options", LAYER)
def test_in_eval_mode_without_gradients(route, options):
    compare(route, AGNNConv(**options).requires_grad_(False), graphs.features(), graphs.square(),
            train=False, require=False)


def test_a_gradient_for_beta_alone(route):
    got = compare(route, AGNNConv(), graphs.features(), graphs.square(), require=False)
    assert set(got) == {"out", "beta"}


def test_rows_of_zeros_and_of_tiny_and_huge_numbers(route):
    x = graphs.features()
    x[3], x[5], x[7], x[9] = 0.0, x[5] * 1e-9, x[7] * 1e6, x[9] * 1e-14
    compare(route, AGNNConv(requires_grad=False), x, graphs.square(), floor=2e-6, require=False)


@pytest.mark.parametrize("order", [None, "col"])
def test_edge_index_class(route, order):
    index = EdgeIndex(graphs.square(), sparse_size=(N, N))
    index = index.sort_by(order).values if order else index
    compare(route, AGNNConv(), graphs.features(), index)


def test_int32_edges(route):
    compare(route, AGNNConv(), graphs.features(), graphs.square().int())


def test_keywords(route):
    compare(route, AGNNConv(), edge_index=graphs.square(), x=graphs.features())


@pytest.mark.parametrize("beta", [0.0, -2.0, 50.0])
def test_given_beta(route, beta):
    layer = AGNNConv()
    torch.nn.init.constant_(layer.beta, beta)
    compare(route, layer, graphs.features(), graphs.square())


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (12,)], ids=str)
def test_a_beta_that_is_more_than_a_number(route, shape, called):
    """PyG multiplies the scores [E] with it."""
    x, edges = graphs.features(width=12).to(route.device), graphs.square().to(route.device)
    layer = AGNNConv().to(route.device)
    with route.on():
        for _ in range(3 * called):
            layer(x, edges)
    layer.beta.data = torch.ones(shape, device=route.device)
    with pytest.raises(Exception) as native:
        layer(x, edges)
    gnnaccel.reset_stats()
    with route.on(on_fallback="native"), pytest.raises(native.type):
        layer(x, edges)
    assert gnnaccel.stats()["AGNNConv"]["reasons"] == {"GA206": 1}
