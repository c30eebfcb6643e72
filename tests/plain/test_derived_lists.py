"""Plain modules that make the lists of edges by which they sum themselves, or have several."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric.utils import add_self_loops, degree, remove_self_loops, scatter, softmax

import gnnaccel
from gnnaccel.adapters.plain import arguments, tracing
from tests.plain.held import codes, same

NODES, EDGES = 24, 120


def with_loops(edge_index, nodes):
    loops = torch.arange(nodes, device=edge_index.device).unsqueeze(0).repeat(2, 1)
    return torch.cat([edge_index, loops], dim=1)


def norms(edge_index, nodes, w=None):
    """Norms of degrees, with what is infinite set to 0."""
    if w is None:
        w = torch.ones(edge_index.size(1), device=edge_index.device)
    src, dst = edge_index
    inverse = torch.zeros(nodes, device=w.device).scatter_add_(0, dst, w).pow(-0.5)
    inverse[inverse == float("inf")] = 0
    return inverse[src] * w * inverse[dst]


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.att = nn.Linear(8, 8), nn.Linear(8, 1)
        self.norm, self.kinds = nn.BatchNorm1d(8), nn.Embedding(5, 8)
        self.lins = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def summed(self, x, edge_index, messages):
        return torch.zeros_like(x).index_add_(0, edge_index[1], messages)


def loops(self, x, edge_index, w, kind, mask):
    edge_index = with_loops(edge_index, x.size(0))
    h, (src, _) = self.lin(x), edge_index
    return self.norm(self.summed(x, edge_index, norms(edge_index, len(x)).view(-1, 1) * h[src]))


def weighted_loops(self, x, edge_index, w, kind, mask):
    """Weights with gradients, to which ones are appended, and kinds."""
    count = x.shape[0]
    edge_index = with_loops(edge_index, count)
    w = torch.cat([w, torch.ones(count, device=x.device)])
    kind = torch.cat([kind, torch.full((count,), 4, dtype=torch.long, device=x.device)])
    messages = torch.relu(x[edge_index[0]] + self.kinds(kind)) * norms(edge_index, count, w)[:, None]
    return self.summed(x, edge_index, messages)


def loops_by_pyg(self, x, edge_index, w, kind, mask):
    edge_index, _ = remove_self_loops(edge_index)
    edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
    src, dst = edge_index
    weights = softmax(self.att(F.leaky_relu(x[src] + x[dst])), dst, num_nodes=x.size(0))
    h = scatter(weights * self.lin(x)[src], dst, dim=0, dim_size=x.size(0), reduce="sum")
    return h / degree(dst, x.size(0)).unsqueeze(-1)


def both_ways(self, x, edge_index, w, kind, mask):
    both, w = torch.cat([edge_index, edge_index.flip(0)], 1), torch.cat([w, w])
    return self.summed(x, both, torch.tanh(x[both[0]] * w[:, None] - x[both[1]])), both


def both_ends_apart(self, x, edge_index, w, kind, mask):
    src, dst = edge_index
    src, dst = torch.cat([src, dst]), torch.cat([dst, src])
    return torch.zeros_like(x).index_add_(0, src, torch.tanh(self.lin(x)[dst] - x[src]))


def masked(self, x, edge_index, w, kind, mask):
    keep = mask & (kind != 3) & (w > 0.1)
    edge_index = edge_index[:, keep]
    if edge_index.size(1) == 0:
        return x
    return self.summed(x, edge_index, x[edge_index[0]].tanh() * w[keep].unsqueeze(-1))


def in_order(self, x, edge_index, w, kind, mask):
    order = torch.argsort(edge_index[1], stable=True)
    edge_index, w = edge_index[:, order], w[order]
    return self.summed(x, edge_index, x[edge_index[0]].tanh() * w.unsqueeze(1))


def turned(self, x, edge_index, w, kind, mask):
    edges = edge_index.t()[mask].contiguous()
    total = torch.zeros(len(x), 8).index_add_(0, edges[:, 1], torch.tanh(x[edges[:, 0]]))
    return total, torch.bincount(edges[:, 0], minlength=len(x))


def softmax_by_hand(self, x, edge_index, w, kind, mask):
    """Of several heads, with the largest score taken off."""
    count = x.size(0)
    src, dst = with_loops(edge_index, count)
    h = self.lin(x).view(count, 2, 4)
    scores = F.leaky_relu((h[src] * h[dst]).sum(-1))
    most = torch.full((count, 2), -torch.inf).scatter_reduce(
        0, dst[:, None].expand(-1, 2), scores, "amax", include_self=False)
    weights = (scores - most[dst]).exp()
    weights = weights / (torch.zeros(count, 2).index_add_(0, dst, weights)[dst] + 1e-16)
    total = torch.zeros(count, 2, 4).index_add_(0, dst, weights.unsqueeze(-1) * h[src])
    return total.view(count, 8)


def mean_by_hand(self, x, edge_index, w, kind, mask):
    src, dst = torch.cat([edge_index, edge_index[[1, 0]]], dim=-1)
    total = torch.zeros(x.size(0), 8).scatter_add_(0, dst.unsqueeze(-1).expand(-1, 8),
                                                   self.lin(x)[src].tanh())
    count = torch.zeros(x.size(0)).scatter_add_(0, dst, torch.ones_like(dst, dtype=x.dtype))
    return total / count.clamp(min=1).unsqueeze(-1)


def degrees_looked_up(self, x, edge_index, w, kind, mask):
    count = torch.bincount(edge_index.reshape(-1), minlength=x.size(0)).clamp(max=4)
    h = x + self.kinds(count)
    return self.summed(x, edge_index, (h[edge_index[0]] - h[edge_index[1]]).relu())


def relations(self, x, edge_index, w, kind, mask):
    """Sums over the edges of each kind, some against the flow."""
    out = x
    for k, lin in enumerate(self.lins):
        edges, weights = edge_index[:, kind == k], w[kind == k].unsqueeze(-1)
        messages = torch.tanh(lin(x)[edges[0]] - x[edges[1]]) * weights
        out = out + torch.zeros(len(x), 8).index_add_(0, edges[k % 2], messages)
    return self.norm(out)


def attention_by_relation(self, x, edge_index, w, kind, mask):
    found = []
    for k in range(2):
        src, dst = edge_index[0][kind == k], edge_index[1][kind == k]
        weights = softmax(self.att(F.leaky_relu(x[src] + x[dst])), dst, num_nodes=x.size(0))
        found.append(scatter(weights * x[src], dst, 0, dim_size=x.size(0), reduce="sum"))
    return torch.cat(found, -1), sum(found)


def rounds_over_two(self, x, edge_index, w, kind, mask):
    """The result is a sum over the list that is met last."""
    more = with_loops(edge_index, x.size(0))
    h = self.norm(self.summed(x, edge_index, x[edge_index[0]].tanh() * w[:, None]))
    h = F.dropout(h, 0.3, self.training)
    return self.summed(x, more, torch.sigmoid(self.lin(h)[more[0]]) * h[more[1]])


def rounds_together(self, x, edge_index, w, kind, mask):
    """The mean of all rounds, in a new first dimension, and all of them in another."""
    src, dst = edge_index
    norm, found = norms(edge_index, x.size(0), w), [self.lin(x)]
    for _ in range(2):
        found.append(torch.zeros_like(x).index_add_(0, dst, norm.unsqueeze(-1) * found[-1][src]))
    return torch.stack(found).mean(dim=0), torch.stack(found, 1), torch.stack(found, -1).sum(-1)


def index_laid_in_the_middle(self, x, edge_index, w, kind, mask):
    h, index = self.lin(x).unsqueeze(1), edge_index[1].unsqueeze(-1).expand(-1, 8)
    return torch.zeros_like(h).scatter_add_(0, index.unsqueeze(1), h[edge_index[0]].tanh())


def both_ends_in_rounds(self, x, edge_index, w, kind, mask):
    """The same messages are summed at both ends, and the mean goes on."""
    src, dst = edge_index
    for _ in range(2):
        messages = self.lin(x)[src].tanh() * w.unsqueeze(-1) - x[dst]
        total = torch.zeros_like(x).index_add_(0, dst, messages)
        total = total + torch.zeros_like(x).index_add_(0, src, messages)
        count = torch.zeros(len(x)).index_add_(0, dst, torch.ones_like(dst, dtype=x.dtype))
        count.index_add_(0, src, torch.ones_like(src, dtype=x.dtype))
        x = torch.relu(total / count.clamp(min=1).unsqueeze(-1))
    return x


def imports_inside(self, x, edge_index, w, kind, mask):
    """A module of Python's that is not used, and a helper of the user's own."""
    import bisect  # noqa: F401

    from tests.plain.layers import segment_sum
    messages = self.lin(x)[edge_index[0]].tanh() * w[:, None]
    total = torch.zeros_like(x).index_add_(0, edge_index[0], messages)
    return segment_sum(messages, edge_index[1], x.size(0)) + total


TAKEN = [imports_inside, both_ends_in_rounds, rounds_together, index_laid_in_the_middle, loops, weighted_loops, loops_by_pyg, both_ways, both_ends_apart, masked, in_order, turned,
         softmax_by_hand, mean_by_hand, degrees_looked_up, relations, attention_by_relation,
         rounds_over_two]


def mixed(self, x, edge_index, w, kind, mask):
    """Messages of the ends of two lists."""
    other = edge_index.flip(1)
    return self.summed(x, edge_index, torch.tanh(x[edge_index[0]] - x[other[1]]))


def written(self, x, edge_index, w, kind, mask):
    """The caller's own weights are written to."""
    w.mul_(0.5)
    more = with_loops(edge_index, x.size(0))
    return self.summed(x, more, x[more[0]].tanh()) * w.sum()


