"""GCN, SAGE, GAT and GIN of PyG as they come: a linear map of the features, then three layers of the graph."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv

WIDTH, HEADS, DROPOUT = 64, 4, 0.5
NAMES = ("gcn", "sage", "gat", "gin")


class _Product(torch.autograd.Function):
    """``x @ weight`` of a sparse x, whose transpose is at hand for backward."""

    @staticmethod
    def forward(ctx, x, transposed, weight):
        ctx.transposed = transposed
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        return None, None, ctx.transposed @ grad


class Net(nn.Module):
    """``features`` F -> 64 -> three layers -> classes."""

    def __init__(self, kind: str, features: int, classes: int):
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.empty(features, WIDTH))
        nn.init.xavier_uniform_(self.weight)
        sizes = [(WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH, classes)]
        self.convs = nn.ModuleList(_layer(kind, into, out, last=i == 2) for i, (into, out) in enumerate(sizes))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) if kind == "gin" else nn.Identity() for _ in sizes[:-1])

    def forward(self, x: tuple[Tensor, Tensor], edge_index: Tensor) -> Tensor:
        words = F.dropout(torch.ones_like(self.weight[:, :1]), DROPOUT, self.training)  # features that all nodes do without
        h = F.relu(_Product.apply(*x, self.weight * words))
        for i, conv in enumerate(self.convs):
            h = conv(F.dropout(h, DROPOUT, self.training), edge_index)
            if i < len(self.norms):
                h = F.relu(self.norms[i](h))
        return h


def _layer(kind: str, into: int, out: int, last: bool) -> nn.Module:
    if kind == "gcn":
        return GCNConv(into, out)
    if kind == "sage":
        return SAGEConv(into, out)
    if kind == "gat":
        return GATConv(into, out, heads=1) if last else GATConv(into, out // HEADS, heads=HEADS)
    return GINConv(nn.Linear(into, out))
