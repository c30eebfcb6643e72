"""What users' messages ask or make besides: lengths, ones, a softmax over all edges, functions of
torch in branches that are not taken."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.utils import scatter

import gnnaccel
from tests.pyg import graphs
from tests.pyg.generated_calls import arguments, routes
from tests.pyg.generated_layers import EDGE, WIDTH, Message
from tests.pyg.judge import close, compare


class Lengths(Message):
    """Of which a view has as many rows."""

    def message(self, x_i, x_j, edge_attr):
        out = torch.cat([x_j.unsqueeze(2), (x_j * edge_attr[:, :1]).unsqueeze(2)], dim=2)
        return out.reshape(len(out), -1) * torch.tanh(x_i[:, :1])


class Heads(Message):
    """Counts numbers of the layer."""

    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def message(self, x_i, x_j):
        return sum(lin(x_j - x_i) for lin in self.maps) / len(self.maps)


class Ones(Message):
    """As weights, and beside features."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH + 2, WIDTH)

    def message(self, x_i, x_j):
        w = torch.ones(x_j.size(0), 1, device=x_j.device, dtype=x_j.dtype)
        beside = torch.zeros((x_j.size(0), 1), device=x_j.device, dtype=x_j.dtype)
        return self.lin(torch.cat([x_j * x_i, x_j.new_ones(len(x_j), 1), beside], -1)) * w


class Counted(Message):
    """A mean by sums of ones."""

    def message(self, x_i, x_j):
        return torch.relu(x_j - x_i)

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        total = scatter(inputs, index, 0, dim_size, "add")
        ones = torch.ones(inputs.size(0), 1, device=inputs.device, dtype=inputs.dtype)
        return total / (scatter(ones, index, 0, dim_size, "add") + 1e-8)


class Rooted(Message):
    """With torch's functions that write over what they get."""

    def message(self, x_i, x_j):
        return x_j * torch.sigmoid(x_i)

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        mean = scatter(inputs, index, 0, dim_size, "mean")
        out = scatter(inputs * inputs, index, 0, dim_size, "mean") - mean * mean
        return torch.sqrt(F.relu_(out) + 1e-2) + torch.tanh_(mean * 2)


class OverEdges(Message):
    """A softmax over all edges: of what is at both ends, at one, and of a row of each edge."""

    def __init__(self):
        super().__init__()
        self.att, self.one, self.of_edge = (nn.Linear(n, 1) for n in (2 * WIDTH, WIDTH, EDGE))

    def message(self, x_i, x_j, edge_attr):
        alpha = torch.softmax(self.att(torch.cat([x_i, x_j], dim=1)), dim=0)
        beta = F.softmax(self.one(x_j).squeeze(-1), dim=0).unsqueeze(-1)
        return x_j * (alpha + beta) * 50 + x_i * self.of_edge(edge_attr).log_softmax(0)


class NotTaken(Message):
    """Names functions that are not followed."""

    def __init__(self):
        super().__init__()
        self.debug = False

    def padded(self, x):
        return F.pad(x, (0, 1)) if self.debug else x

    def message(self, x_i, x_j):
        if self.debug:
            torch.manual_seed(0)
            print("messages:", torch.randn(3), torch.get_num_threads())
        return self.padded(torch.tanh(x_j - x_i))


CLASSES = [Lengths, Heads, Ones, Counted, Rooted, OverEdges, NotTaken]


@pytest.mark.long
@pytest.mark.parametrize("cls", CLASSES)
def test_values_and_gradients(kernels, cls):
    for train in (True, False):
        compare(kernels, cls(), *arguments(cls), train=train)


@pytest.mark.parametrize("cls", [Lengths, Ones, OverEdges])
@pytest.mark.parametrize("edges", [1, 2, 7919])
def test_few_edges_and_as_many_as_stand_ins_have(kernels, cls, edges):
    ei, edge = torch.randint(0, graphs.N, (2, edges)), graphs.edge_features(edges, cls.edge)
    compare(kernels, cls(), graphs.features(), ei, edge)


@pytest.mark.long
def test_a_branch_that_is_taken_stays_native(emulated):
    """And what it does is done as often as there are calls."""

    layer, given = NotTaken(), arguments(NotTaken)
    with emulated.on(on_fallback="native"):
        layer(*given)
        layer.debug = True
        expected = F.pad(torch.tanh(given[0][given[1][0]] - given[0][given[1][1]]), (0, 1))
        state = torch.get_rng_state()
        got = layer(*given)
    assert got.shape[-1] == WIDTH + 1 == expected.shape[-1]
    torch.manual_seed(0)
    torch.randn(3)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    with emulated.on(on_fallback="native"):
        layer(*given)
    assert torch.equal(torch.get_rng_state(), after)


class Seeds(Message):
    def message(self, x_i, x_j):
        torch.manual_seed(1)
        return x_j * torch.relu(x_i)


class Compares(Message):
    def message(self, x_i, x_j):
        return x_j * torch.relu(x_i) if len(x_j) > 5 else x_j


class Whole(Message):
    def message(self, x_i, x_j):
        return x_j * torch.ones(x_j.size(0), 1, dtype=torch.long, device=x_j.device) / 2 + x_i


class Moved(Message):
    """Takes the dtype of rows for a tensor of the layer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def message(self, x_i, x_j):
        return x_j * self.weight.to(x_j) + x_i


class Filled(Message):
    """Takes it for ones, which have the shape of no rows."""

    def message(self, x_i, x_j):
        return x_j * torch.relu(x_i) + torch.ones(1, WIDTH).to(x_j)


class Padded(Message):
    """Ones beside rows at one end, which tell how many there are."""

    def message(self, x_i, x_j):
        return torch.cat([x_j, x_j.new_ones(x_j.size(0), 2)], -1)


class Weighed(Message):
    """Of numbers of the layer, beside such rows."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def message(self, x_i, x_j):
        return torch.cat([torch.ones_like(x_j) * self.weight, torch.tanh(x_j)], -1)


class Multiplied(Message):
    """A matrix of ones for each edge, by such rows."""

    def message(self, x_i, x_j):
        ones = torch.ones(x_j.size(0), 3, 2, device=x_j.device, dtype=x_j.dtype)
        return torch.bmm(ones, x_j.view(-1, 2, WIDTH // 2)).sum(1)


@pytest.mark.parametrize("cls", [Padded, Moved, Filled])
def test_ones_and_weights_beside_rows(kernels, cls):
    compare(kernels, cls(), *arguments(cls)[:2])


@pytest.mark.parametrize("cls", [Weighed, Multiplied])
def test_forms_of_others_stay_native(kernels, cls):
    layer, given = cls(), arguments(cls)
    with kernels.on(on_fallback="native"):
        got = layer(*given)
    with gnnaccel.disabled():
        assert torch.equal(got, layer(*given))


@pytest.mark.parametrize("cls", [Seeds, Compares, Whole])
def test_others_stay_native(emulated, cls):
    layer, given = cls(), arguments(cls)
    expected = layer(*given)
    state = torch.random.get_rng_state()
    torch.rand(3)
    drawn = torch.random.get_rng_state()
    gnnaccel.reset_stats()
    with emulated.on(on_fallback="native"):
        assert close(layer(*given), expected)
    assert routes(layer) == {"native": 1} and not torch.equal(state, drawn)
