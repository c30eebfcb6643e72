"""GATConv: every constructor and call option against DGL's own layer."""
from __future__ import annotations

import dgl
import pytest
import torch
from dgl.nn import GATConv

import gnnaccel
from tests.dgl import graphs
from tests.dgl.graphs import F, M, N
from tests.dgl.judge import close, compare, on_routes, took
from tests.helpers import FLOOR

SHAPES = [(8, 2), (1, 1), (5, 3)]
MORE_SHAPES = [(8, 8), (7, 1), (64, 1), (128, 1), (20, 12), (2, 40)]
LAYER = [{}, dict(residual=True), dict(bias=False), dict(residual=True, bias=False),
         dict(negative_slope=0.0), dict(negative_slope=1.5), dict(activation=torch.relu),
         dict(activation=torch.nn.ELU(), residual=True)]


@on_routes("shape", SHAPES, MORE_SHAPES)
def test_shapes(route, shape):
    width, heads = shape
    compare(route, GATConv(F, width, heads), graphs.square(), graphs.features())


@on_routes("options", LAYER)
def test_options(route, options):
    compare(route, GATConv(F, 5, 3, **options), graphs.square(), graphs.features())


@on_routes("options", LAYER[:4])
def test_residual_without_a_map(route, options):
    compare(route, GATConv(F, F // 2, 2, **options), graphs.square(), graphs.features())


@on_routes("options", LAYER[:4])
def test_in_eval_mode_without_gradients(route, options):
    layer = GATConv(F, 8, 2, feat_drop=0.5, attn_drop=0.5, **options).requires_grad_(False)
    compare(route, layer, graphs.square(), graphs.features(), train=False, require=False)


@on_routes("options", LAYER[:4])
def test_pairs(route, options):
    compare(route, GATConv((F, 7), 8, 2, **options), graphs.bipartite(),
            (graphs.features(), graphs.features(M, 7)))
    compare(route, GATConv(F, 8, 2, **options), graphs.bipartite(),
            (graphs.features(), graphs.features(M)))


@on_routes("options", LAYER[:4])
def test_blocks(route, options):
    block = graphs.block()
    compare(route, GATConv(F, 8, 2, **options), block, graphs.features(block.num_src_nodes()))


def test_a_block_and_a_pair(route):
    block = graphs.block()
    x = graphs.features(block.num_src_nodes())
    compare(route, GATConv((F, F), 8, 2), block, (x, x[:block.num_dst_nodes()].clone()))


def test_one_tensor_as_a_pair(route):
    layer, g, x = route.put(GATConv(F, 8, 2), graphs.square(), graphs.features())
    expected = layer(g, (x, x))
    with route.on():
        assert close(layer(g, (x, x)), expected)
    layer = GATConv((F, F), 8, 2).to(route.device)
    expected = layer(g, (x, x))
    with route.on():
        assert close(layer(g, (x, x)), expected)


def test_int32_ids(route):
    compare(route, GATConv(F, 8, 2), graphs.square().int(), graphs.features())
    block = graphs.block().int()
    compare(route, GATConv(F, 8, 2), block, graphs.features(block.num_src_nodes()))


def test_nodes_without_edges_where_they_are_allowed(route):
    g = dgl.graph((torch.randint(0, N, (90,)), torch.randint(0, N // 2, (90,))), num_nodes=N)
    compare(route, GATConv(F, 8, 2, residual=True, allow_zero_in_degree=True), g, graphs.features())


def test_gradients_of_nodes_without_edges_that_are_no_numbers(route):
    """The root of what is 0 at such nodes has none; what belongs to other nodes keeps its own."""
    layer = GATConv(F, 5, 3, bias=False, allow_zero_in_degree=True)
    graph, x = dgl.graph(graphs.square(N - 3).edges(), num_nodes=N), graphs.features()

    def gradients(device):
        layer.to(device).zero_grad()
        layer(graph.to(device), x.to(device)).pow(2).sum(-1).sqrt().sum().backward()
        return [p.grad.cpu() for p in layer.parameters()]

    expected = gradients(torch.device("cpu"))
    with route.on():
        got = gradients(route.device)
    assert all(p.isfinite().all() for p in expected) and all(map(close, got, expected))


def test_nodes_without_edges_where_they_are_not(route):
    g = dgl.graph((torch.randint(0, N, (90,)), torch.randint(0, N // 2, (90,))),
                  num_nodes=N).to(route.device)
    layer, x = GATConv(F, 8, 2).to(route.device), graphs.features().to(route.device)
    with pytest.raises(dgl.DGLError) as native:
        layer(g, x)
    with route.on(on_fallback="native"), pytest.raises(dgl.DGLError) as got:
        layer(g, x)
    assert str(got.value) == str(native.value) and gnnaccel.stats()["GATConv"]["reasons"] == {
        "GA204": 1}
    layer.set_allow_zero_in_degree(True)
    gnnaccel.reset_stats()
    with route.on():
        layer(g, x)
    took(route, 1)


def test_attention_dropout_of_everything(route):
    compare(route, GATConv(F, 8, 2, attn_drop=1.0), graphs.square(), graphs.features())


def test_feature_dropout_draws_what_dgl_draws(route):
    """One draw for a tensor, one for each end of a pair, in DGL's order."""
    g, x = graphs.square().to(route.device), graphs.features().to(route.device)
    for layer in (GATConv(F, 8, 2, feat_drop=0.5, residual=True),
                  GATConv((F, F), 8, 2, feat_drop=0.5, residual=True)):
        feat = x if "fc" in layer._modules else (x, x)
        layer.to(route.device)
        torch.manual_seed(1)
        expected = layer(g, feat)
        torch.manual_seed(1)
        with route.on():
            assert close(layer(g, feat), expected)


def test_attention_dropout_keeps_the_expectation(route):
    g, x = graphs.square().to(route.device), graphs.features().to(route.device)
    layer = GATConv(F, 4, 2, attn_drop=0.5, bias=False).to(route.device)
    with route.on(), torch.no_grad():
        mean = torch.stack([layer(g, x) for _ in range(300)]).mean(0)
        exact = layer.eval()(g, x)
    assert (mean - exact).norm() < 0.15 * exact.norm()


# at large scores DGL's own softmax errs less than ours
@pytest.mark.parametrize("scale,floor", [(30.0, 3e-6), (1e-3, FLOOR)])
def test_large_and_small_scores(route, scale, floor):
    compare(route, GATConv(F, 8, 2), graphs.square(), graphs.features() * scale, floor=floor)


@pytest.mark.parametrize("call", [lambda g, x: dict(get_attention=True),
                                  lambda g, x: dict(edge_weight=torch.rand(g.num_edges()).to(x))],
                         ids=["get_attention", "edge_weight"])
def test_what_is_left_to_dgl(route, call):
    layer, g, x = route.put(GATConv(F, 8, 2), graphs.square(), graphs.features())
    kwargs = call(g, x)
    expected = layer(g, x, **kwargs)
    with route.on(on_fallback="native"):
        got = layer(g, x, **kwargs)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert gnnaccel.stats()["GATConv"]["reasons"] == {"GA208": 1}


def test_falsy_options_by_position_and_by_name(route):
    layer, g, x = route.put(GATConv(F, 8, 2), graphs.square(), graphs.features())
    expected = layer(g, x)
    with route.on():
        for got in (layer(g, x, None, False), layer(graph=g, feat=x, edge_weight=None),
                    layer(g, feat=x)):
            assert close(got, expected)
    took(route, 3)


def test_bfloat16(route):
    layer, g, x = route.put(GATConv(F, 8, 2), graphs.square(), graphs.features())
    exact, layer, x = layer(g, x), layer.bfloat16(), x.bfloat16()
    native = layer(g, x)
    with route.on():
        got = layer(g, x)
    assert got.dtype == native.dtype == torch.bfloat16
    assert (got - exact).norm() <= 1.5 * (native - exact).norm() + 1e-3 * exact.norm()


def test_the_users_frames_are_left_alone(route):
    layer, g, x = route.put(GATConv(F, 8, 2), graphs.square(), graphs.features())
    g.ndata["ft"], g.edata["a"] = x, torch.arange(g.num_edges()).to(route.device)
    with route.on():
        layer(g, x).sum().backward()
    assert set(g.ndata) == {"ft"} and set(g.edata) == {"a"} and torch.equal(g.ndata["ft"], x)
