"""Layers whose maps have computed weights compute them as often as natively."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch_geometric import nn as pyg

import gnnaccel


class Counting(nn.Module):
    """Numbers how often it is asked, as spectral_norm's iterations in training do."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight * 2


CASES = {
    "GATConv": lambda: pyg.GATConv(6, 3, 2), "GATv2Conv": lambda: pyg.GATv2Conv(6, 3, 2),
    "TransformerConv": lambda: pyg.TransformerConv(6, 3, 2),
    "SuperGATConv": lambda: pyg.SuperGATConv(6, 6), "GCNConv": lambda: pyg.GCNConv(6, 6),
    "SAGEConv": lambda: pyg.SAGEConv(6, 6), "AGNNConv": lambda: pyg.AGNNConv(),
    "FiLMConv": lambda: pyg.FiLMConv(6, 6),
    "PNAConv": lambda: pyg.PNAConv(6, 6, ["mean", "max"], ["identity"], torch.tensor([1, 3, 5])),
}


def given() -> tuple:
    torch.manual_seed(2)
    return torch.randn(20, 6), torch.randint(0, 20, (2, 60))


def maps(layer) -> list:
    return [m for m in layer.modules() if isinstance(m, (nn.Linear, pyg.Linear))]


@pytest.mark.parametrize("name", CASES)
def test_a_weight_is_computed_once_a_call(name):
    layer, args = CASES[name](), given()
    counts = []
    for one in maps(layer):
        parametrize.register_parametrization(one, "weight", Counting())
        counts.append(one.parametrizations.weight[0])
    with gnnaccel.disabled():
        layer(*args)
    natively = [one.calls - 1 for one in counts]  # one at registration
    with gnnaccel.enabled(when="supported", backend="torch"):
        for number in range(3):
            before = [one.calls for one in counts]
            layer(*args)
            assert [one.calls - b for one, b in zip(counts, before)] == natively, number


@pytest.mark.parametrize("name,vector", [("GATConv", "att_src"), ("GATConv", "att_dst"),
                                         ("GATv2Conv", "att"), ("SuperGATConv", "att_l"),
                                         ("AGNNConv", "beta")])
def test_a_vector_is_computed_once_a_call(name, vector):
    layer = CASES[name]()
    parametrize.register_parametrization(layer, vector, Counting())
    count = layer.parametrizations[vector][0]
    for enabled in (gnnaccel.disabled(), gnnaccel.enabled(when="supported", backend="torch")):
        with enabled:
            for _ in range(3):
                before = count.calls
                layer.eval()(*given())
                assert count.calls == before + 1


KINDS, RELATIONS = ("a", "b"), (("a", "to", "b"), ("b", "of", "a"), ("b", "in", "b"))


def _between(make):
    return pyg.HeteroConv({one: make() for one in RELATIONS})


RELATIONAL = {
    "RGCNConv": lambda: pyg.RGCNConv(6, 4, 3, num_bases=2),
    "FastRGCNConv": lambda: pyg.FastRGCNConv(6, 4, 3),
    "RGATConv": lambda: pyg.RGATConv(6, 4, 3, heads=2, mod="f-additive", edge_dim=5),
    "HEATConv": lambda: pyg.HEATConv(6, 4, 2, 3, 4, 5, 4, heads=2),
    "HeteroLinear": lambda: pyg.HeteroLinear(6, 4, 3),
    "HGTConv": lambda: pyg.HGTConv(6, 8, (list(KINDS), list(RELATIONS)), heads=2),
    "HANConv": lambda: pyg.HANConv(6, 8, (list(KINDS), list(RELATIONS)), heads=2),
    "HeteroConv": lambda: _between(lambda: pyg.GATConv((6, 6), 4, add_self_loops=False)),
}


def given_types(name: str) -> tuple:
    torch.manual_seed(2)
    kinds, edges = torch.arange(60) % 3, torch.randint(0, 20, (2, 60))
    if name in ("HGTConv", "HANConv", "HeteroConv"):
        return {t: torch.randn(20, 6) for t in KINDS}, dict.fromkeys(RELATIONS, edges)
    if name == "HeteroLinear":
        return torch.randn(60, 6), kinds
    of_nodes = (torch.arange(20) % 2,) if name == "HEATConv" else ()
    of_edges = (torch.randn(60, 5),) if name in ("HEATConv", "RGATConv") else ()
    return torch.randn(20, 6), edges, *of_nodes, kinds, *of_edges


@pytest.mark.long
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", RELATIONAL)
def test_each_parameter_of_a_relational_layer_is_computed_as_often_as_natively(name, training):
    args = given_types(name)
    for parameter, _ in RELATIONAL[name]().named_parameters():
        layer, (part, _, own) = RELATIONAL[name](), parameter.rpartition(".")
        parametrize.register_parametrization(layer.get_submodule(part), own, count := Counting())
        counts = []
        for enabled in (gnnaccel.disabled(), gnnaccel.enabled(when="supported", backend="torch")):
            with enabled:
                for _ in range(3):
                    before = count.calls
                    layer.train(training)(*args)
                    counts.append(count.calls - before)
        assert len(set(counts)) == 1, (parameter, counts)


@pytest.mark.parametrize("make,route", [
    (parametrizations.weight_norm, "torch"), (parametrizations.spectral_norm, "native"),
    (lambda layer, name: parametrizations.spectral_norm(layer, name).eval(), "torch")],
    ids=["weight_norm", "spectral_norm", "spectral_norm in evaluation"])
def test_parametrizations_that_keep_nothing_leave_a_layer_to_kernels(make, route):
    layer, args = pyg.FastRGCNConv(6, 4, 3), given_types("FastRGCNConv")
    make(layer, "root")
    with gnnaccel.enabled(when="supported", backend="torch"):
        layer(*args)
        (entry,) = gnnaccel.stats().values()
    assert list(entry["routes"]) == [route]


def test_spectral_norm_in_training():
    layer, args = pyg.TransformerConv(6, 3, 2), given()
    for one in maps(layer):
        parametrizations.spectral_norm(one)
    twin = copy.deepcopy(layer)
    with gnnaccel.enabled(when="supported", backend="torch"):
        for _ in range(4):
            found = layer(*args)
    with gnnaccel.disabled():
        for _ in range(4):
            expected = twin(*args)
    assert torch.allclose(found, expected, atol=1e-5)
    for one, two in zip(layer.buffers(), twin.buffers()):
        assert torch.allclose(one, two, atol=1e-5)
