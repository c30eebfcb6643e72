"""The ways in which people gather rows of nodes and sum over edges."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gnnaccel
from tests.plain.held import same
from tests.plain.test_layers import EDGES, NODES, tensors


def index_select(self, x, edge_index, w):
    src, dst = edge_index.unbind(0)
    messages = torch.index_select(x, 0, src) * w.unsqueeze(1)
    return torch.index_add(torch.zeros_like(x), 0, dst, messages)


def gather(self, x, edge_index, w):
    src, dst = edge_index
    messages = torch.gather(x, 0, src.unsqueeze(-1).expand(-1, x.shape[1])) * w[:, None]
    out = torch.zeros(x.shape, device=x.device, dtype=x.dtype)
    return out.scatter_add(0, dst[:, None].expand(-1, x.size(1)), messages)


def scatter_add(self, x, edge_index, w):
    row, col = edge_index[0, :], edge_index[1, :]
    messages = F.relu(self.lin(torch.cat([x[row], x[col], w.view(-1, 1)], dim=-1)))
    out = x.new_zeros((x.size(0), messages.size(-1)))
    return out.scatter_add_(0, col.view(-1, 1).expand_as(messages), messages)


def by_keywords(self, x, edge_index, w):
    messages = x[edge_index[0]] * w[:, None]
    return x.new_zeros(x.size()).index_add_(dim=0, index=edge_index[1], source=messages)


def lengths(self, x, edge_index, w):
    _, width = x.shape
    messages = x[edge_index[0]].sigmoid()
    return torch.zeros(len(x), width).to(x).index_add(0, edge_index[1], messages)


def mean_by_degree(self, x, edge_index, w):
    src, dst = edge_index
    degree = torch.zeros(x.size(0)).index_add_(0, dst, torch.ones(edge_index.size(1)))
    total = torch.zeros_like(x).index_add_(0, dst, x[src] - x[dst])
    return total / degree.clamp(min=1).unsqueeze(-1)


def mean_by_ones(self, x, edge_index, w):
    src, dst = edge_index[0], edge_index[1]
    ones = torch.ones_like(dst, dtype=x.dtype, device=x.device)
    degree = torch.zeros(x.shape[0], dtype=x.dtype).index_add_(0, dst, ones).clamp_min(1)
    return torch.zeros_like(x).index_add_(0, dst, x[src] * w[:, None]) / degree[:, None]


def turned(self, x, edge_index, w):
    src, dst = edge_index.t()[:, 0], edge_index.T[..., 1]
    return torch.zeros_like(x).index_add_(0, dst, x[src] * w[:, None])


def mean_by_count(self, x, edge_index, w):
    src, dst = edge_index
    degree = torch.bincount(dst, minlength=x.size(0)).clamp(min=1)
    return torch.zeros_like(x).index_add_(0, dst, x[src].tanh()) / degree[:, None]


def normalised(self, x, edge_index, w):
    row, col = edge_index
    degree = torch.zeros(x.size(0), dtype=x.dtype, device=x.device)
    degree = degree.scatter_add_(0, col, w)
    scale = degree.pow(-0.5)
    scale = scale.masked_fill(scale == float("inf"), 0.0)
    weight = scale[row] * w * scale[col]
    return torch.zeros_like(x).index_add_(0, col, x[row] * weight[:, None])


def scatter_mean(self, x, edge_index, w):
    src, dst = edge_index
    index = dst.unsqueeze(-1).expand(-1, x.size(1))
    messages = x[src] * w.view(-1, 1)
    return x.new_zeros(x.size(0), x.size(1)).scatter_reduce_(0, index, messages, "mean",
                                                             include_self=False)


def scatter_max(self, x, edge_index, w):
    src, dst = edge_index
    messages = x[src] * w.view(-1, 1)
    index = dst.unsqueeze(-1).expand_as(messages)
    return torch.zeros_like(x).scatter_reduce(0, index, messages, reduce="amax",
                                              include_self=False)


def index_put(self, x, edge_index, w):
    src, dst = edge_index
    return torch.zeros_like(x).index_put_((dst,), x[src] * w[:, None], accumulate=True)


def to_both_ends(self, x, edge_index, w):
    src, dst = edge_index
    messages = torch.tanh(x[src] * x[dst] + w[:, None])
    out = torch.zeros_like(x).index_add_(0, dst, messages)
    return out + torch.zeros_like(x).index_add_(0, src, messages)


def by_pyg(self, x, edge_index, w):
    from torch_geometric.utils import scatter
    messages = self.gate(x[edge_index[0]]) * w[:, None]
    return scatter(messages, edge_index[1], dim=0, dim_size=x.size(0), reduce="sum")


def attention_of_pyg(self, x, edge_index, w):
    from torch_geometric.utils import degree, softmax
    src, dst = edge_index
    weights = softmax((x[src] * x[dst]).sum(-1) + w, dst, num_nodes=x.size(0))
    out = torch.zeros_like(x).index_add_(0, dst, x[src] * weights[:, None])
    return out * degree(dst, x.size(0)).unsqueeze(-1)


def by_torch_scatter(self, x, edge_index, w):
    from torch_scatter import scatter_add
    return scatter_add(x[edge_index[0]] * w[:, None], edge_index[1], dim=0, dim_size=len(x))


def by_number(self, x, edge_index, w, num_nodes=None):
    messages = x[edge_index[1]] * w[:, None]
    index = edge_index[0].unsqueeze(-1).repeat(1, x.shape[-1])
    count = len(x) if num_nodes is None else num_nodes
    return torch.zeros(count, x.shape[-1]).to(messages).scatter_add_(0, index, messages)


def with_dropout(self, x, edge_index, w):
    src, dst = edge_index
    messages = F.dropout(x[src] * w[:, None], 0.5, self.training)
    return self.norm(torch.zeros_like(x).index_add_(0, dst, messages) + x)


def several(self, x, edge_index, w):
    src, dst = edge_index
    difference = x[src] - x[dst]
    index = dst[:, None].expand_as(difference)
    total = torch.zeros_like(x).scatter_add_(0, index, difference)
    square = torch.zeros_like(x).scatter_add_(0, index, difference ** 2)
    return {"total": total, "deviation": (square - total ** 2).abs().add(1e-2).sqrt(),
            "edges": difference.norm(dim=-1)}


IDIOMS = [index_select, gather, scatter_add, by_keywords, lengths, mean_by_degree, mean_by_ones,
          turned, mean_by_count, normalised, scatter_mean, scatter_max, index_put, to_both_ends,
          by_pyg, attention_of_pyg, by_torch_scatter, by_number, with_dropout, several]


class Written(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.gate = nn.Linear(17, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.norm = nn.LayerNorm(8)


def written(forward):
    return type(forward.__name__.title(), (Written,), {"forward": forward})


@pytest.mark.parametrize("forward", IDIOMS)
def test_idioms(emulated, forward):
    if forward in (by_pyg, attention_of_pyg):
        pytest.importorskip("torch_geometric")
    if forward is by_torch_scatter:
        pytest.importorskip("torch_scatter")
    with gnnaccel.enabled(backend="cuda", when="supported"):
        torch.manual_seed(0)
        layer = written(forward)()
        x, edges, w = tensors("x edge_index w")
        x.requires_grad_()
        w.requires_grad_()
        for _ in range(2):
            assert same(layer, x, edges, w)
        assert same(layer.eval(), *tensors("x edge_index w", NODES + 7, EDGES + 30, 5))


def two_rounds(self, x, edge_index, w):
    src, dst = edge_index
    x = self.norm(x)
    first = torch.zeros_like(x).index_add_(0, dst, x[src] * x[dst])
    first = self.norm(first + x)
    second = torch.zeros_like(x).index_add_(0, dst, torch.tanh(first[src] * first[dst]))
    return second, first, x


def test_what_is_computed_of_nodes_is_computed_once(emulated):
    layer, (x, edges, w) = written(two_rounds)(), tensors("x edge_index w")
    with gnnaccel.enabled(backend="cuda", when="supported"):
        assert same(layer, x.requires_grad_(), edges, w) and same(layer, x, edges, w)
        with torch.profiler.profile() as profile:
            layer(x, edges, w)
    counts = {event.key: event.count for event in profile.key_averages()}
    # those of the first sum once for the edges, once for the result
    assert counts["aten::layer_norm"] == 3


@pytest.mark.long
def test_numbers_of_nodes(emulated):
    with gnnaccel.enabled(backend="cuda", when="supported"):
        layer = written(by_number)()
        for count in range(20, 60):
            assert same(layer, *tensors("x edge_index w", count, 3 * count), count)
        x, edges, w = tensors("x edge_index w")
        assert same(layer, x, edges, w, NODES) and same(layer, x, edges, w, num_nodes=None)
        assert not same(layer, x, edges, w, NODES + 1)
