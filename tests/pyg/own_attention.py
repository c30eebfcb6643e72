"""Attention as users write it: `MessagePassing` classes with a softmax in their message."""
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax


class Tutorial(MessagePassing):
    """GAT with the ends side by side."""

    def __init__(self, width, out, heads=2, dropout=0.0, slope=0.2):
        super().__init__(aggr="add", node_dim=0)
        self.heads, self.out, self.dropout, self.slope = heads, out, dropout, slope
        self.lin = nn.Linear(width, heads * out, bias=False)
        self.att = nn.Parameter(torch.randn(1, heads, 2 * out) * 0.5)

    def forward(self, x, edge_index):
        x = self.lin(x).view(-1, self.heads, self.out)
        return self.propagate(edge_index, x=x).view(-1, self.heads * self.out)

    def message(self, x_i, x_j, index, ptr, size_i):
        alpha = (torch.cat([x_i, x_j], dim=-1) * self.att).sum(dim=-1)
        alpha = F.leaky_relu(alpha, self.slope)
        alpha = softmax(alpha, index, ptr, size_i)
        alpha = F.dropout(alpha, p=self.dropout, training=self.training)
        return x_j * alpha.unsqueeze(-1)


class Scored(MessagePassing):
    """GAT of one head whose score is a linear map of both ends."""

    def __init__(self, width, out):
        super().__init__(aggr="add")
        self.lin, self.score = nn.Linear(width, out), nn.Linear(2 * out, 1)
        self.act, self.drop = nn.LeakyReLU(0.1), nn.Dropout(0.0)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_i, x_j, index, size_i):
        alpha = self.act(self.score(torch.cat((x_j, x_i), -1)))
        alpha = self.drop(softmax(alpha, index, num_nodes=size_i))
        return alpha * x_j


class Apart(MessagePassing):
    """GAT whose terms of both ends come from ``forward``, with features of edges; and an update."""

    def __init__(self, width, out, heads=3):
        super().__init__(aggr="sum", node_dim=0)
        self.heads, self.out = heads, out
        self.lin, self.edge = nn.Linear(width, heads * out), nn.Linear(3, heads)
        self.src = nn.Parameter(torch.randn(heads, out))
        self.dst = nn.Parameter(torch.randn(heads, out))
        self.bias = nn.Parameter(torch.randn(heads * out))

    def forward(self, x, edge_index, edge_attr):
        x = self.lin(x).view(-1, self.heads, self.out)
        alpha = (x * self.src).sum(-1), (x * self.dst).sum(-1)
        return self.propagate(edge_index, x=x, alpha=alpha, edge_attr=edge_attr)

    def message(self, x_j, alpha_j, alpha_i, edge_attr, index, ptr, size_i):
        alpha = alpha_j + alpha_i + self.edge(edge_attr)
        alpha = softmax(F.leaky_relu(alpha, negative_slope=0.2), index, ptr, size_i)
        return (x_j * alpha.view(-1, self.heads, 1)).view(-1, self.heads * self.out)

    def update(self, inputs):
        return inputs + self.bias


class Summed(MessagePassing):
    """GATv2."""

    def __init__(self, width, out, heads=2):
        super().__init__(aggr="add", node_dim=0)
        self.heads, self.out = heads, out
        self.left, self.right = nn.Linear(width, heads * out), nn.Linear(width, heads * out)
        self.att = nn.Parameter(torch.randn(1, heads, out))

    def forward(self, x, edge_index):
        left = self.left(x).view(-1, self.heads, self.out)
        right = self.right(x).view(-1, self.heads, self.out)
        return self.propagate(edge_index, x=(left, right)).mean(dim=1)

    def message(self, x_i, x_j, index):
        alpha = (F.leaky_relu(x_i + x_j, 0.2) * self.att).sum(dim=-1)
        return x_j * softmax(alpha, index)[:, :, None]


class Inner(MessagePassing):
    """Inner products of queries and keys."""

    def __init__(self, width, out, heads=2):
        super().__init__(aggr="add", node_dim=0)
        self.heads, self.out = heads, out
        self.q, self.k, self.v = (nn.Linear(width, heads * out) for _ in range(3))

    def forward(self, x, edge_index):
        q, k, v = (m(x).view(-1, self.heads, self.out) for m in (self.q, self.k, self.v))
        return self.propagate(edge_index, q=q, k=k, v=v).flatten(1)

    def message(self, q_i, k_j, v_j, index, ptr, size_i):
        alpha = (q_i * k_j).sum(dim=-1) / math.sqrt(self.out)
        alpha = softmax(alpha, index, ptr, size_i)
        return v_j * alpha.view(-1, self.heads, 1)


class InnerOfEdges(Inner):
    """The same with rows of edges beside keys and values, as in TransformerConv."""

    def __init__(self, width, out, heads=2):
        super().__init__(width, out, heads)
        self.e = nn.Linear(3, heads * out)

    def forward(self, x, edge_index, edge_attr):
        q, k, v = (m(x).view(-1, self.heads, self.out) for m in (self.q, self.k, self.v))
        return self.propagate(edge_index, q=q, k=k, v=v, edge_attr=edge_attr).flatten(1)

    def message(self, q_i, k_j, v_j, edge_attr, index, ptr, size_i):
        edges = self.e(edge_attr).view(-1, self.heads, self.out)
        alpha = softmax((q_i * (k_j + edges)).sum(-1) / self.out ** 0.5, index, ptr, size_i)
        return (v_j + edges) * alpha.unsqueeze(-1)


class Linear(MessagePassing):
    """No leaky ReLU: the score is a sum of a linear map of each end."""

    def __init__(self, width, out):
        super().__init__(aggr="add")
        self.a, self.b = nn.Linear(width, 1), nn.Linear(width, 1)
        self.out = nn.Linear(width, out)

    def forward(self, x, edge_index):
        return self.out(self.propagate(edge_index, x=x))

    def message(self, x_i, x_j, index):
        return torch.mul(softmax(self.a(x_i) + torch.tanh(self.b(x_j)), index), x_j)