def drawn(self, x, edge_index, w, kind, mask):
    """Numbers are drawn at the edges of two lists."""
    more = with_loops(edge_index, x.size(0))
    h = self.summed(x, edge_index, F.dropout(x[edge_index[0]].tanh(), 0.5, True))
    return self.summed(x, more, F.dropout(h[more[0]].sigmoid(), 0.5, True))


def made(function):
    cls = type(function.__name__, (Base,), {"forward": function})
    torch.manual_seed(0)
    return cls()


def tensors(nodes=NODES, edges=EDGES, seed=0):
    torch.manual_seed(seed)
    ends = torch.randint(0, nodes, (2, edges))
    ends[:, 0] = nodes - 1
    return [torch.randn(nodes, 8).requires_grad_(), ends, torch.rand(edges).requires_grad_(),
            torch.randint(0, 4, (edges,)), torch.rand(edges) < 0.7]


@pytest.fixture
def on(emulated):
    with gnnaccel.enabled(backend="cuda", when="supported"):
        yield


@pytest.mark.parametrize("function", TAKEN)
def test_training(on, function):
    """Again, over other graphs, in evaluation, and with ids changed in place."""
    layer, given = made(function), tensors()
    for seed in range(2):
        assert same(layer, *given, seed=seed)
    assert same(layer, *tensors(NODES + 5, EDGES + 9, 1))
    assert same(layer.eval(), *given)
    with torch.no_grad():
        assert same(layer.train(), *given, grad=False)
        given[1][:, :40] = given[1][:, 40:80].flip(1)
        given[3].copy_((given[3] + 1) % 4)
        given[4].logical_not_()
        for t in (*layer.parameters(), given[2]):
            t.mul_(0.9)
    assert same(layer, *given)


