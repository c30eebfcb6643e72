"""Users may replace the host's functions on a class, an object or in a module: those then run."""
from __future__ import annotations

import functools
import importlib
import inspect

import pytest
import torch
from torch_geometric import nn
from torch_geometric.nn import (GATConv, GATv2Conv, GCNConv, GINEConv, HGTConv, MessagePassing,
                                PNAConv, RGCNConv, SAGEConv, TransformerConv)
from torch_geometric.nn.aggr import Aggregation, MeanAggregation, SumAggregation
from torch_geometric.nn.dense.linear import Linear

import gnnaccel
from gnnaccel.adapters import own
from gnnaccel.adapters.pyg import LAYERS, adapter_of, guards, path_of
from gnnaccel.adapters.pyg.propagate import graph_norm
from tests.helpers import relative
from tests.pyg import graphs
from tests.pyg import hetero_graphs as hetero
from tests.pyg.graphs import E, F
from tests.pyg.judge import close

OF_A_LAYER = {"GATConv": (GATConv,
                          "forward message edge_update propagate edge_updater aggregate update"),
              "GATv2Conv": (GATv2Conv, "forward message edge_update propagate edge_updater"),
              "TransformerConv": (TransformerConv, "forward message propagate"),
              "RGCNConv": (RGCNConv, "forward message propagate"),
              "HGTConv": (HGTConv, "forward message propagate _construct_src_node_feat"),
              "PNAConv": (PNAConv, "forward message propagate")}
METHODS = [(name, method) for name, (_, methods) in OF_A_LAYER.items()
           for method in methods.split() if name != "GATConv"]
WHEN = ["before", "between", "after"]


def doubled(native):
    """Twice what a function gives, dressed as that function."""
    @functools.wraps(native)
    def replaced(*args, **kwargs):
        return twice(native(*args, **kwargs))

    return replaced


def twice(out):
    if isinstance(out, torch.Tensor):
        return 2 * out if out.is_floating_point() else out
    if isinstance(out, dict):
        return {k: twice(v) for k, v in out.items()}
    return tuple(map(twice, out)) if isinstance(out, tuple) else out


def made(name, device):
    """A layer of this class, and what it is called on."""
    x, ei = graphs.features().to(device), graphs.square().to(device)
    if name == "RGCNConv":
        return RGCNConv(F, 8, 3).to(device), (x, ei, torch.randint(0, 3, (E,), device=device))
    if name == "HGTConv":
        x, ei = hetero.on(device, hetero.features(), hetero.edges())
        return HGTConv(hetero.WIDTH, 8, hetero.METADATA, heads=2).to(device), (x, ei)
    if name == "PNAConv":
        return PNAConv(F, 8, ["mean", "max"], ["identity", "amplification"],
                       torch.ones(10, dtype=torch.long)).to(device), (x, ei)
    return getattr(nn, name)(F, 8).to(device), (x, ei)


def same(got, expected, tolerance=1e-5):
    """Tensors, or dictionaries of them, are equal up to rounding."""
    if isinstance(expected, dict):
        return (got.keys() == expected.keys()
                and all(same(got[k], t, tolerance) for k, t in expected.items()))
    return relative(got, expected) <= tolerance


def check(route, replace, layer, args, when):
    """A replaced function runs, whether it was replaced before gnnaccel was enabled, between two
    sessions, or during one after several calls.

    Also checks that the function matters, and that the layer is taken over again once the
    replacement is undone.
    """
    with torch.no_grad():
        usual = layer(*args)
        if when != "before":
            with route.on():
                for _ in range(3):
                    assert same(layer(*args), usual)
        if when == "after":
            with route.on(on_fallback="native"):
                for _ in range(3):
                    layer(*args)
                with replace():
                    with gnnaccel.disabled():
                        expected = layer(*args)
                    got = [layer(*args) for _ in range(3)]
        else:
            with replace():
                expected = layer(*args)
                with route.on(on_fallback="native"):
                    got = [layer(*args) for _ in range(3)]
        assert not same(expected, usual, 1e-3), "what was replaced does not matter"
        assert all(same(out, expected) for out in got)
        with route.on():
            assert same(layer(*args), usual)


@pytest.fixture
def replaced(monkeypatch):
    """``replaced(owner, name)``: a block in which that is doubled."""
    def during(owner, name):
        class Block:
            def __enter__(self):
                self.patch = pytest.MonkeyPatch()
                self.patch.setattr(owner, name, doubled(getattr(owner, name)))

            def __exit__(self, *_):
                self.patch.undo()

        return Block

    return during


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("method", OF_A_LAYER["GATConv"][1].split())
def test_a_method_of_gat(route, replaced, method, when):
    """Also of calls that are bound to weights and kernels."""
    layer, args = made("GATConv", route.device)
    check(route, replaced(GATConv, method), layer, args, when)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("name,method", METHODS)
