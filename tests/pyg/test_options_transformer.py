"""TransformerConv: every constructor and call option against the host's own layer."""
from __future__ import annotations

import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.nn import TransformerConv

import gnnaccel
from tests.pyg import graphs
from tests.pyg.graphs import EDGE, F, M, N
from tests.pyg.judge import close, compare, native_again, on_routes, spread

# one head of at least half as many channels as x has is a case of its own
SHAPES = [(8, 2), (1, 1), (5, 3), (8, 1), (16, 1)]
MORE_SHAPES = [(16, 4), (7, 1), (64, 1), (128, 1), (20, 12), (2, 40), (511, 1), (512, 2)]
LAYER = [{}, dict(concat=False), dict(beta=True), dict(bias=False), dict(root_weight=False),
         dict(concat=False, beta=True), dict(root_weight=False, bias=False),
         dict(concat=False, root_weight=False), dict(root_weight=False, beta=True)]


@on_routes("shape", SHAPES, MORE_SHAPES)
def test_shapes(route, shape):
    width, heads = shape
    compare(route, TransformerConv(F, width, heads), graphs.features(), graphs.square())


@pytest.mark.parametrize("heads", [1, 2])
@on_routes("options", LAYER)
def test_layer_options(route, options, heads):
    got = compare(route, TransformerConv(F, 8, heads, **options), graphs.features(),
                  graphs.square())
    assert ("lin_key.bias" in got) == options.get("bias", True)


@pytest.mark.parametrize("heads", [1, 2])
@on_routes("options", LAYER[:5])
def test_in_eval_mode_without_gradients(route, options, heads):
    compare(route, TransformerConv(F, 8, heads, dropout=0.5, **options).requires_grad_(False),
            graphs.features(), graphs.square(), train=False, require=False)


@pytest.mark.parametrize("heads", [1, 2])
@on_routes("options", LAYER)
def test_edge_features(route, options, heads):
    compare(route, TransformerConv(F, 8, heads, edge_dim=EDGE, **options), graphs.features(),
            graphs.square(), edge_attr=graphs.edge_features())


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("channels", [F, (F, 7)], ids=str)
def test_bipartite(route, channels, heads):
    x = (graphs.features(), graphs.features(M, channels[1] if isinstance(channels, tuple) else F))
    compare(route, TransformerConv(channels, 8, heads, beta=True), x, graphs.bipartite())


def test_bipartite_with_edge_features(route):
    x = (graphs.features(M), graphs.features(N, 7))
    compare(route, TransformerConv((F, 7), 8, 2, edge_dim=EDGE), x, graphs.bipartite(M, N),
            graphs.edge_features())


@pytest.mark.parametrize("order", [None, "col"])
def test_edge_index_class(route, order):
    index = EdgeIndex(graphs.square(), sparse_size=(N, N))
    index = index.sort_by(order).values if order else index
    compare(route, TransformerConv(F, 8, 2), graphs.features(), index)


def test_int32_edges_give_what_int64_edges_do(route):
    """The host's own layer refuses int32 on the CPU."""
    layer, x, ei = TransformerConv(F, 8,
                                   2).to(route.device), graphs.features().to(
                                       route.device), graphs.square()
    with route.on():
        # two structures: a GPU may have built them with their rows in another order
        assert close(layer(x, ei.to(route.device)), layer(x, ei.int().to(route.device)), 1e-6)


@pytest.mark.parametrize("weights", [True, False])
def test_attention_weights(route, weights):
    layer, x, ei = route.put(TransformerConv(F, 8, 2), graphs.features(), graphs.square())
    native = layer(x, ei, return_attention_weights=weights)
    with route.on(on_fallback="native"):
        got = layer(x, ei, return_attention_weights=weights)
    assert gnnaccel.stats()["TransformerConv"]["reasons"] == {"GA208": 1}
    assert native_again(got[0], native[0]) and native_again(got[1][1], native[1][1])


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("scale,floor", [(10.0, 4e-5), (1e-3, 2e-7)])
def test_large_and_small_scores(route, scale, floor, heads):
    """Scores of some hundreds: the rounding of a score is then a relative error of its weight."""
    compare(route, TransformerConv(F, 8, heads), graphs.features() * scale, graphs.square(),
            floor=floor)


@pytest.mark.parametrize("heads", [1, 2])
def test_gradients_can_be_changed_in_place(route, heads):
    """As in a step that a user takes with what torch.autograd.grad gave."""
    layer = spread(TransformerConv(F, 8, heads)).to(route.device)
    x = graphs.features().to(route.device).requires_grad_()
    with route.on():
        out = layer(x, graphs.square().to(route.device))
    gradients = torch.autograd.grad(out.pow(2).sum(), [x, *layer.parameters()])
    before = [gradient.clone() for gradient in gradients]
    for gradient in gradients:
        gradient.mul_(2)
    assert all(map(torch.equal, gradients, [2 * gradient for gradient in before]))
