"""Messages with arguments that belong neither to nodes nor to edges: tensors for all edges, such as
weights that a network made, and texts."""
from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

from tests.pyg import graphs
from tests.pyg.generated_calls import routes
from tests.pyg.graphs import E, F as WIDTH
from tests.pyg.judge import close, compare

KINDS = 5


class Relational(MessagePassing):
    """CompGCN's: a table of relations, of which each edge picks its own."""

    def __init__(self):
        super().__init__(aggr="add")
        self.relations = nn.Parameter(torch.randn(KINDS, WIDTH))
        self.w_in, self.w_out = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x, edge_index):
        kinds, half = torch.arange(edge_index.shape[1]) % KINDS, edge_index.shape[1] // 2
        kinds, table = kinds.to(x.device), torch.tanh(self.relations)
        there = self.propagate(edge_index[:, :half], x=x, table=table, kinds=kinds[:half],
                               mode="in", norm=None)
        back = self.propagate(edge_index[:, half:], x=x, table=table, kinds=kinds[half:],
                              mode="out", norm=None)
        return there + back

    def message(self, x_j, x_i, table, kinds, mode, norm):
        out = torch.mm(x_j - torch.index_select(table, 0, kinds), getattr(self, f"w_{mode}"))
        return out * torch.sigmoid(x_i) if norm is None else out * norm.view(-1, 1)


class Indexed(Relational):
    def message(self, x_j, x_i, table, kinds, mode, norm):
        if mode == "in":
            return x_j * table[kinds] + x_i
        return torch.relu(x_i - table.index_select(dim=0, index=kinds)) * x_j


class Made(MessagePassing):
    """With weights that another network made of the graph, a number and a row for all edges."""

    def __init__(self):
        super().__init__(aggr="mean")
        self.hyper = nn.Linear(WIDTH, WIDTH * WIDTH)
        self.row = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x, edge_index):
        weight = self.hyper(x.mean(0)).view(WIDTH, WIDTH)
        return self.propagate(edge_index, x=x, weight=weight, scale=weight.square().mean(),
                              bias=weight[0], row=self.row.exp())

    def message(self, x_i, x_j, weight, scale, bias, row):
        return F.silu(F.linear(x_j, weight, bias) * scale - x_i * row)


@pytest.mark.parametrize("cls, calls", [(Relational, 2), (Indexed, 2), (Made, 1)])
def test_values_and_gradients(kernels, cls, calls):
    compare(kernels, cls(), graphs.features(), graphs.square(), calls=calls)


@pytest.mark.long
@pytest.mark.parametrize("edges", [1, 2, KINDS, 2 * KINDS, WIDTH])
@pytest.mark.parametrize("cls", [Relational, Indexed, Made])
def test_as_many_edges_as_a_tensor_has_rows(emulated, cls, edges):
    """Where a tensor may have a row for each edge, and where it has not, over the same layer."""
    layer, x = cls(), graphs.features()
    for count in (E, edges, E, edges):
        ei = graphs.square()[:, :count]
        expected = layer(x, ei)
        with emulated.on(on_fallback="native"):
            assert close(layer(x, ei), expected)


class Passing(MessagePassing):
    def forward(self, x, edge_index, **given):
        return self.propagate(edge_index, x=x, given=given["given"])


class Chosen(Passing):
    def message(self, x_i, x_j, given):
        return torch.relu(x_j - x_i) if given == "relu" else torch.tanh(x_j * x_i)


class Scaled(Passing):
    def message(self, x_i, x_j, given):
        return torch.relu(x_j - x_i) * given


@pytest.mark.long
@pytest.mark.parametrize("cls, values", [
    (Chosen, ["relu", "tanh", "relu", "tanh"]), (Scaled, [2.0, 2, 3, True, 2.0]),
    (Scaled, [torch.tensor(2.0), torch.rand(1, WIDTH), torch.rand(E, 1), torch.rand(1),
              torch.rand(WIDTH), torch.tensor(3.0), torch.rand(E, WIDTH)])])
