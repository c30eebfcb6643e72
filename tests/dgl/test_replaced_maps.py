"""Maps of DGL's layers that are more than a weight: computed weights, and modules without any."""
from __future__ import annotations

import copy

import pytest
import torch
from dgl.nn import EdgeGATConv, EGATConv, GATConv, GatedGCNConv, GATv2Conv, HGTConv, SAGEConv
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import gnnaccel
from tests.dgl import graphs
from tests.dgl.graphs import F
from tests.dgl.judge import close, took
from tests.dgl.layers import EDGE, edge_features
from tests.judge import spread
from tests.rounded import put, put_as_attribute

CASES = {
    "mean": lambda: SAGEConv(F, 8, "mean"), "pool": lambda: SAGEConv(F, 8, "pool"),
    "gcn": lambda: SAGEConv(F, 8, "gcn"), "gated": lambda: GatedGCNConv(F, EDGE, F),
    "GATConv": lambda: GATConv(F, 4, 2), "GATv2Conv": lambda: GATv2Conv(F, 4, 2),
    "EGATConv": lambda: EGATConv(F, EDGE, 4, 4, 2),
    "EdgeGATConv": lambda: EdgeGATConv(F, EDGE, 4, 2),
    "HGTConv": lambda: HGTConv(F, 4, 2, 2, 3, dropout=0.0),
}
WITH_EDGES = ("gated", "EGATConv", "EdgeGATConv")


