"""Layers and steps for the tests of compiled models."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch_geometric import nn

import gnnaccel
from tests.pyg import graphs
from tests.pyg.graphs import EDGE, F
from tests.routes import opened


@pytest.fixture(params=["torch", pytest.param("emulated", marks=pytest.mark.long),
                        pytest.param("cuda", marks=pytest.mark.gpu)])
def route(request):
    """As of all tests of PyG's; compiling takes seconds."""
    with opened(request.param) as found:
        yield found


#: label -> (layer, arguments after x and the edges)
CASES: dict[str, Callable] = {
    "GATConv": lambda: (nn.GATConv(F, 8, 2), ()),
    "GATConv without loops": lambda: (nn.GATConv(F, 8, 2, add_self_loops=False), ()),
    "GATConv averaged": lambda: (nn.GATConv(F, 8, 2, concat=False, bias=False), ()),
    "GATConv with edges": lambda: (nn.GATConv(F, 8, 2, edge_dim=EDGE, fill_value=0.5),
                                   (graphs.edge_features(),)),
    "GATConv residual": lambda: (nn.GATConv(F, 8, 2, residual=True), ()),
    "GATv2Conv": lambda: (nn.GATv2Conv(F, 8, 2), ()),
    "GATv2Conv shared": lambda: (nn.GATv2Conv(F, 8, 2, share_weights=True, edge_dim=EDGE),
                                 (graphs.edge_features(),)),
    "TransformerConv": lambda: (nn.TransformerConv(F, 8, 2), ()),
    "TransformerConv beta": lambda: (nn.TransformerConv(F, 8, 2, concat=False, beta=True,
                                                        edge_dim=EDGE), (graphs.edge_features(),)),
    "GCNConv": lambda: (nn.GCNConv(F, 8), ()),
    "GCNConv weighted": lambda: (nn.GCNConv(F, 8, improved=True, bias=False),
                                 (graphs.edge_features(width=None).abs(),)),
    "GCNConv plain": lambda: (nn.GCNConv(F, 8, normalize=False), ()),
    "SAGEConv": lambda: (nn.SAGEConv(F, 8), ()),
    "SAGEConv max": lambda: (nn.SAGEConv(F, 8, "max", normalize=True, project=True,
                                         root_weight=False), ()),
    "GINConv": lambda: (nn.GINConv(torch.nn.Linear(F, 8)), ()),
    "GINConv trained": lambda: (nn.GINConv(torch.nn.Sequential(
        torch.nn.Linear(F, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)), train_eps=True), ()),
}

def _typed(name: str, **options):
    types = torch.randint(0, 3, (graphs.E,))
    return lambda: (getattr(nn, name)(F, 8, 3, **options), (types,))


CASES |= {
    "RGCNConv": _typed("RGCNConv"), "RGCNConv bases": _typed("RGCNConv", num_bases=2, aggr="add"),
    "RGCNConv blocks": _typed("RGCNConv", num_blocks=2, root_weight=False, bias=False),
    "FastRGCNConv fast": _typed("FastRGCNConv"),
}


def reset() -> None:
    """Nothing compiled, nothing counted."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gnnaccel.reset_stats()


def compiles() -> int:
    """Graphs compiled since `reset`."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def on(route, **options) -> None:
    gnnaccel.enable(**{"backend": route.backend, "when": "supported", "compile": True, **options})
    reset()


def step(model, *inputs, seed=3):
    """(result, gradients of the first input and of the parameters) of a step that is random by
    ``seed``."""
    x = inputs[0].detach().clone().requires_grad_()
    torch.manual_seed(seed)
    out = model(x, *inputs[1:])
    known = (x, *model.parameters())
    return out.detach(), torch.autograd.grad(out.square().sum(), known)


def same(got, expected) -> None:
    """Two results of `step` are equal but for rounding; some gradients are zero but for that."""
    for a, b in zip((got[0], *got[1]), (expected[0], *expected[1])):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=5e-5)


class Net(torch.nn.Module):
    """Three layers with torch's operations around."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.first = nn.GATConv(F, 8, 2, dropout=dropout)
        self.norm = torch.nn.LayerNorm(16)
        self.second, self.last = nn.GCNConv(16, 8), nn.SAGEConv(8, 4)

    def forward(self, x, edge_index):
        x = (x * 1.5).sin()
        x = self.norm(self.first(x, edge_index)).relu() + 1
        x = self.second(x, edge_index).relu()
        return self.last(x, edge_index).log_softmax(-1)
