"""SAGEConv: every constructor and call option against DGL's own layer."""
from __future__ import annotations

import pytest
import torch
from dgl.nn import SAGEConv

import gnnaccel
from tests.dgl import graphs
from tests.dgl.graphs import E, F, M, N
from tests.dgl.judge import close, compare, on_routes
from tests.dgl.test_options_graphconv import bare

KINDS = ["mean", "gcn", "pool"]


@on_routes("kind,out", [(kind, out) for kind in KINDS for out in (5, 16)],
           [(kind, out) for kind in KINDS for out in (1, 12, 130)])
def test_aggregators(route, kind, out):
    compare(route, SAGEConv(F, out, kind), graphs.square(), graphs.features())


@on_routes("kind", KINDS)
def test_weights_of_edges(route, kind):
    for out, shape in ((5, (E,)), (16, (E, 1))):
        compare(route, SAGEConv(F, out, kind), graphs.square(), graphs.features(),
                torch.randn(shape))


@on_routes("kind", KINDS)
def test_layer_options(route, kind):
    compare(route, SAGEConv(F, 7, kind, bias=False, activation=torch.relu), graphs.square(),
            graphs.features())
    compare(route, SAGEConv(F, 7, kind, norm=torch.nn.LayerNorm(7)), graphs.square(),
            graphs.features())


@on_routes("kind", KINDS)
def test_blocks(route, kind):
    for out in (5, 16):
        block = graphs.block()
        compare(route, SAGEConv(F, out, kind), block, graphs.features(block.num_src_nodes()))


@on_routes("kind", KINDS)
def test_pairs(route, kind):
    sizes = F if kind == "gcn" else (F, 9)
    for out in (5, 16):
        x = graphs.features(), graphs.features(M, F if kind == "gcn" else 9)
        compare(route, SAGEConv(sizes, out, kind), graphs.bipartite(), x)


@on_routes("kind", KINDS)
def test_nodes_without_edges(route, kind):
    compare(route, SAGEConv(F, 5, kind), bare(), graphs.features())


@on_routes("kind", KINDS)
def test_dropout_is_drawn_as_the_host_draws_it(route, kind):
    layer = SAGEConv(F, 5, kind, feat_drop=0.5).to(route.device)
    for g, x in ((graphs.square(), graphs.features()),
                 (graphs.bipartite(), (graphs.features(), graphs.features(M)))):
        g = g.to(route.device)
        x = tuple(t.to(route.device) for t in x) if isinstance(x, tuple) else x.to(route.device)
        torch.manual_seed(3)
        expected = layer(g, x)
        torch.manual_seed(3)
        with route.on():
            assert close(layer(g, x), expected)


def test_hooks_of_its_maps_are_called(route):
    layer, seen = SAGEConv(F, 5, "mean").to(route.device), []
    layer.fc_neigh.register_forward_hook(lambda *_: seen.append("neigh"))
    layer.fc_self.register_forward_hook(lambda *_: seen.append("self"))
    with route.on():
        layer(graphs.square().to(route.device), graphs.features().to(route.device))
    assert sorted(seen) == ["neigh", "self"]


def test_lstm_is_left_to_dgl():
    layer, g, x = SAGEConv(F, 5, "lstm"), graphs.square(), graphs.features()
    expected = layer(g, x)
    with gnnaccel.enabled(when="supported"):
        assert torch.equal(layer(g, x), expected)
    assert gnnaccel.stats()["SAGEConv"]["reasons"] == {"GA208": 1}


@pytest.mark.parametrize("widths", [(F, F), (F, 9)])
def test_pairs_that_gcn_does_not_take(route, widths):
    """For one set of nodes the host's frame holds one "h"; other widths are its error."""
    layer = SAGEConv(F, 16, "gcn").to(route.device)
    g = graphs.square().to(route.device)
    x = tuple(torch.randn(N, w, device=route.device) for w in widths)
    try:
        expected = layer(g, x)
    except Exception as error:  # whatever the host says
        expected = error
    gnnaccel.reset_stats()
    with route.on(on_fallback="native"):
        if isinstance(expected, Exception):
            with pytest.raises(type(expected)):
                layer(g, x)
        else:
            assert close(layer(g, x), expected)
    assert gnnaccel.stats()["SAGEConv"]["reasons"] == {"GA206": 1}