def test_a_method_of_the_class(by_torch, replaced, name, method, when):
    layer, args = made(name, by_torch.device)
    check(by_torch, replaced(type(layer), method), layer, args, when)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("owner,name", [(SumAggregation, "forward"), (Aggregation, "reduce"),
                                        (Linear, "forward"),
                                        (inspect.getmodule(Aggregation), "scatter"),
                                        (inspect.getmodule(GATConv), "softmax"),
                                        (MessagePassing, "aggregate"), (MessagePassing, "update"),
                                        (torch.nn.functional, "leaky_relu"),
                                        (torch.nn.functional, "linear")],
                         ids=lambda v: getattr(v, "__name__", v).rpartition(".")[2])
def test_what_a_layer_calls(route, replaced, owner, name, when):
    layer, args = made("GATConv", route.device)
    check(route, replaced(owner, name), layer, args, when)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("owner,name", [(Aggregation, "reduce"), (MeanAggregation, "forward"),
                                        (torch, "cat")], ids=["reduce", "mean", "cat"])
def test_what_the_aggregations_inside_pna_call(by_torch, replaced, owner, name, when):
    layer, args = made("PNAConv", by_torch.device)
    check(by_torch, replaced(owner, name), layer, args, when)


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "TransformerConv"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_dropout_that_always_drops(route, monkeypatch, name, when):
    """As users do to draw several predictions of a trained model."""
    x, ei = graphs.features().to(route.device), graphs.square().to(route.device)
    layer = getattr(nn, name)(F, 8, dropout=0.5).to(route.device).eval()
    own = torch.nn.functional.dropout
    with torch.no_grad(), route.on(on_fallback="native"):
        for _ in range(3 if when == "after" else 0):
            assert torch.equal(layer(x, ei), layer(x, ei))
        monkeypatch.setattr(torch.nn.functional, "dropout",
                            lambda input, p=0.5, training=True, inplace=False: own(input, p))
        assert not torch.equal(layer(x, ei), layer(x, ei))


@pytest.mark.parametrize("name", ["GATConv", "RGCNConv", "SAGEConv"])
@pytest.mark.parametrize("when", WHEN)
def test_hooks_on_all_modules(route, name, when):
    """They see aggregations, too."""
    def replace():
        return torch.nn.modules.module.register_module_forward_hook(
            lambda module, given, out: twice(out) if isinstance(module, Aggregation) else None)

    layer, args = made(name, route.device)
    check(route, replace, layer, args, when)


@pytest.mark.parametrize("name,method", [("GATConv", "propagate"), ("GATConv", "edge_updater"),
                                         ("GATConv", "aggr_module.forward"),
                                         ("GATConv", "aggr_module.reduce"), ("GATConv", "message"),
                                         ("RGCNConv", "propagate"), ("HGTConv", "propagate"),
                                         ("PNAConv", "propagate"),
                                         ("PNAConv", "aggr_module.forward"),
                                         ("SAGEConv", "aggr_module.forward"),
                                         ("SAGEConv", "aggr_module.reduce"),
                                         ("GCNConv", "aggr_module.reduce")])
def test_a_method_of_the_object(by_torch, replaced, name, method):
    layer, args = made(name, by_torch.device)
    owner, _, method = ("." + method).rpartition(".")
    target = functools.reduce(getattr, filter(None, owner.split(".")), layer)
    check(by_torch, replaced(target, method), layer, args, "after")


class Later(GATConv):
    """Nothing of its own, yet."""


@pytest.mark.parametrize("method", ["message", "edge_update", "propagate", "edge_updater"])
def test_a_method_of_a_subclass_after_its_first_call(route, replaced, method):
    layer = Later(F, 8).to(route.device)
    check(route, replaced(Later, method), layer, made("GATConv", route.device)[1], "after")


class Propagates(GATConv):
    def propagate(self, *args, **kwargs):
        return 2 * MessagePassing.propagate(self, *args, **kwargs)


class Updates(GATConv):
    def edge_updater(self, *args, **kwargs):
        return 2 * MessagePassing.edge_updater(self, *args, **kwargs)


@pytest.mark.parametrize("cls", [Propagates, Updates])
def test_a_subclass_with_message_passing_of_its_own(route, cls):
    layer, args = cls(F, 8).to(route.device), made("GATConv", route.device)[1]
    expected = layer(*args)
    with route.on(on_fallback="native"):
        assert all(same(layer(*args), expected) for _ in range(3))
    assert gnnaccel.stats()[cls.__name__]["reasons"] == {"GA205": 3}


def test_another_function_of_the_hosts_is_not_the_layers_own(route, monkeypatch):
    layer, args = made("GATConv", route.device)
    monkeypatch.setattr(GATConv, "edge_update", GATv2Conv.edge_update)
    monkeypatch.setattr(inspect.getmodule(GATConv), "softmax", torch.nn.functional.softmax)
    with route.on(), pytest.raises(gnnaccel.errors.FallbackError,
                                   match="GA504 .*edge_update of GATConv"):
        layer(*args)
    monkeypatch.undo()
    monkeypatch.setattr(inspect.getmodule(GATConv), "softmax", torch.nn.functional.softmax)
    with route.on(), pytest.raises(gnnaccel.errors.FallbackError,
                                   match="GA504 .*softmax in torch_geometric.nn.conv.gat_conv"):
        layer(*args)