@pytest.mark.parametrize("function", [mixed, written, drawn])
def test_native(on, function):
    layer, given = made(function), tensors()
    given[2] = given[2].detach()
    first = given[2].clone()
    with gnnaccel.disabled():
        torch.manual_seed(0)
        expected = layer(*given)
    given[2].copy_(first)
    gnnaccel.reset_stats()
    torch.manual_seed(0)
    assert torch.allclose(layer(*given), expected)
    assert codes(layer) == {"GA211"}


def test_a_list_that_is_given_back_is_the_callers(on):
    """Who writes to it changes no later call."""
    layer, given = made(both_ways), tensors()
    first, edges = layer(*given)
    edges.zero_()
    second, again = layer(*given)
    assert torch.equal(first, second) and not torch.equal(edges, again)


def test_the_same_list_is_made_once(on):
    """Structures are kept by it, as long as what it is made of is as it was."""
    layer, given = made(loops), tensors()
    layer(*given)
    function = type(layer).forward.__wrapped__
    names = ("x", "edge_index", "w", "kind", "mask")

    def made_list():
        found = arguments.given(dict(zip(names, given)))
        return tracing.found(layer, function, found).derived.of_call(found).edge_index

    first = made_list()
    assert made_list() is first
    given[1][0, 3] = 1
    assert made_list() is not first


class Two(Base):
    """Sums over two lists that are given."""

    def forward(self, x, edge_index, others, w, v):
        h = self.summed(x, edge_index, self.lin(x)[edge_index[0]].tanh() * w[:, None])
        g = self.summed(x, others, torch.sigmoid(h[others[0]] - x[others[1]]) * v[:, None])
        return torch.relu(h + g), h


def test_two_lists_that_are_given(on):
    x, edge_index, w, _, _ = tensors()
    _, others, v, _, _ = tensors(edges=EDGES + 30, seed=2)
    layer, given = Two(), [x, edge_index, others, w, v]
    assert same(layer, *given)
    assert same(layer.eval(), *given)
    given[2][0, 5] = -1  # which counts from behind
    assert not same(layer, *given)
