"""SuperGATConv: every constructor and call option against the host's own layer, the self-supervised
loss included."""
from __future__ import annotations

import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.nn import SuperGATConv

from tests.pyg import graphs
from tests.pyg.graphs import F, N
from tests.pyg.judge import compare, on_routes

KINDS = ["MX", "SD"]
SHAPES = [(8, 2), (1, 1), (5, 3)]
MORE_SHAPES = [(8, 8), (7, 1), (64, 1), (128, 1), (20, 12), (2, 40), (511, 1), (512, 2)]
LAYER = [{}, dict(concat=False), dict(bias=False), dict(concat=False, bias=False),
         dict(add_self_loops=False), dict(negative_slope=0.0),
         dict(add_self_loops=False, bias=False)]


def attention_loss(layer):
    return layer.get_attention_loss()


@pytest.mark.parametrize("kind", KINDS)
@on_routes("shape", SHAPES, MORE_SHAPES)
def test_shapes(route, shape, kind):
    width, heads = shape
    compare(route, SuperGATConv(F, width, heads, attention_type=kind), graphs.features(),
            graphs.square(), train=False)


@pytest.mark.parametrize("kind", KINDS)
@on_routes("options", LAYER)
def test_layer_options(route, options, kind):
    compare(route, SuperGATConv(F, 8, 2, attention_type=kind, **options), graphs.features(),
            graphs.square(), loss=attention_loss)


@pytest.mark.parametrize("kind", KINDS)
def test_in_eval_mode_without_gradients(route, kind):
    layer = SuperGATConv(F, 8, 2, attention_type=kind, dropout=0.5).requires_grad_(False)
    compare(route, layer, graphs.features(), graphs.square(), train=False, require=False)
    assert layer.att_x is None


@pytest.mark.parametrize("options",
                         [dict(neg_sample_ratio=2.0), dict(edge_sample_ratio=0.4),
                          dict(is_undirected=True)], ids=str)
def test_sampling_options(route, options):
    layer = SuperGATConv(F, 8, 2, **options)
    compare(route, layer, graphs.features(), graphs.square(), loss=attention_loss)
    assert layer.att_x.shape[0] == layer.att_y.shape[0] > layer.att_y.sum() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_given_negative_edges(route, kind):
    negative = torch.randint(0, N, (2, 40))
    layer = SuperGATConv(F, 8, 2, attention_type=kind)
    compare(route, layer, graphs.features(), graphs.square(), neg_edge_index=negative,
            loss=attention_loss)
    assert int((layer.att_y == 0).sum()) == 40


def test_batch_for_negative_sampling(route):
    batch = (torch.arange(N) >= N // 2).long()
    half = graphs.square(N // 2, 60)
    ei = torch.cat([half, graphs.square(N // 2, 60) + N // 2], dim=1)
    compare(route, SuperGATConv(F, 8, 2), graphs.features(), ei, batch=batch, loss=attention_loss)


def test_the_attention_loss_in_eval_mode(route):
    layer = SuperGATConv(F, 8, 2).eval().to(route.device)
    with route.on():
        layer(graphs.features().to(route.device), graphs.square().to(route.device))
    assert layer.get_attention_loss().item() == 0


@pytest.mark.parametrize("order", [None, "col"])
def test_edge_index_class(route, order):
    index = EdgeIndex(graphs.square(), sparse_size=(N, N))
    index = index.sort_by(order).values if order else index
    compare(route, SuperGATConv(F, 8, 2), graphs.features(), index, train=False)


def test_int32_edges(route):
    compare(route, SuperGATConv(F, 8, 2), graphs.features(), graphs.square().int(), train=False)
