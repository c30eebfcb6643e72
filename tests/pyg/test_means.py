"""Softmax and power-mean aggregations inside layers, against PyG's own."""
from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import GENConv, MessagePassing
from torch_geometric.nn.aggr import MultiAggregation, PowerMeanAggregation, SoftmaxAggregation

import gnnaccel
from tests.pyg import graphs
from tests.pyg.graphs import E, F, M, N
from tests.pyg.judge import close, compare, took
from tests.pyg.own_layers import POSITIONS, Copying, Differing, Weighing

MEANS = {
    "softmax": lambda: SoftmaxAggregation(),
    "cold": lambda: SoftmaxAggregation(0.1, semi_grad=True),
    "learnt softmax": lambda: spread(SoftmaxAggregation(2.0, learn=True)),
    "softmax by channel": lambda: spread(SoftmaxAggregation(1.5, learn=True, channels=F)),
    "mean": lambda: PowerMeanAggregation(),
    "power": lambda: PowerMeanAggregation(3.0, clamp_max=None),
    "learnt power": lambda: spread(PowerMeanAggregation(2.0, learn=True)),
    "power by channel": lambda: spread(PowerMeanAggregation(1.5, learn=True, channels=F)),
}


def spread(module):
    """With learnt numbers that differ."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.linspace(0, 0.5, p.numel()))
    return module


@pytest.mark.parametrize("name", MEANS)
def test_means(route, name):
    compare(route, Copying(aggr=MEANS[name]()), graphs.features(), graphs.square(),
            positions=POSITIONS)


def test_two_kinds_of_nodes_and_odd_widths(route):
    for aggr in (SoftmaxAggregation(learn=True), PowerMeanAggregation(2.0)):
        compare(route, Copying(aggr=aggr), torch.randn(N, 3), graphs.bipartite(), (N, M),
                positions=("x", "edge_index", "size"))


@pytest.mark.long
def test_among_several(route):
    """Of the others a mean and a maximum share a pass by kernels; two of the same kind keep their
    own numbers."""
    for mode, more in (("cat", ["max", SoftmaxAggregation(3.0)]), ("sum", [])):
        aggrs = ["mean", SoftmaxAggregation(learn=True), *more,
                 PowerMeanAggregation(2.0, learn=True)]
        several = MultiAggregation(aggrs, mode=mode)
        compare(route, Copying(aggr=several), graphs.features(), graphs.square(),
                positions=POSITIONS)


def test_large_logits(route):
    """Nothing but differences is exponentiated."""
    layer, x, ei = Copying(aggr=SoftmaxAggregation(50.0)), graphs.features().to(
        route.device) * 10, graphs.square()
    ei = ei.to(route.device)
    expected = layer(x.double(), ei)
    with route.on():
        assert close(layer(x, ei).double(), expected)


@pytest.mark.long
def test_numbers_set_between_calls(route):
    """Also in calls that repeat; a module whose numbers no longer fit goes native."""
    layer, x, ei = Copying(aggr=SoftmaxAggregation()), graphs.features().to(
        route.device), graphs.square().to(route.device)
    for t in (1.0, 1.0, 3.0, torch.full((1,), 0.5, device=route.device)):
        layer.aggr_module.t = t
        expected = layer(x, ei)
        with route.on():
            assert close(layer(x, ei), expected)
    took(route, 4)
    layer = GENConv(F, F, norm="layer", edge_dim=3).to(route.device)
    for t in (1.0, 1.0, 3.0):
        e = torch.randn(E, 3, device=route.device)
        layer.aggr_module.t = t
        expected = layer(x, ei, e)
        with route.on():
            assert close(layer(x, ei, e), expected)
    took(route, 7)


def test_gen(route):
    """Whose messages are made of its features row by row."""
    for options in (dict(learn_t=True), dict(aggr="powermean", learn_p=True, p=2.0),
                    dict(aggr="add")):
        compare(route, GENConv(F, F, norm="layer", **options), graphs.features(), graphs.square(),
                positions=POSITIONS)


GEN = {
    "usual": dict(), "learnt, mapped": dict(t=0.5, learn_t=True, edge_dim=4),
    "without edges": dict(aggr="softmax_sg", t=3.0),
    "cold": dict(t=-2.0, learn_t=True, edge_dim=4, eps=0.1),
    "by channel": dict(aggr_kwargs=dict(learn=True, channels=6), edge_dim=4),
    "several": dict(aggr=["max", "softmax", "mean"]),
    "bipartite": dict(in_channels=(F, 5), edge_dim=3),
}


@pytest.mark.parametrize("name", GEN)
def test_gen_with_features_of_edges(route, name):
    """Its softmax of rectified messages; gradients of t and of the map of edges among the
    parameters'."""
    options = {"in_channels": F, "out_channels": 6, "norm": "layer", **GEN[name]}
    edge = torch.randn(E, options.get("edge_dim", 6))
    args = graphs.features(), graphs.square()
    if name == "bipartite":
        args = (graphs.features(), graphs.features(M, 5)), graphs.bipartite()
    compare(route, GENConv(**options), *args, positions=POSITIONS, floor=1e-6, edge_attr=edge)


