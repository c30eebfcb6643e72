"""Users may replace functions of DGL's, and of torch's modules inside: the replacement runs."""
from __future__ import annotations

import functools
import inspect

import dgl
import pytest
import torch
from dgl.nn import pytorch as nn

import gnnaccel
from gnnaccel.adapters.dgl import LAYERS, path_of
from tests.dgl import graphs
from tests.dgl.graphs import F
from tests.dgl.judge import close

WHEN = ["before", "between", "after"]


def doubled(native):
    @functools.wraps(native)
    def replaced(*args, **kwargs):
        out = native(*args, **kwargs)
        return (2 * out if isinstance(out, torch.Tensor)
                else {k: 2 * v for k, v in out.items()} if type(out) is dict else out)

    return replaced


def made(name):
    """A layer of this class, and what it is called on."""
    g, x = graphs.square(), graphs.features()
    if name == "GATConv":
        return nn.GATConv(F, 8, 2), (g, x)
    if name == "RelGraphConv":
        return nn.RelGraphConv(F, 8, 3), (g, x, torch.randint(0, 3, (g.num_edges(),)))
    if name == "TypedLinear":
        return nn.TypedLinear(F, 8, 3), (x, torch.randint(0, 3, (x.shape[0],)))
    names = [("a", "r", "b"), ("b", "s", "a"), ("a", "t", "a")]
    g = dgl.heterograph({name: (torch.randint(0, 9, (30,)), torch.randint(0, 9, (30,)))
                         for name in names}, num_nodes_dict={"a": 9, "b": 9})
    layer = nn.HeteroGraphConv({name[1]: nn.SAGEConv(F, 8, "mean") for name in names})
    return layer, (g, {"a": torch.randn(9, F), "b": torch.randn(9, F)})


def same(got, expected, tolerance=1e-5):
    if isinstance(expected, dict):
        return all(same(got[k], t, tolerance) for k, t in expected.items())
    return float((got - expected).norm() / expected.norm()) <= tolerance


CASES = [("GATConv", nn.GATConv, "forward"),
         ("GATConv", inspect.getmodule(nn.GATConv), "edge_softmax"),
         ("GATConv", torch.nn.LeakyReLU, "forward"), ("GATConv", torch.nn.Linear, "forward"),
         ("RelGraphConv", nn.TypedLinear, "forward"),
         ("RelGraphConv", nn.TypedLinear, "get_weight"),
         ("TypedLinear", nn.TypedLinear, "get_weight"), ("HeteroGraphConv", nn.SAGEConv, "forward"),
         ("HeteroGraphConv", nn.HeteroGraphConv, "forward"),
         ("HeteroGraphConv", torch.nn.Linear, "forward")]


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("layer,owner,name", CASES,
                         ids=[f"{layer}-{owner.__name__}.{name}" for layer, owner, name in CASES])
def test_replaced(by_torch, monkeypatch, layer, owner, name, when):
    made_, args = made(layer)
    with torch.no_grad():
        usual = made_(*args)
        if when != "before":
            with by_torch.on():
                for _ in range(2):
                    assert same(made_(*args), usual)
        if when != "after":
            monkeypatch.setattr(owner, name, doubled(getattr(owner, name)))
            expected = made_(*args)
        with by_torch.on(on_fallback="native"):
            if when == "after":
                made_(*args)
                monkeypatch.setattr(owner, name, doubled(getattr(owner, name)))
                with gnnaccel.disabled():
                    expected = made_(*args)
            got = [made_(*args) for _ in range(2)]
            if when == "after":
                monkeypatch.undo()
        monkeypatch.undo()
    assert not same(expected, usual, 1e-3), "what was replaced does not matter"
    assert all(same(out, expected) for out in got)
    with by_torch.on(), torch.no_grad():
        assert same(made_(*args), usual)


@pytest.mark.parametrize("name", ["update_all", "apply_edges"])
def test_what_layers_call_of_a_graph(by_torch, monkeypatch, name):
    layer, args = made("GATConv")
    seen, native = [], getattr(dgl.DGLGraph, name)
    monkeypatch.setattr(dgl.DGLGraph, name, lambda *a, **k: [seen.append(name), native(*a, **k)][1])
    expected = layer(*args)
    with by_torch.on(on_fallback="native"):
        assert close(layer(*args), expected)
    assert len(seen) == 2 and gnnaccel.stats()["GATConv"]["reasons"] == {"GA504": 1}


def test_a_message_of_a_subclass(by_torch):
    class Doubling(nn.RelGraphConv):
        def message(self, edges):
            return {"m": 2 * super().message(edges)["m"]}

    layer, args = Doubling(F, 8, 3), made("RelGraphConv")[1]
    expected = layer(*args)
    with by_torch.on(on_fallback="native"):
        assert close(layer(*args), expected)
    assert gnnaccel.stats()["Doubling"]["reasons"] == {"GA205": 1}


@pytest.mark.parametrize("name", LAYERS)
def test_everything_is_the_hosts_own_where_nobody_replaced_anything(name):
    assert path_of(getattr(nn, name)).why is None
    with gnnaccel.enabled():
        assert path_of(getattr(nn, name)).why is None
