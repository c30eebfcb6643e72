"""Layers as users write them, with stock messages."""
from __future__ import annotations

import torch
from torch_geometric.nn import MessagePassing

from tests.pyg.graphs import F

POSITIONS = ("x", "edge_index", "weight")


class Copying(MessagePassing):
    def forward(self, x, edge_index, size=None):
        return self.propagate(edge_index, x=x, size=size)

    def message(self, x_j):
        return x_j


class Inherited(MessagePassing):
    """With the message of MessagePassing itself."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)


class Weighing(MessagePassing):
    def forward(self, x, edge_index, weight=None, size=None):
        return self.propagate(edge_index, x=x, edge_weight=weight, size=size)

    def message(self, x_j, edge_weight):
        return x_j if edge_weight is None else edge_weight.view(-1, 1) * x_j


class Heads(MessagePassing):
    def __init__(self, **options):
        super().__init__(**{"node_dim": 0, **options})

    def forward(self, x, edge_index, weight):
        return self.propagate(edge_index, x=x, alpha=weight)

    def message(self, x_j, alpha):
        return alpha.unsqueeze(-1) * x_j


class Gating(MessagePassing):
    def forward(self, x, edge_index, weight):
        return self.propagate(edge_index, x=x, gate=weight)

    def message(self, x_j, gate):
        return x_j * gate.sigmoid()


class Differing(MessagePassing):
    def forward(self, x, edge_index, weight=None):
        return self.propagate(edge_index, g=2 * x, h=x, edge_weight=weight)

    def message(self, g_i, h_j, edge_weight):
        out = g_i - h_j
        return out if edge_weight is None else edge_weight.unsqueeze(-1) * out


class Rectifying(MessagePassing):
    def forward(self, x, edge_index, weight):
        return self.propagate(edge_index, x=x, e=weight)

    def message(self, x_j, e):
        return torch.relu(e + x_j) + 1e-3


class GatingBoth(MessagePassing):
    """With values of their own, and the edge in the gate."""

    def __init__(self, **options):
        super().__init__(**options)
        self.lin = torch.nn.Linear(F, 3 * F)

    def forward(self, x, edge_index, weight=None):
        k, q, v = self.lin(x).chunk(3, -1)
        return self.propagate(edge_index, k=k, q=q, v=v, e=weight)

    def message(self, k_i, q_j, v_j, e):
        score = k_i + q_j if e is None else k_i + q_j + e
        return score.sigmoid() * v_j


class Updating(MessagePassing):
    def __init__(self):
        super().__init__("mean")
        self.lin = torch.nn.Linear(F, 4)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, own=x)

    def update(self, aggregated, own):
        return self.lin(aggregated) + own[:, :4]


def hooked(layer):
    layer.register_message_forward_hook(lambda module, args, out: out * 2)
    return layer
