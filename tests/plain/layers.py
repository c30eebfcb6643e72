"""Layers of graphs as people write them without a library: gathers, small networks, sums by an
index.

PYTEST_DONT_REWRITE: its assertions run as users write them.
"""
from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F


def segment_sum(values, ids, count):
    """Sums of rows by their ids, as E(n) networks have them."""
    shape = (count, values.size(1))
    total = values.new_full(shape, 0)
    places = ids.unsqueeze(-1).expand(-1, values.size(1))
    total.scatter_add_(0, places, values)
    return total


def segment_mean(values, ids, count):
    shape = (count, values.size(1))
    places = ids.unsqueeze(-1).expand(-1, values.size(1))
    total, number = values.new_full(shape, 0), values.new_full(shape, 0)
    total.scatter_add_(0, places, values)
    number.scatter_add_(0, places, torch.ones_like(values))
    return total / number.clamp(min=1)


class Equivariant(nn.Module):
    """The layer of E(n) equivariant networks: messages of features and distances, which move the
    coordinates too. It sums by the first end of the edges."""

    def __init__(self, width=8, hidden=8, of_edges=0, of_nodes=0, residual=True, attention=False,
                 normalize=False, mean=True, tanh=False, act=None):
        super().__init__()
        act = nn.SiLU() if act is None else act
        self.residual, self.attention, self.normalize = residual, attention, normalize
        self.mean, self.tanh, self.epsilon = mean, tanh, 1e-8
        self.edge_mlp = nn.Sequential(nn.Linear(2 * width + 1 + of_edges, hidden), act,
                                      nn.Linear(hidden, hidden), act)
        self.node_mlp = nn.Sequential(nn.Linear(hidden + width + of_nodes, hidden), act,
                                      nn.Linear(hidden, width))
        last = nn.Linear(hidden, 1, bias=False)
        nn.init.xavier_uniform_(last.weight, gain=0.5)
        parts = [nn.Linear(hidden, hidden), act, last]
        if tanh:
            parts.append(nn.Tanh())
        self.coord_mlp = nn.Sequential(*parts)
        if attention:
            self.att_mlp = nn.Sequential(nn.Linear(hidden, 1), nn.Sigmoid())

    def messages(self, source, target, radial, edge_attr):
        if edge_attr is None:
            joined = torch.cat([source, target, radial], dim=1)
        else:
            joined = torch.cat([source, target, radial, edge_attr], dim=1)
        out = self.edge_mlp(joined)
        if self.attention:
            gate = self.att_mlp(out)
            out = out * gate
        return out

    def moved(self, coord, edge_index, difference, messages):
        row, col = edge_index
        steps = difference * self.coord_mlp(messages)
        if self.mean:
            total = segment_mean(steps, row, coord.size(0))
        else:
            total = segment_sum(steps, row, coord.size(0))
        return coord + total

    def updated(self, x, edge_index, messages, node_attr):
        row, col = edge_index
        total = segment_sum(messages, row, count=x.size(0))
        if node_attr is not None:
            total = torch.cat([x, total, node_attr], dim=1)
        else:
            total = torch.cat([x, total], dim=1)
        out = self.node_mlp(total)
        if self.residual:
            out = x + out
        return out, total

    def distances(self, edge_index, coord):
        row, col = edge_index
        difference = coord[row] - coord[col]
        radial = torch.sum(difference**2, 1).unsqueeze(1)
        if self.normalize:
            norm = torch.sqrt(radial).detach() + self.epsilon
            difference = difference / norm
        return radial, difference

    def forward(self, h, edge_index, coord, edge_attr=None, node_attr=None):
        row, col = edge_index
        radial, difference = self.distances(edge_index, coord)
        messages = self.messages(h[row], h[col], radial, edge_attr)
        coord = self.moved(coord, edge_index, difference, messages)
        h, total = self.updated(h, edge_index, messages, node_attr)
        return h, coord, edge_attr


def network(of, hidden, out):
    return nn.Sequential(nn.Linear(of, hidden), nn.ReLU(), nn.Linear(hidden, out),
                         nn.LayerNorm(out))


