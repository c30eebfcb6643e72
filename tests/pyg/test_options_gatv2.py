"""GATv2Conv: every constructor and call option against the host's own layer."""
from __future__ import annotations

import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.nn import GATv2Conv

import gnnaccel
from tests.pyg import graphs
from tests.pyg.graphs import EDGE, F, M, N
from tests.pyg.judge import compare, native_again, on_routes

SHAPES = [(8, 2), (1, 1), (5, 3)]
MORE_SHAPES = [(16, 4), (7, 1), (64, 1), (128, 1), (20, 12), (2, 40), (511, 1), (512, 2)]
LAYER = [{}, dict(concat=False), dict(residual=True), dict(bias=False), dict(share_weights=True),
         dict(add_self_loops=False), dict(concat=False, residual=True, bias=False),
         dict(share_weights=True, bias=False, concat=False), dict(add_self_loops=False, bias=False),
         dict(negative_slope=0.0), dict(negative_slope=1.5)]
FILLS = [1.5, "mean", "add", "max", "min", "mul", torch.tensor([0.5, -1.0, 2.0, 0.0])]


@on_routes("shape", SHAPES, MORE_SHAPES)
def test_shapes(route, shape):
    width, heads = shape
    compare(route, GATv2Conv(F, width, heads), graphs.features(), graphs.square())


@on_routes("options", LAYER)
def test_layer_options(route, options):
    compare(route, GATv2Conv(F, 8, 2, **options), graphs.features(), graphs.square())


@on_routes("options", LAYER[:5])
def test_in_eval_mode_without_gradients(route, options):
    compare(route, GATv2Conv(F, 8, 2, dropout=0.5, **options).requires_grad_(False),
            graphs.features(), graphs.square(), train=False, require=False)


@on_routes("options", LAYER)
def test_edge_features(route, options):
    compare(route, GATv2Conv(F, 8, 2, edge_dim=EDGE, **options), graphs.features(), graphs.square(),
            edge_attr=graphs.edge_features())


@on_routes("fill", FILLS)
def test_fill_values(route, fill):
    compare(route, GATv2Conv(F, 8, 2, edge_dim=EDGE, fill_value=fill), graphs.features(),
            graphs.square(), graphs.edge_features())


@pytest.mark.parametrize("loops", [True, False])
def test_one_feature_per_edge(route, loops):
    compare(route, GATv2Conv(F, 8, 2, edge_dim=1, add_self_loops=loops), graphs.features(),
            graphs.square(), graphs.edge_features(width=None))


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("options",
                         [dict(in_channels=F), dict(in_channels=(F, 7)),
                          dict(in_channels=F, share_weights=True),
                          dict(in_channels=(F, F), share_weights=True)], ids=str)
def test_bipartite(route, options, loops):
    width = 7 if options["in_channels"] == (F, 7) else F
    x = (graphs.features(), graphs.features(M, width))
    compare(route, GATv2Conv(out_channels=8, heads=2, add_self_loops=loops, **options), x,
            graphs.bipartite())


def test_bipartite_with_residual_and_edge_features(route):
    x = (graphs.features(), graphs.features(M, 7))
    layer = GATv2Conv((F, 7), 8, 2, residual=True, concat=False, edge_dim=EDGE,
                      add_self_loops=False)
    compare(route, layer, x, graphs.bipartite(), graphs.edge_features())


def test_one_tensor_as_both_ends(route):
    x = graphs.features()
    compare(route, GATv2Conv(F, 8, 2), (x, x), graphs.square())


@pytest.mark.parametrize("order", [None, "col"])
def test_edge_index_class(route, order):
    index = EdgeIndex(graphs.square(), sparse_size=(N, N))
    index = index.sort_by(order).values if order else index
    compare(route, GATv2Conv(F, 8, 2), graphs.features(), index)


def test_int32_edges(route):
    compare(route, GATv2Conv(F, 8, 2), graphs.features(), graphs.square().int())


def test_attention_weights(route):
    layer, x, ei = route.put(GATv2Conv(F, 8, 2), graphs.features(), graphs.square())
    native = layer(x, ei, return_attention_weights=True)
    with route.on(on_fallback="native"):
        got = layer(x, ei, return_attention_weights=True)
    assert gnnaccel.stats()["GATv2Conv"]["reasons"] == {"GA208": 1}
    assert native_again(got[0], native[0]) and native_again(got[1][1], native[1][1])


@pytest.mark.parametrize("scale", [30.0, 1e-3])
def test_large_and_small_scores(route, scale):
    compare(route, GATv2Conv(F, 8, 2), graphs.features() * scale, graphs.square())
