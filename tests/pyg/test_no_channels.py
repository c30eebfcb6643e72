"""Features and results without channels: the host computes empty rows, or the bias alone."""
from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as pyg

import gnnaccel
from tests.pyg import graphs
from tests.pyg.graphs import N
from tests.pyg.judge import native_again

TYPES = [("a", "to", "b"), ("b", "to", "a")]


class One(torch.nn.Module):
    def __init__(self, width: int, out: int):
        super().__init__()
        self.conv = pyg.SAGEConv(width, out)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


def in_all(width: int, out: int) -> torch.nn.Module:
    return pyg.HeteroConv({t: pyg.GraphConv((width, width), out) for t in TYPES})


def rewritten(width: int, out: int) -> torch.nn.Module:
    return pyg.to_hetero(One(width, out), (["a", "b"], TYPES))


LAYERS = {  # name -> the layer, its channels in and out, what it takes
    "AGNNConv": (lambda width, out: pyg.AGNNConv(), 0, 0, "edges"),
    # PyG leaves biases of maps from no channels as memory was
    "TransformerConv": (lambda *sizes: pyg.TransformerConv(*sizes, bias=False), 0, 4, "edges"),
    "RGCNConv": (lambda *sizes: pyg.RGCNConv(*sizes, 3), 4, 0, "relations"),
    "RGCNConv of nothing": (lambda *sizes: pyg.RGCNConv(*sizes, 3), 0, 4, "relations"),
    "FastRGCNConv": (lambda *sizes: pyg.FastRGCNConv(*sizes, 3), 4, 0, "relations"),
    "HeteroConv": (in_all, 4, 0, "types"),
    "to_hetero": (rewritten, 4, 0, "types"),
    "HeteroDictLinear": (lambda *sizes: pyg.HeteroDictLinear(*sizes, types=["a", "b"]), 4, 0,
                         "rows"),
    "GATConv": (pyg.GATConv, 4, 0, "edges"),
    "GATv2Conv": (pyg.GATv2Conv, 4, 0, "edges"),
    "SuperGATConv": (pyg.SuperGATConv, 4, 0, "edges"),
}


def arguments(width: int, takes: str, device: torch.device) -> tuple:
    x, edges = torch.randn(N, width, device=device), graphs.square().to(device)
    if takes in ("types", "rows"):
        given = {"a": x, "b": x + 1}, dict.fromkeys(TYPES, edges)
        return given if takes == "types" else given[:1]
    return (x, edges) if takes == "edges" else (x, edges, torch.arange(edges.shape[1],
                                                                       device=device) % 3)


def rows(found: torch.Tensor | dict) -> list[torch.Tensor]:
    return list(found.values()) if type(found) is dict else [found]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", LAYERS)
def test_no_channels_are_the_hosts_own(route, name):
    make, width, out, takes = LAYERS[name]
    layer = make(width, out).to(route.device)
    inputs = arguments(width, takes, route.device)
    try:
        expected = layer(*inputs)
    except RuntimeError as problem:  # attention over results without channels
        with route.on(on_fallback="native"), pytest.raises(RuntimeError) as raised:
            layer(*inputs)
        assert str(raised.value) == str(problem)
        return
    for _ in range(2):
        gnnaccel.reset_stats()
        with route.on(on_fallback="native"):
            got = layer(*inputs)
        assert all(map(native_again, rows(got), rows(expected)))
