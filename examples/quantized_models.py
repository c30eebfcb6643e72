"""GCN, SAGE, GAT and GIN of PyG: a linear map of the features, then three layers of the graph."""
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
    """``features`` F -> 64 -> three layers -> classes. GIN's sums grow with the degree: its layers
    have their rows normalised, and a linear map reads the classes out."""

    def __init__(self, kind: str, features: int, classes: int):
        super().__init__()
        self.kind, gin = kind, kind == "gin"
        self.weight = nn.Parameter(torch.empty(features, WIDTH))
        nn.init.xavier_uniform_(self.weight)
        self.first = nn.BatchNorm1d(WIDTH)  # features as they come are alike in all rows
        sizes = [(WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH if gin else classes)]
        self.convs = nn.ModuleList(_layer(kind, into, out, last=i == 2)
                                   for i, (into, out) in enumerate(sizes))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) if gin else nn.Identity()
                                   for _ in range(3 if gin else 2))
        self.out = nn.Linear(WIDTH, classes) if gin else nn.Identity()

    def forward(self, x: Tensor | tuple[Tensor, Tensor], edge_index: Tensor) -> Tensor:
        h = F.relu(self.first(x @ self.weight
                              if isinstance(x, Tensor) else _Product.apply(*x, self.weight)))
        for i, conv in enumerate(self.convs):
            h = conv(F.dropout(h, DROPOUT, self.training), edge_index)
            if i < len(self.norms):
                h = F.relu(self.norms[i](h))
        return self.out(h)


def _layer(kind: str, into: int, out: int, last: bool) -> nn.Module:
    if kind == "gcn":
        return GCNConv(into, out)
    if kind == "sage":
        return SAGEConv(into, out)
    if kind == "gat":
        return GATConv(into, out, heads=1) if last else GATConv(into, out // HEADS, heads=HEADS)
    return GINConv(nn.Linear(into, out))
