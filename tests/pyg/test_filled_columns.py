"""Messages that fill columns of rows one after another, and rows side by side in other dimensions
than the last."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter

import gnnaccel
from tests.pyg.generated_calls import arguments, both, routes
from tests.pyg.generated_layers import WIDTH, Message
from tests.pyg.judge import close, compare


class FilledDescriptor(Message):
    """Scene graphs: differences and ratios of the ends."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def message(self, x_i, x_j):
        out = torch.zeros_like(x_i)
        out[:, 0:3] = x_i[:, 0:3] - x_j[:, 0:3]
        out[:, 3:] = torch.tanh(x_i[:, 3:] * x_j[:, 3:])
        return self.lin(out)


class FilledTwice(Message):
    """Columns that are written again, by their number, from the end, and a number."""

    def message(self, x_i, x_j):
        out = x_j - x_i
        out[:, 2:7] = torch.relu(x_j[:, 2:7])
        out[..., 4] = x_i[:, 0] * x_j[:, 1]
        out[:, -2:] = 0.5
        return out * torch.sigmoid(x_i)


class FilledTowers(Message):
    """PNA of old: a network for each tower."""

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList(nn.Linear(WIDTH // 2, 3) for _ in range(4))

    def message(self, x_i, x_j):
        x_i, x_j = x_i.view(-1, 4, 3), x_j.view(-1, 4, 3)
        rows = torch.cat([x_i, x_j], dim=-1)
        out = torch.zeros((rows.shape[0], 4, 3), device=x_i.device, dtype=x_i.dtype)
        for tower, net in enumerate(self.nets):
            out[:, tower, :] = net(rows[:, tower, :])
        return out.view(-1, WIDTH)


class StackedVectors(Message):
    """Vectors of source and edge in one list, then mapped."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(5, 4, bias=False)

    def message(self, x_i, x_j, edge_attr):
        vectors = torch.cat([x_j.view(-1, 4, 3), edge_attr[:, None, :3]], dim=-2)
        return self.map(vectors.transpose(-1, -2)).transpose(1, 2).reshape(-1, 12) * x_i


class FilledCopies(Message):
    """A copy has memory of its own."""

    edge = WIDTH

    def message(self, x_i, x_j, edge_attr):
        out, edge = x_j.clone(), torch.clone(edge_attr)
        out[:, :4] = torch.tanh(x_i[:, :4])
        edge[:, 4:] = x_i[:, 4:]
        return out + 2 * x_j + torch.sin(edge - edge_attr)


@pytest.mark.long
@pytest.mark.parametrize("cls", [FilledDescriptor, FilledTwice, FilledTowers, StackedVectors,
                                 FilledCopies])
def test_values_and_gradients(kernels, cls):
    compare(kernels, cls(), *arguments(cls)[:3 if cls in (StackedVectors, FilledCopies) else 2])


class ManyVectors(MessagePassing):
    """Scalars and vectors; more vectors than dimensions of space, which are the last."""

    def __init__(self, aggr="add"):
        super().__init__(aggr=aggr, node_dim=0)
        self.lin = nn.Linear(4, 2 * WIDTH)

    def forward(self, x, edge_index, edge_attr):
        vectors = torch.stack([x, x.flip(1), x * 0.5], -1)
        return self.propagate(edge_index, x=x, v=vectors, edge_attr=edge_attr)

    def message(self, x_i, x_j, v_j, edge_attr):
        left, right = self.lin(edge_attr).chunk(2, -1)
        along = edge_attr[:, :3] / (edge_attr[:, 3:] ** 2 + 1)
        return x_i * x_j * left, v_j * left.unsqueeze(-1) + (
            x_j * right).unsqueeze(-1) * along.unsqueeze(1)

    def aggregate(self, inputs, index, dim_size):
        return tuple(scatter(one, index, 0, dim_size, reduce=self.aggr) for one in inputs)


@pytest.mark.parametrize("aggr", ["add", "mean"])
def test_vectors_in_the_last_dimension(kernels, aggr):
    compare(kernels, ManyVectors(aggr), *arguments(Message))


class FilledAlias(Message):
    """What lies in the memory of rows changes with them."""

    def message(self, x_i, x_j):
        out = x_j - x_i
        part = out[:, :3]
        out[:, 1] = x_i[:, 0]
        return torch.cat([part, out[:, 3:]], -1)


class FilledArgument(Message):
    """The caller's features of edges."""

    edge = WIDTH

    def message(self, x_j, edge_attr):
        edge_attr[:, 0] = 2.0
        return torch.tanh(x_j * edge_attr)


class FilledBroadcast(Message):
    def message(self, x_i, x_j):
        out = x_j - x_i
        out[:, 2:5] = x_i[:, :1]
        return out


class FilledRounded(Message):
    """Of another dtype than the rows."""

    def message(self, x_i, x_j):
        out = torch.zeros(x_j.size(0), WIDTH, dtype=torch.float16)
        out[:, :4] = x_j[:, :4]
        out[:, 4:] = x_i[:, 4:]
        return out.float()


class FilledWithoutGradient(Message):
    def message(self, x_i, x_j):
        out = x_j - x_i
        with torch.no_grad():
            out[:, :4] = 0.0
        return out


class FilledOver(Message):
    """A parameter of which nothing is left gets zeros for a gradient."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def message(self, x_i, x_j):
        out = torch.zeros_like(x_j)
        out[:, :5] = (x_j * self.weight)[:, :5]
        out[:, :7] = x_i[:, :7]
        out[:, 7:] = x_j[:, 7:] - x_i[:, 7:]
        return out


class FilledThenAggregated(Message):
    """The ``aggregate`` gets what the message left of its argument."""

    def message(self, x_i, x_j):
        x_j[:, :4] = torch.tanh(x_i[:, :4])
        return x_j * 2

    def aggregate(self, inputs, x_j, index, dim_size):
        return scatter(inputs, index, 0, dim_size) + scatter(x_j, index, 0, dim_size)


class FilledOneNumber(Message):
    """Columns that are one number in memory."""

    def message(self, x_i, x_j):
        out = (x_j[:, :1] * x_i[:, :1]).expand(-1, WIDTH)
        out[:, 0] = x_i[:, 3]
        return out * x_j


class FilledCopiedByTo(Message):
    def message(self, x_i, x_j):
        out = x_j.to(x_j.dtype, copy=True)
        out[:, 0] = x_i[:, 3]
        return out + 2 * x_j


class FilledMapped(Message):
    """Rows that were mapped before; so are those below that were stacked, joined, written into
    others, and reduced."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.randn(WIDTH, WIDTH))

    def message(self, x_i, x_j):
        mapped = x_j @ self.weight
        x_j[:, :4] = torch.tanh(x_i[:, :4])
        return mapped + x_j


class FilledStacked(Message):
    def message(self, x_i, x_j):
        both = torch.stack([x_i, x_j], 1)
        x_j[:, :4] = torch.tanh(x_i[:, :4])
        return both.sum(1) + x_j


class FilledJoined(Message):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.randn(2 * WIDTH, WIDTH))

    def message(self, x_i, x_j):
        filled = torch.zeros_like(x_j)
        mapped = torch.cat([filled, x_j], -1) @ self.weight
        filled[:, 1:3] = x_i[:, 1:3]
        return mapped + filled


class FilledValue(Message):
    def message(self, x_i, x_j):
        out, value = torch.zeros_like(x_j), torch.tanh(x_i - x_j)[:, :4] * 1
        out[:, :4] = value
        value[:, 1] = 3.0
        out[:, 4:8] = value
        return out


class FilledReduced(Message):
    def message(self, x_i, x_j, index, size_i):
        out = x_i * x_j
        sums = scatter(out, index, 0, size_i)
        out[:, :4] = 0.5
        return out + sums[index]


class FilledInAggregate(Message):
    def message(self, x_i, x_j):
        return torch.tanh(x_j) + x_i

    def aggregate(self, inputs, index, dim_size):
        inputs[:, :4] = 2.0
        return scatter(inputs, index, 0, dim_size)


class FilledBetweenReductions(Message):
    def message(self, x_j):
        return torch.tanh(x_j)

    def aggregate(self, inputs, index, dim_size):
        rows = inputs * 2
        before = scatter(rows, index, 0, dim_size)
        rows[:, :4] = 2.0
        return before * 3 + scatter(rows, index, 0, dim_size)


class FilledBesideMessages(Message):
    """The messages lie in the memory of an argument of the ``aggregate``."""

    def message(self, x_j):
        return x_j

    def aggregate(self, inputs, x_j, index, dim_size):
        x_j[:, :4] = 2.0
        return scatter(inputs, index, 0, dim_size)


@pytest.mark.parametrize("cls", [FilledAlias, FilledOver, FilledThenAggregated, FilledArgument,
                                 FilledBroadcast, FilledRounded, FilledWithoutGradient,
                                 FilledOneNumber, FilledCopiedByTo,
                                 FilledMapped, FilledStacked, FilledJoined, FilledValue,
                                 FilledReduced, FilledInAggregate, FilledBetweenReductions,
                                 FilledBesideMessages])
def test_what_stays_native(emulated, cls):
    layer, given = cls(), arguments(cls)
    expected, after = layer(*given[:2], given[2].clone()), given[2].clone()
    gnnaccel.reset_stats()
    with emulated.on(on_fallback="native"):
        got = layer(*given[:2], after)
    assert close(got, expected) and routes(layer) == {"native": 1}
    assert (after == given[2]).all() == (cls is not FilledArgument)


def test_features_that_nodes_gave_are_a_copy(emulated):
    """Rows gathered from nodes may be written over: the nodes' stay."""

    class FilledGathered(Message):
        def message(self, x_i, x_j):
            x_j[:, 0] = 3.0
            return torch.tanh(x_i * x_j)

    x, ei, _ = arguments(Message)
    before = x.clone()
    both(emulated, FilledGathered(), x, ei)
    assert torch.equal(x, before)
