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
