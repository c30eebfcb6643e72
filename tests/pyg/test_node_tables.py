"""Messages that pick rows of tables by the ids of an edge's ends, are given the list of edges as an
argument, or multiply with blocks of a matrix that they pick by the kind of an edge."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter, softmax

from tests.pyg import graphs
from tests.pyg.generated_calls import both, routes, to
from tests.pyg.generated_layers import WIDTH
from tests.pyg.graphs import E, M, N
from tests.pyg.judge import close, compare

HEADS, OF_NODES, KINDS = 2, 3, 4


class Deviation(MessagePassing):
    """GDN: attention over features beside rows of a table, with the edges as an argument."""

    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.lin = nn.Linear(WIDTH, HEADS * WIDTH, bias=False)
        self.att_i, self.att_j = (nn.Parameter(torch.randn(1, HEADS, WIDTH)) for _ in range(2))
        self.more_i, self.more_j = (nn.Parameter(torch.randn(1, HEADS, OF_NODES)) for _ in range(2))
        self.__alpha__ = None

    def forward(self, x, edge_index, table):
        x = self.lin(x)
        return self.propagate(edge_index, x=(x, x), table=table, edges=edge_index).flatten(1)

    def message(self, x_i, x_j, edge_index_i, size_i, table, edges):
        x_i, x_j = x_i.view(-1, HEADS, WIDTH), x_j.view(-1, HEADS, WIDTH)
        own = table[edge_index_i].unsqueeze(1).repeat(1, HEADS, 1)
        other = table[edges[0]].unsqueeze(1).repeat(1, HEADS, 1)
        score = (torch.cat((x_i, own), -1) * torch.cat((self.att_i, self.more_i), -1)).sum(-1)
        score = score + (torch.cat((x_j, other), -1)
                         * torch.cat((self.att_j, self.more_j), -1)).sum(-1)
        alpha = softmax(F.leaky_relu(score.view(-1, HEADS, 1), 0.2), edge_index_i, num_nodes=size_i)
        self.__alpha__ = alpha
        return x_j * alpha


class Table(MessagePassing):
    """Parameters of the layer, one for each node and some more."""

    def __init__(self, rows: int = N, aggr: str = "mean"):
        super().__init__(aggr=aggr)
        self.gate, self.shift = (nn.Parameter(torch.randn(rows, WIDTH)) for _ in range(2))

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j, edge_index, index):
        row, col = edge_index
        out = x_j * torch.sigmoid(self.gate[col])
        return out + torch.tanh(torch.index_select(self.shift, 0, row) - self.gate[index])


class Blocks(MessagePassing):
    """RGCN's block-diagonal weights, each picked by the kind of an edge."""

    def __init__(self, blocks: int = 2):
        super().__init__(aggr="mean")
        self.weight = nn.Parameter(torch.randn(KINDS, blocks, WIDTH // blocks, 3))

    def forward(self, x, edge_index, kind):
        return self.propagate(edge_index, x=x, kind=kind)

    def message(self, x_j, kind):
        weight = self.weight[kind].view(-1, self.weight.size(2), self.weight.size(3))
        rows = torch.bmm(x_j.view(-1, 1, weight.size(1)), weight)
        return rows.view(-1, self.weight.size(1) * 3)


class BlocksAlone(Blocks):
    """Without gradients for the weights."""

    def message(self, x_j, kind):
        with torch.no_grad():
            rows = super().message(torch.relu(x_j), kind)
        return rows * x_j[:, :1]


def table() -> torch.Tensor:
    return graphs.features()[:, :OF_NODES].contiguous()


@pytest.mark.long
@pytest.mark.parametrize("train", [True, False])
def test_edges_as_an_argument(kernels, train):
    compare(kernels, Deviation(), graphs.features(), graphs.square(), table(), train=train)


@pytest.mark.parametrize("aggr", ["add", "mean", "max"])
@pytest.mark.parametrize("rows", [N, N + 5])
def test_tables_of_the_layer(kernels, aggr, rows):
    compare(kernels, Table(rows, aggr), graphs.features(), graphs.square())


def test_tables_against_the_flow(kernels):
    layer = Table()
    layer.flow = "target_to_source"
    compare(kernels, layer, graphs.features(), graphs.square())


class BothEnds(Table):
    """What tells the rows of the two ends apart: features of either kind of nodes."""

    def forward(self, x, y, edge_index, size=None):
        return self.propagate(edge_index, x=(x, y), size=size)

    def message(self, x_i, x_j, edge_index, index):
        return torch.relu(x_j * x_i) * self.gate[index]


class BySource(BothEnds):
    def message(self, x_i, x_j, edge_index):
        return torch.relu(x_j * x_i) * self.gate[edge_index[0]]


class BySourceAlone(BySource):
    """Whose message says nothing of the nodes that receive, which are fewer."""

    def message(self, x_j, edge_index):
        return torch.relu(x_j) * self.gate[edge_index[0]]


class SummedBySource(BySourceAlone):
    def aggregate(self, inputs, index, dim_size):
        return scatter(inputs, index, 0, dim_size, reduce="mean")


@pytest.mark.parametrize("cls", [BothEnds, BySource, BySourceAlone, SummedBySource])
def test_tables_of_two_kinds_of_nodes(emulated, cls):
    x, y, ei = graphs.features(), graphs.features(M), graphs.bipartite()
    compare(emulated, cls(N), x, y, ei)


@pytest.mark.long
@pytest.mark.parametrize("cls", [BySource, BySourceAlone, SummedBySource])
def test_tables_of_fewer_nodes_than_send_stay_native(emulated, cls):
    """Over edges that leave those of which the table knows, and in a call like one by kernels."""
    x, y, ei = graphs.features(), graphs.features(M), graphs.bipartite() % M
    layer = cls(N - 3)
    given = [(x[:N - 3], y, ei), (x, y, ei), (x[:N - 3], y, ei), (x, y, ei)]
    for k, args in enumerate(given):
        both(emulated, layer, *args, on_fallback="native")
        assert routes(layer) == {"native" if k % 2 else "cuda": 1}


@pytest.mark.parametrize("cls", [Table, BothEnds])
def test_tables_of_fewer_nodes_stay_native(emulated, cls):
    """The host says so where an edge names a row that is not there."""
    x, ei = graphs.features(), graphs.square() % (N - 1)
    layer, given = cls(N - 1), (x, ei) if cls is Table else (x, x, ei)
    both(emulated, layer, *given, on_fallback="native")
    assert routes(layer) == {"native": 1}
    ei[:, 0] = N - 1
    with emulated.on(on_fallback="native"), pytest.raises(IndexError):
        layer(*given)


class OtherEdges(MessagePassing):
    """Is given a list of edges that is the graph's, or not."""

    def __init__(self):
        super().__init__(aggr="add")

    def forward(self, x, edge_index, edges, table):
        return self.propagate(edge_index, x=x, edges=edges, table=table)

    def message(self, x_j, table, edges):
        return torch.relu(x_j) * table[edges[0]]


@pytest.mark.parametrize("known", [True, False])
def test_another_list_of_edges(emulated, known):
    """Of the same shape: also where a call like this one was kept."""
    layer, x = OtherEdges(), graphs.features()
    rows = torch.randn(N, WIDTH)
    ei = graphs.square()
    other = ei.flip(1).contiguous()
    with emulated.on(on_fallback="native"):
        for _ in range(3):
            edges = ei if known else graphs.square()
            assert close(layer(x, edges, edges, rows), by_hand(x, edges, edges, rows))
        for edges in (other, ei.clone(), ei):
            assert close(layer(x, ei, edges, rows), by_hand(x, ei, edges, rows))
    assert routes(layer)["cuda"] >= 4


def by_hand(x, edge_index, edges, rows):
    sent = torch.relu(x[edge_index[0]]) * rows[edges[0]]
    return torch.zeros_like(x).index_add(0, edge_index[1], sent)


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("train", [True, False])
def test_blocks(kernels, blocks, train):
    compare(kernels, Blocks(blocks), graphs.features(), graphs.square(),
            torch.randint(0, KINDS, (E,)), train=train)


def test_blocks_without_gradients_stay_native(emulated):
    args = to(emulated.device, graphs.features(), graphs.square(), torch.randint(0, KINDS, (E,)))
    layer = BlocksAlone()
    both(emulated, layer, *args, on_fallback="native")
    assert routes(layer) == {"native": 1}


# --- places that both ends name -------------------------------------------------------------------

class Connectivity(MessagePassing):
    """A weight for each pair of nodes, as models of neurons have it, and one by kinds of both."""

    def __init__(self, aggr: str = "add", rows: int = N):
        super().__init__(aggr=aggr)
        self.weight = nn.Parameter(torch.randn(rows, rows))
        self.by_kind = nn.Parameter(torch.randn(KINDS, KINDS, WIDTH))
        self.mask, self.rows = 1.0 - torch.eye(rows), rows

    def forward(self, x, edge_index, kind):
        return self.propagate(edge_index, x=x, kind=kind[:, None])

    def message(self, x_i, x_j, kind_i, kind_j, edge_index_i, edge_index_j):
        weight = self.weight * self.mask.to(self.weight.dtype)
        rows = torch.tanh(x_j) * weight[edge_index_i % self.rows, edge_index_j][:, None]
        first = self.by_kind[kind_i.squeeze(), 1, :2]
        return rows + x_i * self.by_kind[kind_i.squeeze(), kind_j.squeeze(), :] * first[:, :1]


class WithoutGradients(Connectivity):
    def message(self, x_j, edge_index_i, edge_index_j):
        with torch.no_grad():
            weight = self.weight[edge_index_i, edge_index_j]
        return torch.sigmoid(x_j) * weight.unsqueeze(-1)


def of_nodes() -> torch.Tensor:
    return torch.randint(0, KINDS, (N,))


@pytest.mark.long
@pytest.mark.parametrize("aggr", ["add", "max"])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_places_that_both_ends_name(kernels, aggr, flow):
    layer = Connectivity(aggr)
    layer.flow, layer.mask = flow, layer.mask.to(kernels.device)  # no buffer: it stays where it is
    compare(kernels, layer, graphs.features(), graphs.square(), of_nodes())


@pytest.mark.long
@pytest.mark.parametrize("cls", [Connectivity, WithoutGradients])
def test_places_over_other_edges(emulated, cls):
    """Of int32 too, with more rows in the table, other kinds and weights."""
    layer, x, ei = cls(rows=N + 3), graphs.features(), graphs.square()
    for index in (ei, ei, ei.flip(1).contiguous(), ei[:, 5:], ei.int(), ei.flip(0)):
        kind = of_nodes()
        expected = layer(x, index, kind)
        with emulated.on():
            assert close(layer(x, index, kind), expected)
        with torch.no_grad():
            layer.weight.mul_(0.9)
    assert routes(layer) == {"cuda": 6}


def test_weights_without_gradients_get_none(emulated):
    layer = WithoutGradients()
    with emulated.on():
        layer(graphs.features().requires_grad_(), graphs.square(), of_nodes()).sum().backward()
    assert routes(layer) == {"cuda": 1} and layer.weight.grad is None


def test_ids_of_a_period(emulated):
    """Which is shorter than the nodes are many."""
    layer, x, ei = Connectivity(), graphs.features(), graphs.square()
    layer.weight = nn.Parameter(torch.randn(5, N))
    layer.mask, layer.rows = torch.ones(5, N), 5
    both(emulated, layer, x, ei, of_nodes())
    layer.rows = 4
    both(emulated, layer, x, ei, of_nodes())


def test_places_that_are_not_there(emulated):
    layer, x, ei = WithoutGradients(rows=N - 1), graphs.features(), graphs.square()
    ei[:, 0] = N - 1
    for on in (False, True):
        with emulated.on(on_fallback="native") if on else torch.enable_grad(), pytest.raises(
            IndexError):
            layer(x, ei, of_nodes())


class ByPeriod(MessagePassing):
    """What an edge's end is in a period, as a number and as one of several."""

    def __init__(self, one_of_several: bool):
        super().__init__(aggr="add")
        self.one_of_several = one_of_several

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j, index):
        if self.one_of_several:
            return x_j * F.one_hot(index % WIDTH, WIDTH)
        return x_j * (index % 2).unsqueeze(-1)


@pytest.mark.parametrize("one_of_several", [False, True])
def test_ids_of_a_period_as_numbers(emulated, one_of_several):
    """Nothing but the list of edges tells their device."""
    layer = ByPeriod(one_of_several)
    both(emulated, layer, graphs.features(), graphs.square())