def test_arguments_that_change(emulated, cls, values):
    """Over the same edges, each repeated, with those before in between."""
    layer, x, ei = cls(), graphs.features(), graphs.square()
    for value in (one for other in values for one in (other, values[0], other)):
        expected = copy.deepcopy(layer)(x, ei, given=value)
        with emulated.on():
            assert close(layer(x, ei, given=value), expected)


class Tabled(Passing):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(KINDS, WIDTH))

    def message(self, x_i, x_j, given):
        return (x_j - x_i) * self.table[given]


@pytest.mark.long
def test_one_kind_for_all_edges_after_one_for_each(emulated):
    """A tensor without an axis."""
    layer, x, ei = Tabled(), graphs.features(), graphs.square()
    for kinds in (torch.arange(E) % KINDS, torch.tensor(2)):
        expected = layer(x, ei, given=kinds)
        with emulated.on(on_fallback="native"):
            for _ in range(3):
                assert close(layer(x, ei, given=kinds), expected)


class MappedLast(MessagePassing):
    def __init__(self):
        super().__init__(aggr="add")
        self.lin = nn.Linear(WIDTH, 8)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return self.lin(torch.tanh(x_j - x_i))


@pytest.mark.long
@pytest.mark.parametrize("called", [False, True])
def test_a_bias_that_is_broadcast_in_the_last_map(emulated, called):
    layer, x, ei = MappedLast(), graphs.features(), graphs.square()
    with emulated.on():
        for _ in range(3 * called):
            layer(x, ei)
    layer.lin.bias.data = torch.full((1,), 0.5)
    expected = layer(x, ei)
    with emulated.on(on_fallback="native"):
        assert close(layer(x, ei), expected)


class MappedAtBoth(MessagePassing):
    def __init__(self):
        super().__init__(aggr="add")
        self.lin = nn.Linear(2 * WIDTH, 8)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return torch.relu(self.lin(torch.cat([x_i, x_j], -1)))


class ScoredAtBoth(MessagePassing):
    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.lin = nn.Linear(2 * WIDTH, 2)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j, index, ptr, size_i):
        score = F.leaky_relu(self.lin(torch.cat([x_i, x_j], -1)))
        return softmax(score, index, ptr, size_i).unsqueeze(-1) * x_j.unsqueeze(1)


@pytest.mark.long
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("what", ["rows", "dtype"])
@pytest.mark.parametrize("make", [MappedLast, MappedAtBoth, ScoredAtBoth])
def test_maps_that_torch_refuses(emulated, make, what, called):
    layer, x, ei = make(), graphs.features(), graphs.square()
    with emulated.on():
        for _ in range(3 * called):
            layer(x, ei)
    lin = layer.lin
    if what == "rows":
        lin.weight.data = lin.weight.data[:1].clone()
    else:
        lin.bias.data = lin.bias.data.half()
    with pytest.raises(RuntimeError):
        layer(x, ei)
    with emulated.on(on_fallback="native"), pytest.raises(RuntimeError):
        layer(x, ei)


@pytest.mark.long
@pytest.mark.parametrize("rows", [E - 1, 2])
def test_tensors_that_fit_nothing(emulated, rows):
    layer, x, ei = Scaled(), graphs.features(), graphs.square()
    for _ in range(2):
        with emulated.on(on_fallback="native"), pytest.raises(RuntimeError, match="must match"):
            layer(x, ei, given=torch.rand(rows, WIDTH))


@pytest.mark.long
def test_a_table_that_grows(emulated):
    layer, x, ei = Relational(), graphs.features(), graphs.square()
    for kinds in (KINDS, KINDS + 3, KINDS):
        layer.relations = nn.Parameter(torch.randn(kinds, WIDTH))
        expected = layer(x, ei)
        with emulated.on():
            for _ in range(2):
                assert close(layer(x, ei), expected)
    assert routes(layer) == {"cuda": 12}


def test_kinds_that_the_table_has_not(emulated):
    layer, x, ei = Relational(), graphs.features(), graphs.square()
    layer.relations = nn.Parameter(torch.randn(KINDS - 1, WIDTH))
    with emulated.on(on_fallback="native"), pytest.raises(IndexError):
        layer(x, ei)
