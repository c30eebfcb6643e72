"""Layers and models drawn at random, over graphs, sizes and limits drawn at random, in fp64."""
from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gnnaccel
from gnnaccel.dispatch.offload import rowwise
from tests.offload.checks import difference

WIDTH = 6
PLAIN, WEIGHT, ATTR, KIND = (), ("weight",), ("attr",), ("kind",)
#: by name: (the layer, of torch_geometric.nn; what of edges it is given)
LAYERS = {
    "SAGEConv": (lambda pyg: pyg.SAGEConv(WIDTH, 8), PLAIN),
    "SAGEConv, max": (lambda pyg: pyg.SAGEConv(WIDTH, 8, "max"), PLAIN),
    "GCNConv": (lambda pyg: pyg.GCNConv(WIDTH, 8), PLAIN),
    "GCNConv, weights": (lambda pyg: pyg.GCNConv(WIDTH, 8), WEIGHT),
    "GATConv": (lambda pyg: pyg.GATConv(WIDTH, 4, 2), PLAIN),
    "GATv2Conv": (lambda pyg: pyg.GATv2Conv(WIDTH, 4, 2, edge_dim=3), ATTR),
    "TransformerConv": (lambda pyg: pyg.TransformerConv(WIDTH, 4, 2, edge_dim=3), ATTR),
    "RGCNConv": (lambda pyg: pyg.RGCNConv(WIDTH, 8, 3), KIND),
    "PNAConv": (lambda pyg: pyg.PNAConv(WIDTH, 8, ["mean", "max", "std"],
                                        ["identity", "amplification"],
                                        torch.ones(50, dtype=torch.long)), PLAIN),
    "NNConv": (lambda pyg: pyg.NNConv(WIDTH, 8, nn.Sequential(nn.Linear(3, 8 * WIDTH))), ATTR),
    "APPNP": (lambda pyg: pyg.APPNP(2, 0.1), WEIGHT),
    "ChebConv": (lambda pyg: pyg.ChebConv(WIDTH, 8, 2), PLAIN),
    "GINConv, batch norm": (lambda pyg: pyg.GINConv(nn.Sequential(
        nn.Linear(WIDTH, 8), nn.BatchNorm1d(8))), PLAIN),
}
#: between layers of a model
BETWEEN = {
    "relu": lambda x: x.relu(), "gelu": F.gelu, "softmax": lambda x: F.softmax(x, dim=-1) * 8,
    "add": lambda x: x + 1 - x * x.sigmoid(), "rows": lambda x: x * x.sum(-1, keepdim=True).tanh(),
    "normalize": lambda x: F.normalize(x, dim=-1), "mean": lambda x: x - x.mean(0),
    "where": lambda x: torch.where(x > 0, x, x * 0.1), "transposed": lambda x: (x.t() * 2).t(),
    "stack": lambda x: torch.stack([x, -x], 1).amax(1) + x,
}


@pytest.fixture(autouse=True)
def in_double(monkeypatch):
    torch.set_default_dtype(torch.float64)
    monkeypatch.setattr(rowwise, "_SMALL", 0)
    yield
    torch.set_default_dtype(torch.float32)


def judged(run, limit):
    """Holds a run in bands against the same without."""
    right = run()
    with gnnaccel.offload(limit, device="cpu"):
        found = run()
    for got, truth in zip(found, right, strict=True):
        if got is None or truth is None:  # over no edges, say: the one may be zeros
            assert all(t is None or not t.any() for t in (got, truth))
        else:
            assert difference(got, truth) < 1e-10


def results(module, out, *leaves):
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return [out.detach(), *(t.grad for t in leaves), *(p.grad for p in module.parameters()),
            *(b.double() for b in module.buffers())]


@pytest.mark.parametrize("seed", range(40))
def test_layers(seed):
    from torch_geometric import nn as pyg

    draw = random.Random(seed)
    make, given = LAYERS[draw.choice(sorted(LAYERS))]
    nodes = draw.choice([2, 5, 17, 60, 200])
    edges, last = draw.choice([0, 1, 91, 601, 2001]), draw.choice([nodes, 1 + nodes // 5])
    limit = draw.choice([300, 2000, 20_000, 200_000, 10**7])

    def run():
        torch.manual_seed(seed)
        layer, x = make(pyg), torch.randn(nodes, WIDTH, requires_grad=True)
        edge_index = torch.stack([torch.randint(0, nodes, (edges,)),
                                  torch.randint(0, last, (edges,))])
        rest = {"weight": torch.rand(edges, requires_grad=True),
                "kind": torch.randint(0, 3, (edges,)),
                "attr": torch.randn(edges, 3, requires_grad=True)}
        rest = [rest[name] for name in given]
        return results(layer, layer(x, edge_index, *rest), x, *(t for t in rest if t.requires_grad))

    judged(run, limit)


@pytest.mark.parametrize("seed", range(40))
def test_models(seed, monkeypatch):
    from torch_geometric import nn as pyg

    draw = random.Random(seed)
    monkeypatch.setattr(rowwise, "_BAND", draw.choice([100, 1000, 10_000]))
    steps = [draw.choice([*BETWEEN, "linear", "cat", "batch norm", "layer norm", "GCN", "SAGE"])
             for _ in range(draw.randint(3, 9))]
    nodes, edges = draw.choice([3, 17, 80]), draw.choice([5, 201])
    made = {"linear": lambda: nn.Linear(8, 8), "cat": lambda: nn.Linear(16, 8),
            "batch norm": lambda: nn.BatchNorm1d(8), "layer norm": lambda: nn.LayerNorm(8),
            "GCN": lambda: pyg.GCNConv(8, 8), "SAGE": lambda: pyg.SAGEConv(8, 8)}

    def run():
        torch.manual_seed(seed)
        modules = nn.ModuleList(made.get(step, nn.Identity)() for step in steps)
        x = leaf = torch.randn(nodes, 8, requires_grad=True)
        edge_index = torch.randint(0, nodes, (2, edges))
        for step, module in zip(steps, modules):
            x = (BETWEEN[step](x) if step in BETWEEN else
                 module(torch.cat([x, x / 2], -1)) if step == "cat" else
                 module(x, edge_index) if step in ("GCN", "SAGE") else module(x))
        return results(modules, x, leaf)

    judged(run, draw.choice([3000, 10**6]))
