"""Layers that aggregate by variances and standard deviations, alone or among others."""
from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import GINEConv, GraphConv, SAGEConv, aggr

import gnnaccel
from tests.pyg import graphs
from tests.pyg.graphs import E, EDGE, F, N
from tests.pyg.judge import close, compare

SEVERAL = [["std"], ["var"], ["mean", "std", "max"], ["std", "min", "sum", "var"],
           ["std", "softmax"], ["powermean", "var"]]
LAYERS = {
    "SAGEConv": (lambda how: SAGEConv(F, 5, aggr=how), lambda: ()),
    "GraphConv": (lambda how: GraphConv(F, 5, aggr=how), lambda: (torch.rand(E),)),
    "GINEConv": (lambda how: GINEConv(torch.nn.Linear(F, 5), edge_dim=EDGE, aggr=how),
                 lambda: (graphs.edge_features(),)),
}


@pytest.mark.parametrize("how", ["std", "var"])
@pytest.mark.parametrize("name", LAYERS)
def test_alone(route, name, how):
    made, more = LAYERS[name]
    compare(route, made(how), graphs.features(), graphs.square(), *more(), floor=3e-5)


@pytest.mark.parametrize("how", SEVERAL, ids=str)
def test_several(route, how):
    x = graphs.features().abs()  # of which there are powers
    compare(route, SAGEConv(F, 5, aggr=how), x, graphs.square(), floor=3e-5)


@pytest.mark.parametrize("how", ["std", "var", ["mean", "std"]], ids=str)
def test_neighbours_that_are_alike(route, how):
    """Their deviation is nothing, and so is its gradient; a node of one neighbour has none."""
    x, edge_index = torch.randn(1, F).expand(N, F).contiguous(), graphs.square()
    x[5:] += 1e-3 * torch.randn(N - 5, F)
    edge_index[1, -1] = N - 1
    compare(route, SAGEConv(F, 5, aggr=how), x, edge_index, floor=3e-5)


def _half(layer):
    inner = layer.aggr_module
    getattr(inner, "var_aggr", inner).semi_grad = True


def _hook(layer):
    inner = layer.aggr_module
    getattr(inner, "var_aggr", inner).register_forward_hook(lambda module, given, out: 3 * out)


class _Tripled(aggr.VarAggregation):
    def forward(self, *args, **kwargs):
        return 3 * super().forward(*args, **kwargs)


def _inside(layer):
    if hasattr(layer.aggr_module, "var_aggr"):
        layer.aggr_module.var_aggr = _Tripled()
    else:
        layer.aggr_module = _Tripled()


def _other(layer):
    layer.aggr_module = aggr.MaxAggregation()


@pytest.mark.parametrize("change", [_half, _hook, _inside, _other])
@pytest.mark.parametrize("how", ["std", "var"])
@pytest.mark.parametrize("new", [False, True])
def test_what_changes_inside_is_seen(route, how, change, new):
    layer = GraphConv(F, 5, aggr=how).to(route.device)
    args = [t.to(route.device) for t in (graphs.features(), graphs.square())]

    def gradients():
        x = args[0].clone().requires_grad_()
        out = layer(x, args[1])
        return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]

    with route.on(on_fallback="native"):
        for _ in range(6):
            if new:
                args[1] = graphs.square().to(route.device)
            gradients()
        assert "native" not in gnnaccel.stats()["GraphConv"]["routes"]
        change(layer)
        for _ in range(3):
            if new:
                args[1] = graphs.square().to(route.device)
            found = gradients()
            with gnnaccel.disabled():
                expected = gradients()
            assert all(close(a, b, 1e-3) for a, b in zip(found, expected))


def _reversed(layer):
    layer.aggr_module.aggrs = torch.nn.ModuleList(list(layer.aggr_module.aggrs)[::-1])


def _replaced(layer):
    layer.aggr_module.aggrs[0] = aggr.MinAggregation()


def _watched(layer):
    layer.aggr_module.fused_aggr.register_forward_hook(
        lambda module, given, out: [3 * one for one in out])


@pytest.mark.parametrize("change", [_reversed, _replaced, _watched])
@pytest.mark.parametrize("how", [["mean", "max"], ["std", "min", "sum"]], ids=str)
def test_what_changes_in_a_list_is_what_the_host_makes_of_it(route, how, change):
    """It goes on with what the members were when the list was made."""
    layer = SAGEConv(F, 5, aggr=how).to(route.device)
    x, edge_index = graphs.features().to(route.device), graphs.square().to(route.device)
    with route.on(on_fallback="native"):
        for _ in range(3):
            layer(x, edge_index)
        assert "native" not in gnnaccel.stats()["SAGEConv"]["routes"]
        change(layer)
        found = layer(x, edge_index)
    assert close(found, layer(x, edge_index), 1e-4)


@pytest.mark.parametrize("how", [["std", "std"], ["mean", "max", "mean"], ["var", "var"]], ids=str)
def test_one_twice_in_a_list(route, how):
    """The host gives the first of them without the last steps of its formula."""
    layer = SAGEConv(F, 5, aggr=how).to(route.device)
    x, edge_index = graphs.features().to(route.device), graphs.square().to(route.device)
    with route.on(on_fallback="native"):
        found = layer(x, edge_index)
    assert close(found, layer(x, edge_index), 1e-4)


@pytest.mark.long
def test_a_list_made_with_half_of_a_gradient(route):
    layer = SAGEConv(F, 5, aggr=["var", "max"],
                     aggr_kwargs={"aggrs_kwargs": [{"semi_grad": True}, {}]}).to(route.device)
    layer.aggr_module.aggrs[0].semi_grad = False  # too late
    x = graphs.features().to(route.device).requires_grad_()
    edge_index = graphs.square().to(route.device)
    with route.on(on_fallback="native"):
        found, = torch.autograd.grad(layer(x, edge_index).sum(), x)
    expected, = torch.autograd.grad(layer(x, edge_index).sum(), x)
    assert close(found, expected, 1e-4)


@pytest.mark.long
@pytest.mark.parametrize("how", ["std", ["mean", "max", "std"]], ids=str)
def test_compiled(route, how):
    torch._dynamo.reset()
    layer = SAGEConv(F, 5, aggr=how).to(route.device)
    x, edge_index = graphs.features().to(route.device), graphs.square().to(route.device)
    expected = layer(x, edge_index)
    with route.on(on_fallback="native"):
        assert close(torch.compile(layer, backend="aot_eager")(x, edge_index), expected, 1e-4)
