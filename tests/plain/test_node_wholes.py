"""What plain modules make of all nodes, or of those of each graph, beside their sums over edges."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gnnaccel
from tests.plain import layers
from tests.plain.held import same
from tests.plain.test_layers import EDGES, NODES, tensors


def sums(self, x, edge_index, batch):
    h = self.summed(x, edge_index)
    return torch.zeros(4, 8, device=x.device).index_add_(0, batch, h), h


def sums_up_to_the_last(self, x, edge_index, batch):
    h = self.summed(x, edge_index)
    count = int(batch.max()) + 1
    total = h.new_zeros(count, 8).scatter_add_(0, batch.unsqueeze(-1).expand(-1, 8), h)
    return total, torch.zeros(batch[-1].item() + 1, 8).index_add(0, batch, x), total.shape[0]


def means_that_go_back(self, x, edge_index, batch):
    """Means and deviations by graph, which are taken off and gathered at the edges."""
    h, count = self.summed(x, edge_index), batch.max().item() + 1
    number = torch.bincount(batch, minlength=count).clamp(min=1).to(h.dtype).unsqueeze(-1)
    h = h - (torch.zeros(count, 8).index_add_(0, batch, h) / number)[batch]
    deviation = (torch.zeros(count, 8).index_add_(0, batch, h * h) / number + 1e-2).sqrt()
    return self.summed(h / deviation[batch], edge_index)


def means_by_ones(self, x, edge_index, batch, num_graphs=4):
    h, ones = self.summed(x, edge_index), torch.ones(batch.size(0), device=x.device)
    number = torch.zeros(num_graphs).index_add_(0, batch, ones).clamp(min=1)
    return torch.zeros(num_graphs, h.size(1)).index_add_(0, batch, h) / number[:, None]


def normed_and_mapped(self, x, edge_index, batch):
    """A virtual node: sums by graph through a BatchNorm, given to the nodes of the next round."""
    total = torch.zeros(4, 8)
    for _ in range(2):
        h = self.summed(x, edge_index)
        total = total + torch.zeros(4, 8).index_add_(0, batch, h)
        x = x + F.dropout(self.norm(self.lin(total)), 0.3, self.training)[batch]
    return x, total


def over_all(self, x, edge_index, batch):
    x = (x - x.mean(0, keepdim=True)) / (x.var(0) + 1e-2).sqrt()
    h = self.summed(x, edge_index)
    weights = F.softmax(self.lin(h)[:, :1], dim=0)
    return h - h.mean(0), (weights * h).sum(0), h.max(0).values, h.amax(), h.std(0), h[batch]


def changed_afterwards(self, x, edge_index, batch):
    total = torch.zeros(4, 8).index_add_(0, batch, self.summed(x, edge_index))
    total += 1
    return total.mul_(2), total[0], total[:2].sum()


def written_before(self, x, edge_index, batch):
    """Zeros that are looked at, or written to, before the sums go in."""
    total, other = torch.zeros(4, 8), torch.zeros(4, 8)
    part = total.view(2, 16)
    other.add_(1)
    h = self.summed(x, edge_index)
    return total.index_add_(0, batch, h), part, other.index_add_(0, batch, h)


def transposed(self, x, edge_index, batch):
    h = self.summed(x, edge_index)
    return torch.matmul(h.t(), h)


def pools(self, x, edge_index, batch):
    from torch_geometric.nn import global_add_pool, global_max_pool, global_mean_pool
    h = self.summed(x, edge_index)
    return (global_add_pool(h, batch), global_mean_pool(h, batch, 4), global_max_pool(h, batch),
            self.summed(h + self.lin(global_mean_pool(h, batch))[batch], edge_index))


def pyg_by_graph(self, x, edge_index, batch):
    from torch_geometric.utils import degree, scatter, softmax
    h = scatter(x[edge_index[0]].tanh(), edge_index[1], 0, dim_size=len(x), reduce="mean")
    weights = softmax(self.lin(h), batch)
    return (scatter(weights * h, batch, dim=0), scatter(h, batch, dim=0, reduce="max"),
            scatter(h, batch, 0, 4, "sum") / degree(batch, 4).clamp(min=1).unsqueeze(-1))


def moved(self, x, edge_index, batch):
    edge_index = edge_index.to(x.device).contiguous()
    device = self.lin.weight.device
    src, dst = edge_index[0].long().to(device), edge_index[1].to(torch.int64)
    x = x.to(device).to(x.dtype).float().contiguous()
    return torch.zeros(x.size(0), x.size(1), device=x.device).index_add_(
        0, dst, (self.lin(x)[src]).tanh())


def as_many_as_ids_name(self, x, edge_index, batch):
    src, dst = edge_index
    count = max(int(edge_index.max()) + 1, x.size(0))
    total = x.new_zeros(count, 8).index_add_(0, dst, x[src].tanh())
    return total, torch.zeros(max(x.size(0), dst.max().item() + 1), 8).index_add_(0, dst, x[src])


def mean_by_index_reduce(self, x, edge_index, batch):
    return torch.zeros_like(x).index_reduce(0, edge_index[1], x[edge_index[0]].tanh(), "mean",
                                            include_self=False)


def from_no_memory(self, x, edge_index, batch):
    h, c = x, torch.zeros_like(x)
    for _ in range(2):
        h, c = self.lstm(self.summed(h, edge_index), (h, c))
    return h, {"edges": edge_index.size(1)}


def in_messages(self, x, edge_index, batch):
    """Numbers of all nodes, of sums and through a norm, in the messages."""
    h, (src, dst) = self.summed(x, edge_index), edge_index
    gate, most = torch.sigmoid(self.lin(self.norm(h).mean(0))), h.abs().max()
    weights = F.dropout(x.pow(2).mean(0, keepdim=True), 0.3, self.training)
    messages = torch.tanh(self.lin(x[src]) * gate + h[dst] * weights) / (most + 1)
    return torch.zeros_like(x).index_add_(0, dst, messages), gate


def looked_up(self, x, edge_index, batch):
    return self.summed(x + self.table(batch), edge_index)


TAKEN = [sums, sums_up_to_the_last, means_that_go_back, means_by_ones, normed_and_mapped, over_all,
         changed_afterwards, pools, pyg_by_graph, layers.asserting, moved, as_many_as_ids_name,
         mean_by_index_reduce, from_no_memory, in_messages, looked_up]


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.norm, self.lstm = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.LSTMCell(8, 8)
        self.table = nn.Embedding(4, 8)

    def summed(self, h, edge_index):
        src, dst = edge_index
        return torch.zeros_like(h).index_add_(0, dst, torch.tanh(h[src] - 0.5 * h[dst]))


def written(forward):
    return type(forward.__name__.title(), (Base,), {"forward": forward})


def given(nodes=NODES, edges=EDGES, seed=0, graphs=4):
    x, ei = tensors("x edge_index", nodes, edges, seed)
    batch = torch.randint(0, graphs, (nodes,)).sort().values
    batch[-1], ei[:, -1] = graphs - 1, nodes - 1
    return x.requires_grad_(), ei, batch


@pytest.fixture
def on(emulated):
    with gnnaccel.enabled(backend="cuda", when="supported"):
        yield


@pytest.mark.parametrize("forward", TAKEN)
def test_values_and_gradients(on, forward):
    if forward in (pools, pyg_by_graph):
        pytest.importorskip("torch_geometric")
    torch.manual_seed(0)
    layer = written(forward)()
    for args in (given(), given(), given(seed=1), given(NODES + 7, EDGES + 30, 5)):
        assert same(layer, *args)
    if forward in (sums_up_to_the_last, means_that_go_back):
        assert same(layer, *given(graphs=2)) and same(layer, *given(graphs=3, seed=2))
    assert same(layer.eval(), *given(seed=3))
    with torch.no_grad():
        assert same(layer, *given(), grad=False)


@pytest.mark.parametrize("forward", [written_before, transposed])
def test_what_is_not_followed(on, forward):
    layer = written(forward)()
    for _ in range(2):
        assert not same(layer, *given())


def test_another_number_of_graphs(on):
    layer = written(means_by_ones)()
    for graphs in (4, 6, 4, NODES, 9):
        assert same(layer, *given(), graphs)


def test_ids_beyond_the_nodes_make_more_rows(on):
    """Natively as many rows as ids name, of ends that nothing is gathered by."""
    class Beyond(nn.Module):
        def forward(self, x, edge_index):
            count = max(x.size(0), int(edge_index[1].max()) + 1)
            return torch.zeros(count, 8).index_add_(0, edge_index[1], x[edge_index[0]].tanh())

    layer, (x, edges, _) = Beyond(), given()
    assert same(layer, x, edges)
    assert not same(layer, x, edges + torch.tensor([[0], [3]]))
    assert same(layer, x, edges)