def test_methods_that_the_host_itself_bound_to_the_object(route):
    """Explaining binds ``propagate`` to the layer, and ending it binds the class's own."""
    layer, args = made("GATConv", route.device)
    layer.explain = True
    layer.explain = None
    assert "propagate" in vars(layer)
    expected = layer(*args)
    with route.on():
        assert close(layer(*args), expected)


# ---- layers whose propagate is taken over ----

class Summing(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("owner,name", [(SumAggregation, "forward"), (Aggregation, "reduce"),
                                        (MessagePassing, "aggregate"),
                                        (MessagePassing, "update"), (Summing, "message")], ids=str)
def test_what_propagate_calls(by_torch, replaced, owner, name, when):
    check(by_torch, replaced(owner, name), Summing().to(by_torch.device),
          made("GATConv", by_torch.device)[1], when)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_message_that_is_known_by_its_class(route, replaced, when):
    layer = GINEConv(torch.nn.Identity(), edge_dim=None).to(route.device)
    x, ei = made("GATConv", route.device)[1]
    check(route, replaced(GINEConv, "message"), layer,
          (x, ei, torch.randn(E, F, device=route.device)), when)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("name", ["gcn_norm", "scatter"])
def test_what_a_normalisation_is_made_with(by_torch, replaced, name, when):
    """GCN's is kept with the edges."""
    layer, args = made("GCNConv", by_torch.device)
    check(by_torch, replaced(inspect.getmodule(GCNConv), name), layer, args, when)


# ---- layers inside others ----

INSIDE = [(SAGEConv, "forward"), (SAGEConv, "message"), (Linear, "forward"),
          (Aggregation, "reduce"), (SAGEConv, "propagate")]


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("owner,name", INSIDE, ids=str)
def test_layers_of_hetero_conv(by_torch, replaced, owner, name, when):
    layer = hetero.hetero(SAGEConv, aggr="sum").to(by_torch.device)
    x, ei = hetero.on(by_torch.device, hetero.features(), hetero.edges())
    check(by_torch, replaced(owner, name), layer, (x, ei), when)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = SAGEConv(hetero.WIDTH, 8, aggr="sum")

    def forward(self, x, edge_index):
        return self.conv(x, edge_index).relu()


@pytest.mark.parametrize("owner,name", INSIDE, ids=str)
def test_layers_of_to_hetero(by_torch, replaced, owner, name):
    model = nn.to_hetero(Net(), hetero.METADATA).to(by_torch.device)
    x, ei = hetero.on(by_torch.device, hetero.features(), hetero.edges())
    check(by_torch, replaced(owner, name), model, (x, ei), "after")


def test_an_aggregation_of_a_layer_inside(by_torch, replaced):
    layer = hetero.hetero(SAGEConv, aggr="sum").to(by_torch.device)
    x, ei = hetero.on(by_torch.device, hetero.features(), hetero.edges())
    check(by_torch, replaced(next(iter(layer.convs.values())).aggr_module, "reduce"), layer,
          (x, ei), "after")


# ---- nothing replaced ----

@pytest.mark.parametrize("name", LAYERS)
def test_everything_is_the_hosts_own_where_nobody_replaced_anything(name):
    """Also while gnnaccel has put its own around it, and while maps are quantized."""
    assert path_of(getattr(nn, name)).why is None
    with gnnaccel.enabled():
        assert path_of(getattr(nn, name)).why is None
        model = torch.nn.Sequential(SAGEConv(4, 4), SAGEConv(4, 4))
        gnnaccel.quantize(model)
        assert guards.plain_linear(model[0].lin_l) and path_of(getattr(nn, name)).why is None


def test_all_aggregations_are_the_hosts_own():
    for name in nn.aggr.__all__:
        cls = getattr(nn.aggr, name)
        if isinstance(cls, type) and issubclass(cls, Aggregation):
            assert guards.aggregation_path(cls).why is None, name


def test_what_is_kept_of_a_graph_is_made_by_the_hosts_own():
    with gnnaccel.enabled():
        kept = [getattr(importlib.import_module(module), name)
                for module, names in graph_norm._LOOPS.items() for name in names]
        for function in (inspect.getmodule(GCNConv).gcn_norm, nn.ChebConv.__norm__, *kept):
            native = own.original(function)
            assert native is not function and own.Named(native).why() is None, function


def test_what_is_on_the_path_of_a_gat():
    path = path_of(GATConv)
    assert {"message", "edge_update", "propagate", "edge_updater"} <= path.names
    assert {"torch_geometric.utils._softmax.softmax", "torch_geometric.utils.loop.add_self_loops",
            "torch_geometric.nn.aggr.base.Aggregation.reduce"} <= path.functions.keys()
    assert adapter_of(GATConv(4, 4)).paths.of(GATConv) is not path and path.same()
    assert own.home(functools.wraps(GATConv.forward)(lambda self: None)) == "tests"