def test_strides_and_results_changed_in_place(route):
    """Features of nodes and edges that are not contiguous; a result that its user changes."""
    class Rectifying(MessagePassing):
        def forward(self, x, edge_index, e):
            out = self.propagate(edge_index, x=x.t(), e=e[:, ::2])
            out += 1.0
            return out.relu_()

        def message(self, x_j, e):
            return (x_j + e).relu() + 0.5

    x, e = torch.randn(F, N), torch.randn(E, 2 * F)
    compare(route, Rectifying(aggr=SoftmaxAggregation(2.0, learn=True)), x, graphs.square(), e,
            positions=POSITIONS, floor=1e-6)


@pytest.mark.parametrize("aggr", ["powermean", ["max", "powermean"]])
def test_power_means_of_what_is_more_than_rows_are_native(aggr):
    layer = GENConv(F, F, norm="layer", aggr=aggr)
    args = (graphs.features(), graphs.square(), torch.randn(E, F))
    expected = layer(*args)
    with gnnaccel.enabled(when="supported"):
        assert torch.equal(layer(*args), expected)
    assert gnnaccel.stats()["GENConv"]["reasons"] == {"GA201": 1}


def test_softmax_of_other_messages(emulated):
    """By torch operations where they are asked for; no kernel has it."""
    layer, x, ei = Differing(aggr=SoftmaxAggregation()), graphs.features(), graphs.square()
    expected = layer(x, ei)
    with gnnaccel.enabled(backend="torch", when="supported", on_fallback="raise"):
        assert close(layer(x, ei), expected)
    with emulated.on(on_fallback="native"):
        assert torch.equal(layer(x, ei), expected)
    assert gnnaccel.stats()["Differing"]["reasons"] == {"GA208": 1}


def test_numbers_of_another_dtype(route):
    """fp64 numbers make the host's result fp64, also where they come between calls that repeat."""
    layer, x, ei = Copying(aggr=SoftmaxAggregation()), graphs.features().to(
        route.device), graphs.square().to(route.device)
    for t in (1.0, 2.0, torch.full((1,), 0.5, device=route.device, dtype=torch.float64)):
        layer.aggr_module.t = t
        expected = layer(x, ei)
        with route.on(on_fallback="native"):
            assert close(layer(x, ei), expected)
    assert gnnaccel.stats()["Copying"]["reasons"] == {"GA203": 1}


def test_a_power_in_double_precision(emulated):
    """Of features in single precision it makes rows that no kernel reads."""
    layer = Copying(aggr=spread(PowerMeanAggregation(2.0, learn=True)).double())
    args = graphs.features(), graphs.square()
    expected = layer(*args)
    with gnnaccel.enabled(backend="cuda", when="supported"):
        got = layer(*args)
    assert got.dtype is torch.float64 and torch.equal(got, expected)
    assert gnnaccel.stats()["Copying"]["reasons"] == {"GA203": 1}


def test_weighted_messages_are_native():
    layer = Weighing(aggr=SoftmaxAggregation())
    args = (graphs.features(), graphs.square(), torch.randn(E))
    expected = layer(*args)
    with gnnaccel.enabled(when="supported"):
        assert torch.equal(layer(*args), expected)
    assert gnnaccel.stats()["Weighing"]["reasons"] == {"GA201": 1}


def test_half_precision_and_autocast(emulated):
    layer, x, ei = Copying(
        aggr=SoftmaxAggregation(learn=True)), graphs.features().bfloat16(), graphs.square()
    expected = layer(x, ei)
    with emulated.on():
        got = layer(x, ei)
    assert got.dtype == expected.dtype and close(got.double(), layer(x.double(), ei), 1e-2)
    plain = Copying(aggr=SoftmaxAggregation())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain(x, ei)
        with emulated.on(on_fallback="native"):
            assert torch.equal(plain(x, ei), expected)
    assert gnnaccel.stats()["Copying"]["reasons"] == {"GA203": 1}


def test_second_derivatives(route):
    layer, ei, x = Copying(aggr=SoftmaxAggregation(2.0,
                                                   learn=True)), graphs.square(), torch.randn(N, 3)

    def second(device, dtype):
        leaf = x.to(device, dtype).requires_grad_()
        layer.to(device, dtype)
        grad, = torch.autograd.grad(layer(leaf, ei.to(device)).pow(3).sum(), leaf,
                                    create_graph=True)
        return torch.autograd.grad(grad.pow(2).sum(), [leaf, layer.aggr_module.t])

    exact = second("cpu", torch.float64)
    with route.on():
        got = second(route.device, torch.float32)
    assert all(close(a.cpu().double(), b, 1e-4) for a, b in zip(got, exact))
