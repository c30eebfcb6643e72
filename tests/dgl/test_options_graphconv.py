"""GraphConv: every constructor and call option against DGL's own layer."""
from __future__ import annotations

import dgl
import pytest
import torch
from dgl.nn import GraphConv

import gnnaccel
from tests.dgl import graphs
from tests.dgl.graphs import E, F, M, N
from tests.dgl.judge import close, compare, on_routes, took
from tests.dgl.op_cases import bare

NORMS = ["both", "left", "right", "none"]
OPTIONS = [dict(weight=False), dict(bias=False), dict(weight=False, bias=False),
           dict(activation=torch.nn.ELU()), dict(allow_zero_in_degree=True)]


@on_routes("norm,out", [(norm, out) for norm in NORMS for out in (5, 16)],
           [("both", out) for out in (1, 12, 64, 130)])
def test_norms_with_the_map_before_and_after(route, norm, out):
    compare(route, GraphConv(F, out, norm=norm), graphs.square(), graphs.features())


@on_routes("norm", NORMS)
def test_weights_of_edges(route, norm):
    for out, shape in ((5, (E,)), (16, (E, 1))):
        compare(route, GraphConv(F, out, norm=norm), graphs.square(), graphs.features(),
                edge_weight=torch.randn(shape))


@on_routes("options", OPTIONS)
def test_layer_options(route, options):
    out = F if options.get("weight") is False else 7
    compare(route, GraphConv(F, out, **options), graphs.square(), graphs.features())


def test_a_bias_that_is_broadcast(route):
    """Nothing forbids a bias of another width than that of the rows, if there is no weight."""
    compare(route, GraphConv(1, 3, weight=False, norm="right"), graphs.square(),
            graphs.features(width=1))


@on_routes("out", [5, 16])
def test_a_weight_given_with_the_call(route, out):
    compare(route, GraphConv(F, out, weight=False), graphs.square(), graphs.features(),
            torch.randn(F, out))


@on_routes("norm", NORMS)
def test_pairs_and_blocks(route, norm):
    compare(route, GraphConv(F, 5, norm=norm), graphs.bipartite(),
            (graphs.features(), graphs.features(M)), require=False)
    block = graphs.block()
    compare(route, GraphConv(F, 16, norm=norm), block, graphs.features(block.num_src_nodes()))


@on_routes("norm", NORMS)
def test_nodes_without_edges(route, norm):
    compare(route, GraphConv(F, 5, norm=norm, allow_zero_in_degree=True), bare(), graphs.features())


@on_routes("dtype", [torch.float64], [])
def test_double_precision(route, dtype):
    if route.backend == "torch":
        compare(route, GraphConv(F, 5).to(dtype), graphs.square(), graphs.features().to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_near_as_the_host(route, dtype):
    """DGL's own kernels on a CPU take no halves, so fp32 is held against."""
    layer, g, x = route.put(GraphConv(F, 5), graphs.square(), graphs.features())
    expected = layer(g, x)
    with route.on():
        got = layer.to(dtype)(g, x.to(dtype))
    assert got.dtype == dtype and (got.float() - expected).norm() / expected.norm() < 0.02


def test_in_eval_mode_without_gradients(route):
    compare(route, GraphConv(F, 5).requires_grad_(False), graphs.square(), graphs.features(),
            train=False, require=False)


def test_second_derivatives(route):
    g = graphs.square().to(route.device)
    layer, grads = GraphConv(F, 5).to(route.device), []
    x, w = (torch.randn(shape, device=route.device).requires_grad_() for shape in ((N, F), (E,)))
    for on in (False, True):
        with route.on() if on else gnnaccel.disabled():
            out = layer(g, x, edge_weight=w)
        (d_x,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        grads.append(torch.autograd.grad(d_x.square().sum(), (x, w, layer.weight)))
    assert all(close(a, b) for a, b in zip(*grads))


def test_nodes_of_in_degree_0_are_dgls_error(route):
    layer, x = GraphConv(F, 5).to(route.device), graphs.features().to(route.device)
    with route.on(on_fallback="native"), pytest.raises(dgl.DGLError, match="0-in-degree"):
        layer(bare().to(route.device), x)
    assert gnnaccel.stats()["GraphConv"]["reasons"] == {"GA204": 1}


def test_two_weights_are_dgls_error(route):
    layer, x = GraphConv(F, 5).to(route.device), graphs.features().to(route.device)
    with route.on(on_fallback="native"), pytest.raises(dgl.DGLError, match="External weight"):
        layer(graphs.square().to(route.device), x, torch.randn(F, 5, device=route.device))
    assert gnnaccel.stats()["GraphConv"]["reasons"] == {"GA206": 1}


def test_what_is_left_to_single_operations(route):
    layer, g = GraphConv(F, 5).to(route.device), graphs.square().to(route.device)
    for x, weight in ((torch.randn(N, 3, F), None), (torch.randn(N, F), torch.randn(E, 5))):
        x, weight = x.to(route.device), None if weight is None else weight.to(route.device)
        gnnaccel.reset_stats()
        expected = layer(g, x, edge_weight=weight)
        with route.on(on_fallback="native"):
            assert close(layer(g, x, edge_weight=weight), expected)
        assert gnnaccel.stats()["GraphConv"]["reasons"] == {"GA206": 1}


def test_degrees_are_counted_once_per_graph(route, monkeypatch):
    g, x = graphs.square().to(route.device), graphs.features().to(route.device)
    layer = GraphConv(F, 5).to(route.device)
    with route.on():
        first = layer(g, x)

        def counted(*_):
            raise AssertionError("degrees were asked for again")

        monkeypatch.setattr(dgl.DGLGraph, "in_degrees", counted)
        monkeypatch.setattr(dgl.DGLGraph, "out_degrees", counted)
        monkeypatch.setattr(torch.Tensor, "scatter_add_", counted)
        assert close(layer(g, x), first)
    took(route, 2)


def test_a_changed_graph_has_other_degrees(route):
    g, x = graphs.square().to(route.device), graphs.features().to(route.device)
    layer = GraphConv(F, 5).to(route.device)
    with route.on():
        layer(g, x)
        g.add_edges(torch.tensor([1, 2], device=route.device),
                    torch.tensor([3, 4], device=route.device))
        got = layer(g, x)
    assert close(got, layer(g, x))


def test_explained():
    text = str(gnnaccel.explain_program(GraphConv(F, 5), graphs.square(), graphs.features()))
    assert "GraphConv as stated:" in text and "sum of" in text
    assert f"5 channels of float32, {E} edges from {N} to {N} nodes" in text


def test_on_a_cpu_the_hosts_kernels_run():
    layer, g, x = GraphConv(F, 5), graphs.square(), graphs.features()
    expected = layer(g, x)
    with gnnaccel.enabled(on_fallback="raise"):
        assert torch.equal(layer(g, x), expected)
    assert gnnaccel.stats()["GraphConv"]["reasons"] == {"GA401": 1}
