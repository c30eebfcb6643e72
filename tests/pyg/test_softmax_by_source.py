"""Messages with a softmax over the edges that leave a node."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter, softmax

import gnnaccel
from gnnaccel.adapters.pyg.propagate import reading
from gnnaccel.dispatch.ops import aggregation_cost
from tests.pyg import graphs
from tests.pyg.generated_calls import both, compare_second, hub, routes, to
from tests.pyg.graphs import E, M, N
from tests.pyg.graphs import F as WIDTH
from tests.pyg.judge import close, compare


class Leaving(MessagePassing):
    """Attention that is normalised by source, two heads, with features of edges."""

    def __init__(self, aggr="add", dropout=0.0):
        super().__init__(aggr=aggr, node_dim=0)
        self.lin, self.edge, self.dropout = nn.Linear(WIDTH, 8), nn.Linear(4, 8), dropout
        self.att = nn.Parameter(torch.randn(1, 2, 8))

    def forward(self, x, edge_index, edge_attr, size=None):
        x = (tuple(map(self.lin, x)) if isinstance(x, tuple) else self.lin(x))
        return self.propagate(edge_index, x=x, edge_attr=self.edge(edge_attr), size=size)

    def message(self, edge_index, x_i, x_j, edge_attr):
        return self.weighted(x_i, x_j, edge_attr, edge_index[0], None)

    def weighted(self, x_i, x_j, edge_attr, index, count):
        x_i, x_j = x_i.view(-1, 2, 4), x_j.view(-1, 2, 4) + edge_attr.view(-1, 2, 4)
        alpha = F.leaky_relu((torch.cat([x_i, x_j], dim=-1) * self.att).sum(dim=-1), 0.2)
        alpha = softmax(alpha, index, num_nodes=count)
        alpha = F.dropout(alpha, self.dropout, self.training)
        return (x_j * alpha.view(-1, 2, 1)).view(-1, 8)


class ByEnd(Leaving):
    """The index by its name, with the number of nodes that receive."""

    def message(self, edge_index_j, x_i, x_j, edge_attr, size_i):
        return self.weighted(x_i, x_j, edge_attr, edge_index_j, size_i)


class Sources(Leaving):
    """With the number of nodes that send."""

    def message(self, edge_index_j, x_i, x_j, edge_attr, size_j):
        return self.weighted(x_i, x_j, edge_attr, edge_index_j, size_j)


class Twice(Leaving):
    """Both ways, as in models of signed or directed graphs."""

    def message(self, index, edge_index_j, x_i, x_j, edge_attr):
        score = (x_i * x_j + edge_attr).sum(-1, keepdim=True)
        return x_j * softmax(score, index) - x_i * softmax(score, edge_index_j)


class ByScatter(Leaving):
    """As users write it themselves; sums end with the last node that an edge leaves."""

    def weighted(self, x_i, x_j, edge_attr, index, count):
        weights = torch.exp(torch.tanh((x_i * x_j + edge_attr).mean(-1)))
        sums = scatter(weights, index=index, dim=0, dim_size=count, reduce="sum")[index]
        return (weights / sums).view(-1, 1) * (x_j + edge_attr)


class BySources(ByScatter):
    """With the number of nodes that send, and of rows."""

    def message(self, edge_index_j, x_i, x_j, edge_attr, size_j):
        rows = torch.sigmoid(x_i - edge_attr)
        sums = scatter(rows, edge_index_j, 0, size_j)
        return (self.weighted(x_i, x_j, edge_attr, edge_index_j, size_j)
                + rows / sums.index_select(0, edge_index_j))


def given(edges=E):
    return graphs.features(), graphs.square(edges=edges), graphs.edge_features(edges, 4)


@pytest.mark.parametrize("cls", [Leaving, ByEnd, Sources, Twice, ByScatter, BySources])
def test_values_and_gradients(kernels, cls):
    compare(kernels, cls(), *given())


@pytest.mark.parametrize("aggr", ["mean", "max"])
def test_other_reductions(kernels, aggr):
    compare(kernels, Leaving(aggr), *given())


def test_a_hub_that_sends(kernels):
    compare(kernels, Leaving(), graphs.features(), hub(), graphs.edge_features(10100, 4))


def test_second_gradients(kernels):
    compare_second(kernels, Leaving().to(kernels.device), *to(kernels.device, *given()))


def test_dropout(kernels):
    """The same weights are dropped as natively, as the same numbers are drawn on the CPU."""
    if kernels.device.type == "cuda":
        pytest.skip("a GPU draws other numbers")
    layer, args = Leaving(dropout=0.4), given()
    found = []
    for on in (gnnaccel.disabled(), kernels.on()):
        torch.manual_seed(3)
        with on:
            found.append(layer(*args))
    assert close(*found)


@pytest.mark.parametrize("cls", [Leaving, ByEnd, ByScatter, BySources])
def test_against_the_flow(kernels, cls):
    """``edge_index[0]`` names the nodes that receive then, ``edge_index_j`` still those that
    send."""
    layer = cls()
    layer.flow = "target_to_source"
    compare(kernels, layer, *given())


@pytest.mark.parametrize("cls", [Leaving, Sources, ByScatter, BySources])
def test_two_kinds_of_nodes(kernels, cls):
    compare(kernels, cls(), (graphs.features(), graphs.features(M)), graphs.bipartite(),
            graphs.edge_features(graphs.bipartite().shape[1], 4), (N, M),
            positions=("x", "edge_index", "edge_attr", "size"))


def test_fewer_nodes_that_receive(emulated):
    """Their number is no number of sources: the host's own code says what comes of it."""
    layer, ei = ByEnd(), graphs.bipartite()
    assert int(ei[0].max()) >= M
    args = (graphs.features(), graphs.features(M)), ei, graphs.edge_features(ei.shape[1], 4), (N, M)
    with pytest.raises(RuntimeError):
        layer(*args)
    with emulated.on(on_fallback="native"), pytest.raises(RuntimeError):
        layer(*args)
    assert "cuda" not in routes(layer)
    few = ei.clone()
    few[0].clamp_(max=M - 1)
    both(emulated, layer, args[0], few, *args[2:], on_fallback="native")
    assert "cuda" not in routes(layer)


@pytest.mark.long
@pytest.mark.parametrize("cls", [Leaving, ByScatter, BySources])
def test_other_graphs_and_changed_weights(emulated, cls):
    layer = cls()
    for at in range(4):
        args = graphs.features(), torch.randint(0, N, (2, E + at)), graphs.edge_features(E + at, 4)
        with torch.no_grad():
            layer.att.mul_(1.5)
        both(emulated, layer, *args)
        with torch.no_grad():
            both(emulated, layer, *args)


class Entering(Leaving):
    """The same with a softmax over the edges that enter a node, kept as weights by themselves."""

    def message(self, edge_index, x_i, x_j, edge_attr):
        return self.weighted(x_i, x_j, edge_attr, edge_index[1], None)


def test_both_directions_are_paid_for(emulated):
    """A call without gradients groups a new graph's edges by both of their ends."""
    costs = []
    for cls in (Leaving, Entering):
        x, ei, edge = given()
        layer = cls("mean")
        kwargs = dict(x=layer.lin(x), edge_attr=layer.edge(edge), size=None)
        found = reading.read(layer, ei, kwargs)
        more = found.form.stand_in(kwargs, found.graph)
        costs.append(aggregation_cost._on_cuda(found.graph, found.given._replace(more=more),
                                               "forward").structure)
    assert costs[0] == 2 * costs[1]
