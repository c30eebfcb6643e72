"""GAT as users write it, over rows [nodes, heads, channels]: the forms whose repetitions are bound."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

H, C = 2, 8


class Beside(MessagePassing):
    """Both ends' rows side by side."""

    shape, p = (1, H, 2 * C), 0.0

    def __init__(self, heads=H, width=C):
        super().__init__(aggr="add", node_dim=0)
        self.h, self.c = heads, width
        shape = [{H: heads, C: width, 2 * C: 2 * width}.get(n, n) for n in self.shape]
        self.att = nn.Parameter(torch.randn(shape))

    def forward(self, x, edge_index, e=None):
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_i, x_j, index, ptr, size_i):
        alpha = (torch.cat([x_i, x_j], dim=-1) * self.att).sum(-1)
        alpha = softmax(F.leaky_relu(alpha, 0.2), index, ptr, size_i)
        return x_j * F.dropout(alpha, self.p, self.training).unsqueeze(-1)


class SourceFirst(Beside):
    def message(self, x_i, x_j, index, ptr, size_i):
        alpha = (torch.cat([x_j, x_i], dim=-1) * self.att).sum(-1)
        return x_j * softmax(F.leaky_relu(alpha, 0.2), index, ptr, size_i).unsqueeze(-1)


class Dropped(Beside):
    p = 0.4


class WithEdges(Beside):
    def message(self, x_i, x_j, e, index, ptr, size_i):
        alpha = (torch.cat([x_i, x_j], dim=-1) * self.att).sum(-1) + e
        alpha = softmax(F.leaky_relu(alpha, 0.2), index, ptr, size_i)
        return x_j * F.dropout(alpha, self.p, self.training).unsqueeze(-1)


class DroppedWithEdges(WithEdges):
    p = 0.4


class OfEdgesAndSources(Beside):
    """Without a term of the destinations."""

    shape = (1, H, C)

    def message(self, x_j, e, index, ptr, size_i):
        alpha = (x_j * self.att).sum(-1) + e
        return x_j * softmax(F.leaky_relu(alpha, 0.2), index, ptr, size_i).unsqueeze(-1)


class Apart(Beside):
    """A parameter for each end."""

    shape = (1, H, C)

    def __init__(self, *args):
        super().__init__(*args)
        self.dst = nn.Parameter(torch.randn_like(self.att))

    def message(self, x_i, x_j, index, ptr, size_i):
        alpha = (x_j * self.att).sum(-1) + (x_i * self.dst).sum(-1)
        return x_j * softmax(F.leaky_relu(alpha, 0.2), index, ptr, size_i).unsqueeze(-1)


class Shared(Beside):
    """One vector for both ends."""

    shape = (H, C)

    def message(self, x_i, x_j, index, ptr, size_i):
        alpha = (x_j * self.att).sum(-1) + (x_i * self.att).sum(-1)
        return x_j * softmax(F.leaky_relu(alpha, 0.2), index, ptr, size_i).unsqueeze(-1)


class ByMap(Beside):
    """A linear map in the place of a parameter."""

    def __init__(self, heads=H, width=C):
        super().__init__(heads, width)
        self.score = nn.Linear(2 * width, 1, bias=False)

    def message(self, x_i, x_j, index, ptr, size_i):
        alpha = self.score(torch.cat([x_i, x_j], dim=-1))
        return x_j * softmax(F.leaky_relu(alpha, 0.2), index, ptr, size_i)


class Paired(Beside):
    """With the same rows for each end, in a pair, and rows that are flat."""

    def forward(self, x, edge_index, e=None):
        x = x.flatten(1)
        return self.propagate(edge_index, x=(x, x))

    def message(self, x_i, x_j, index, ptr, size_i):
        x_i, x_j = x_i.view(-1, self.h, self.c), x_j.view(-1, self.h, self.c)
        alpha = (torch.cat([x_i, x_j], dim=-1) * self.att).sum(-1)
        return x_j * softmax(F.leaky_relu(alpha, 0.2), index, ptr, size_i).unsqueeze(-1)