class Counting(nn.Module):
    """Numbers how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight * (1 + self.calls)


def given(name: str) -> list:
    x, g = graphs.features(), graphs.square()
    if name == "HGTConv":
        return [g, x, torch.arange(g.num_nodes()) % 2, torch.arange(g.num_edges()) % 3]
    return [g, x, edge_features(g)] if name in WITH_EDGES else [g, x]


@pytest.mark.long
@pytest.mark.parametrize("name,part,parameter", [
    ("mean", "fc_neigh", "weight"), ("mean", "fc_self", "weight"), ("pool", "fc_neigh", "weight"),
    ("gcn", "fc_neigh", "weight"), ("gated", "A", "weight"), ("gated", "B", "weight"),
    ("GATConv", "", "attn_l"), ("GATv2Conv", "", "attn"), ("EGATConv", "", "attn")])
def test_a_parameter_is_computed_once_a_call(route, name, part, parameter):
    """Natively, and on the route: what it is then is the same, call by call."""
    layer, args = CASES[name](), given(name)
    parametrize.register_parametrization(layer.get_submodule(part), parameter, Counting())
    twin = copy.deepcopy(layer).to(route.device)
    layer, args = layer.to(route.device), [a.to(route.device) for a in args]
    for _ in range(3):
        with gnnaccel.disabled():
            expected = twin(*args)
        with route.on():
            got = layer(*args)
        for one, two in zip(*(t if isinstance(t, tuple) else (t,) for t in (got, expected))):
            assert close(one, two)
    took(route, 3)


def test_spectral_norm_in_training(route):
    layer, args = CASES["mean"]().to(route.device), [a.to(route.device) for a in given("mean")]
    parametrizations.spectral_norm(layer.fc_neigh, n_power_iterations=1)
    twin = copy.deepcopy(layer)
    with route.on():
        got = layer(*args)
    assert close(got, twin(*args))
    assert all(map(torch.equal, layer.buffers(), twin.buffers()))


@pytest.mark.parametrize("name,part", [("mean", "fc_neigh"), ("mean", "fc_self"),
                                       ("pool", "fc_neigh"), ("gcn", "fc_neigh"), ("gated", "A"),
                                       ("gated", "B")])
def test_a_map_without_a_weight(name, part):
    """As adapters around a map are: it stays native."""
    layer, args = CASES[name](), given(name)
    setattr(layer, part, nn.Sequential(getattr(layer, part), nn.Tanh()))
    expected = layer(*args)
    with gnnaccel.enabled(when="supported", backend="torch"):
        for _ in range(2):
            got = layer(*args)
            for one, two in zip(*(t if isinstance(t, tuple) else (t,) for t in (got, expected))):
                assert close(one, two, 1e-6)
    assert gnnaccel.stats()[type(layer).__name__]["reasons"] == {"GA208": 2}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("name", CASES)
def test_dynamically_quantized_maps(name, before):
    """Their `weight` is a method. ``before``: so many calls with the maps before are remembered."""
    layer, args = CASES[name]().eval(), given(name)
    with torch.no_grad(), gnnaccel.enabled(when="supported", backend="torch"):
        for _ in range(before):
            layer(*args)
        torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, dtype=torch.qint8, inplace=True)
        with gnnaccel.disabled():
            expected = layer(*args)
        for _ in range(2):
            got = layer(*args)
            for one, two in zip(*(t if isinstance(t, tuple) else (t,) for t in (got, expected))):
                assert close(one, two)


@pytest.mark.long
@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("way", ["set", "swapped", "attribute", "attribute again"])
@pytest.mark.parametrize("name,part,parameter", [
    ("EdgeGATConv", "fc_edge", "weight"), ("EdgeGATConv", "fc", "weight"),
    ("EdgeGATConv", "", "attn_l"), ("GATConv", "fc", "weight"), ("GATConv", "", "attn_l"),
    ("GATv2Conv", "", "attn"), ("EGATConv", "fc_ni", "weight"), ("gated", "A", "weight"),
    ("mean", "fc_neigh", "weight"), ("HGTConv", "relation_pri", "0"),
    ("HGTConv", "relation_att.0", "W")])
def test_a_weight_with_functions_of_its_own(route, name, part, parameter, way, before):
    """``before``: so many calls with the layer's own weight are remembered, or with an ordinary
    tensor in its place."""
    layer, args = spread(CASES[name]()).to(route.device), [a.to(route.device) for a in given(name)]
    args[1].requires_grad_()

    def results():
        out = layer(*args)
        out = out[0] if isinstance(out, tuple) else out
        leaves = [t for t in (args[1], *layer.parameters()) if t.requires_grad]
        return [out, *torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)]

    if way == "attribute again":
        put_as_attribute(layer, part, parameter, torch.Tensor)
    with route.on(on_fallback="native"):
        for _ in range(before):
            results()
        if way.startswith("attribute"):
            put_as_attribute(layer, part, parameter)
        else:
            put(layer, part, parameter, way == "swapped")
        got = [results() for _ in range(2)]
    with gnnaccel.disabled():
        expected = results()
    for one in got:
        for ours, hosts in zip(one, expected, strict=True):
            torch.testing.assert_close(ours, hosts, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("name,parameter", [("GATConv", "attn_l"), ("GATConv", "bias"),
                                            ("GATv2Conv", "attn"), ("EGATConv", "attn"),
                                            ("EGATConv", "bias"), ("EdgeGATConv", "attn_edge"),
                                            ("HGTConv", "skip")])
def test_a_number_in_the_place_of_a_parameter(name, parameter, before):
    """``before``: so many calls with the parameter are remembered."""
    layer, args = CASES[name]().eval(), given(name)

    def results() -> tuple:
        try:
            out = layer(*args)
        except Exception as error:
            return type(error), str(error)
        return out if isinstance(out, tuple) else (out,)

    with gnnaccel.enabled(when="supported", backend="torch"):
        for _ in range(before):
            layer(*args)
        delattr(layer, parameter)
        setattr(layer, parameter, 0.5)
        got = [results() for _ in range(2)]
    with gnnaccel.disabled():
        expected = results()
    for one in got:
        for ours, hosts in zip(one, expected, strict=True):
            assert ours == hosts if isinstance(ours, (type, str)) else close(ours, hosts, 1e-6)
