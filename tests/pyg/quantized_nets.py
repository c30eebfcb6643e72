"""Small models to quantize, and a step of training that tells everything."""
from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv

import gnnaccel

N, E, F, H = 30, 240, 16, 24
KINDS = {"gcn": lambda i, o: GCNConv(i, o), "sage": lambda i, o: SAGEConv(i, o), "gat": lambda i,
         o: GATConv(i, o // 4, heads=4), "gin": lambda i,
         o: GINConv(torch.nn.Sequential(torch.nn.Linear(i, o), torch.nn.Tanh()))}


class Net(torch.nn.Module):
    def __init__(self, kind="gcn", depth=3):
        super().__init__()
        self.convs = torch.nn.ModuleList(KINDS[kind](F if i == 0 else H, H) for i in range(depth))
        self.head = torch.nn.Linear(H, 5)

    def forward(self, x, edge_index):
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
        return self.head(x)


@pytest.fixture
def graph():
    torch.manual_seed(0)
    ei = torch.randint(0, N, (2, E))
    ei[1, :60] = 3
    return torch.randn(N, F), ei


def forced(**options):
    """Quantizes on the CPU, by torch operations."""
    return gnnaccel.enabled(**{"backend": "torch", "when": "supported", "on_fallback": "raise",
                               **options})


def quantized_calls(model):
    return [row.quantized for row in gnnaccel.quant_report(model).rows]


def step(model, x, ei):
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = model(x, ei)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    (out * weight).sum().backward()
    return {"out": out.detach(), "x": x.grad,
            **{name: p.grad.clone() for name, p in model.named_parameters()}}