class MeshBlock(nn.Module):
    """A processor block of mesh networks: new latents of edges, summed at the receivers."""

    def __init__(self, width=8):
        super().__init__()
        self.edge_net, self.node_net = network(3 * width, width, width), network(2 * width, width,
                                                                                  width)

    def forward(self, x, edge_attr, senders, receivers):
        joined = torch.cat([x[senders], x[receivers], edge_attr], dim=-1)
        new = self.edge_net(joined)
        index = receivers.unsqueeze(-1).expand_as(new)
        total = torch.zeros(x.shape[0], new.shape[1], dtype=x.dtype,
                            device=x.device).scatter_add_(0, index, new)
        x = x + self.node_net(torch.cat([x, total], dim=-1))
        return x, edge_attr + new


class WeightedSum(nn.Module):
    """A graph convolution by hand."""

    def __init__(self, width=8, out=8):
        super().__init__()
        self.lin = nn.Linear(width, out)

    def forward(self, x, edge_index, w):
        src, dst = edge_index[0], edge_index[1]
        x = self.lin(x)
        out = torch.zeros_like(x)
        out.index_add_(0, dst, x[src] * w[:, None])
        return out


class Attention(nn.Module):
    """Graph attention by hand, its softmax too; ``stable``: less the maximum of each node."""

    def __init__(self, width=8, heads=2, channels=4, stable=True):
        super().__init__()
        self.heads, self.channels, self.stable = heads, channels, stable
        self.lin = nn.Linear(width, heads * channels, bias=False)
        self.att_src = nn.Parameter(torch.randn(1, heads, channels))
        self.att_dst = nn.Parameter(torch.randn(1, heads, channels))

    def forward(self, x, edge_index):
        src, dst = edge_index
        count = x.size(0)
        h = self.lin(x).view(-1, self.heads, self.channels)
        left, right = (h * self.att_src).sum(dim=-1), (h * self.att_dst).sum(dim=-1)
        scores = F.leaky_relu(left[src] + right[dst], 0.2)
        if self.stable:
            index = dst.unsqueeze(-1).expand_as(scores)
            most = torch.zeros(count, self.heads, device=x.device, dtype=h.dtype).scatter_reduce(
                0, index, scores, reduce="amax", include_self=False)
            scores = scores - most[dst]
        scores = torch.exp(scores)
        total = torch.zeros(count, self.heads, device=x.device, dtype=h.dtype).index_add_(0, dst, scores)
        weights = scores / (total[dst] + 1e-16)
        out = torch.zeros(count, self.heads, self.channels, device=x.device, dtype=h.dtype)
        out = out.index_add(0, dst, h[src] * weights.unsqueeze(-1))
        return out.reshape(-1, self.heads * self.channels)


class ContinuousFilter(nn.Module):
    """The convolution with filters made of distances, as in networks for molecules."""

    def __init__(self, width=8, basis=6, filters=8, cutoff=4.0):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(width, filters, bias=False), nn.Linear(filters, width)
        self.filter = nn.Sequential(nn.Linear(basis, filters), nn.Softplus(),
                                    nn.Linear(filters, filters))
        self.cutoff = cutoff

    def forward(self, x, edge_index, edge_weight, edge_attr):
        inside = 0.5 * (torch.cos(edge_weight * math.pi / self.cutoff) + 1.0)
        filters = self.filter(edge_attr) * inside.view(-1, 1)
        x = self.lin1(x)
        row, col = edge_index
        out = x.new_zeros(x.size(0), filters.size(1)).index_add(0, col, x.index_select(0, row)
                                                                * filters)
        return self.lin2(out)


class Normed(nn.Module):
    """Messages of nodes that a norm has statistics of."""

    def __init__(self, width=8):
        super().__init__()
        self.lin, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x, edge_index):
        src, dst = edge_index
        x = self.norm(self.lin(x))
        return torch.zeros_like(x).index_add(0, dst, torch.tanh(x[src] - x[dst]))


def asserting(self, x, edge_index, batch):
    """A forward that looks at shapes first; here, as pytest rewrites what tests assert."""
    assert x.size(0) == batch.size(0) and len(x) > 0, f"{x.shape} and {batch.shape}"
    if x.size(0) == 0:
        raise ValueError("no nodes")
    return self.summed(x, edge_index)
