"""Messages with numbers of all edges, such as the largest score or the mean of all rows."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter, softmax

from tests.pyg import graphs
from tests.pyg.generated_calls import both, compare_second, routes, stays_native
from tests.pyg.judge import close, compare


class Conv(MessagePassing):
    edge = 0

    def __init__(self, aggr="add"):
        super().__init__(aggr=aggr)
        self.lin, self.att = nn.Linear(graphs.F, graphs.F), nn.Linear(2 * graphs.F, 1)

    def forward(self, x, edge_index, edge_attr=None):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)


class Largest(Conv):
    def message(self, x_i, x_j):
        scores = self.att(torch.cat([x_i, x_j], -1)).tanh()
        return x_j * (scores - scores.max()).exp()


class Scaled(Conv):
    def message(self, x_i, x_j, index, ptr, size_i):
        alpha = softmax((x_i * x_j).sum(-1), index, ptr, size_i)
        return self.lin(x_j / alpha.max().detach()) * (alpha / alpha.max()).unsqueeze(-1)


class Lengths(Conv):
    def message(self, x_i, x_j):
        return (x_i * x_j).tanh() / x_j.norm(dim=-1).mean() + torch.max(x_j.abs())


class Normed(Conv):
    """By channels, and by all numbers."""

    def message(self, x_i, x_j):
        rows = self.lin(x_i * x_j).tanh()
        rows = (rows - rows.mean(0)) / (rows.std(dim=0, keepdim=True) + 1.0)
        return rows * torch.rsqrt(rows.var(unbiased=False) + 1e-5)


class Between(Conv):
    def message(self, x_j, edge_attr):
        least, most = edge_attr.amin(), edge_attr.max(dim=0).values
        return x_j.tanh() * ((edge_attr - least) / (most - least)).mean(-1, keepdim=True)


class WithoutGradient(Conv):
    def message(self, x_i, x_j):
        with torch.no_grad():
            most = (x_i * x_j).abs().max()
        return (x_i * x_j) / most


class InAggregate(Conv):
    def message(self, x_i, x_j):
        return (x_i * x_j).tanh()

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        return scatter(inputs / (inputs.norm() + 1), index, 0, dim_size, "sum")


CLASSES = [Largest, Scaled, Lengths, Normed, Between, WithoutGradient, InAggregate]


def arguments(cls, edges=graphs.E):
    edge = graphs.edge_features(edges, 4) if cls is Between else None
    return graphs.features(), graphs.square(edges=edges), edge


@pytest.mark.long
@pytest.mark.parametrize("cls", CLASSES)
def test_results_and_gradients(kernels, cls):
    layer, given = cls(), arguments(cls)
    for _ in range(2):
        compare(kernels, layer, *given)
    for edges in (90, 20, 200):
        both(kernels, layer, *arguments(cls, edges))
    with torch.no_grad():
        both(kernels, layer.eval(), *given)


@pytest.mark.long
@pytest.mark.parametrize("aggr", ["mean", "max"])
def test_other_reductions(emulated, aggr):
    compare(emulated, Lengths(aggr), *arguments(Lengths))


@pytest.mark.long
def test_second_derivatives(emulated):
    for layer in (Lengths(), Normed(), Between()):
        edge = graphs.edge_features(graphs.E, 4)
        compare_second(emulated, layer, graphs.features(), graphs.square(), edge)


class Dropped(Conv):
    def message(self, x_i, x_j):
        rows = F.dropout(x_i * x_j, 0.5, self.training)
        return self.lin(x_j * rows.max()) + rows / rows.norm()


def test_dropout_is_drawn_once(emulated):
    layer, (x, edges, _) = Dropped(), arguments(Dropped)
    x.requires_grad_()

    def seeded():
        torch.manual_seed(3)
        out = layer(x, edges)
        return [out, *torch.autograd.grad(out.square().sum(), [x, layer.lin.weight])]

    expected = seeded()
    with emulated.on():
        for _ in range(2):
            for one, other in zip(seeded(), expected):
                assert close(one, other)


class Asks(Conv):
    def message(self, x_i, x_j):
        rows = x_i * x_j
        return rows if rows.max() > 1 else x_j


class Read(Conv):
    def message(self, x_i, x_j):
        return x_j * float((x_i * x_j).max())


@pytest.mark.parametrize("cls", [Asks, Read])
def test_what_is_asked_of_them_is_not_followed(emulated, cls):
    stays_native(emulated, cls())


class Counted(Conv):
    """Sums for as many nodes as it is told."""

    def forward(self, x, edge_index, count):
        return self.propagate(edge_index, x=x, count=count)

    def message(self, x_i, x_j, index, count):
        weights = self.att(torch.cat([x_i, x_j], -1)).exp()
        total = scatter(weights, index, dim=0, dim_size=count, reduce="sum")
        return x_j * (weights / total[index])


@pytest.mark.long
def test_numbers_of_nodes_that_a_message_is_given(emulated):
    layer, x = Counted(), graphs.features()
    edges = torch.stack([torch.randint(0, graphs.N, (80,)), torch.randint(0, 9, (80,))])
    for count in (graphs.N, graphs.N, graphs.N + 4):
        compare(emulated, layer, x, edges, count)
    both(emulated, layer, x, edges, 9, on_fallback="native")  # the others receive nothing
    assert routes(layer) == {"native": 1}
    both(emulated, layer, torch.randn(graphs.N + 4, graphs.F), edges, graphs.N + 4)
    with pytest.raises((RuntimeError, IndexError)), emulated.on(on_fallback="native"):
        layer(x, edges, 5)


class OfNodes(Conv):
    """An aggregate may be given rows of nodes, of which a number is another than of edges."""

    def message(self, x_i, x_j):
        return (x_i * x_j).tanh()

    def aggregate(self, inputs, index, edge_attr, ptr=None, dim_size=None):
        largest = torch.relu(edge_attr * 2 + 0.1).exp().max()
        return scatter(inputs, index, 0, dim_size, "sum") * largest / edge_attr.norm()


@pytest.mark.parametrize("rows", [graphs.N, graphs.E])
def test_arguments_of_an_aggregate_are_not_followed(emulated, rows):
    layer, x, edges = OfNodes(), graphs.features(), graphs.square()
    both(emulated, layer, x, edges, graphs.edge_features(rows, 4), on_fallback="native")
    assert routes(layer) == {"native": 1}
