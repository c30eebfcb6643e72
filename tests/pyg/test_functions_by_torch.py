"""Functions and modules in messages that no kernel has: torch computes them, row by row."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.pyg.generated_calls import arguments, both, stays_native
from tests.pyg.generated_layers import WIDTH, Message
from tests.pyg.judge import close, compare


class Angles(Message):
    """Of one end, of both, and of the edge."""

    def message(self, x_i, x_j, edge_attr):
        near = torch.tanh(x_i - x_j)
        arcs = torch.acos(near * 0.9) + torch.atan(x_j) * torch.asin(0.5 * torch.sigmoid(x_i))
        return arcs + torch.hypot(x_i, x_j) + torch.logaddexp(near, edge_attr[:, :1]).sinh()


class CrossProducts(Message):
    def message(self, x_i, x_j):
        left, right = x_i.view(-1, 4, 3), x_j.view(-1, 4, 3)
        first = torch.cross(left, right, dim=-1)
        return (first + torch.linalg.cross(right, right - left)).flatten(1)


class Sorted(Message):
    def message(self, x_i, x_j):
        best, order = torch.topk(x_j, 5, dim=-1)
        largest = (x_i - x_j).max(dim=-1, keepdim=True)
        least = torch.min(x_i, dim=1)[0].unsqueeze(1)
        rows = torch.cat([best, x_j.sort(-1).values, largest.values, least], -1)
        return rows * torch.max(x_i[:, :1], x_j[:, :1]) + torch.gather(x_j, 1, order).sum(
            -1, keepdim=True)


class SideBySide(Message):
    """Repeated, padded, turned around and multiplied."""

    def message(self, x_i, x_j):
        rows = (x_j - x_i).repeat(1, 2) + torch.tile(x_i, (1, 2)) + F.pad(x_j, (0, WIDTH))
        rows = rows + torch.repeat_interleave(x_i * x_j, 2, dim=-1)
        return torch.flip(rows, [-1]) + torch.roll(rows, 1, dims=1) + rows[:, :3].prod(
            -1, keepdim=True)


class Weights(Message):
    """Weights in lists, by number and by name; a function by its name."""

    def __init__(self, aggr="add"):
        super().__init__(aggr)
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) for _ in range(2)])
        self.named = nn.ParameterDict({"scale": torch.rand(WIDTH), "shift": torch.rand(WIDTH)})
        self.activation = "leaky_relu"

    def message(self, x_i, x_j):
        rows = x_j @ self.weights[0] + x_i @ self.weights[1]
        rows = torch.addmm(self.named["shift"], rows, self.weights[0]) * self.named["scale"]
        return getattr(F, self.activation)(rows, 0.1) + torch.inner(x_j, self.weights[1])


class Cell(Message):
    def __init__(self, aggr="add"):
        super().__init__(aggr)
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def message(self, x_i, x_j):
        return self.cell(x_j, x_i)


class CellOfEdges(Message):
    def __init__(self, aggr="add"):
        super().__init__(aggr)
        self.cell = nn.GRUCell(WIDTH, WIDTH, bias=False)

    def message(self, x_i, x_j):
        return self.cell(x_i * x_j, torch.tanh(x_j - x_i))


class Modules(Message):
    def __init__(self, aggr="add"):
        super().__init__(aggr)
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.conv = nn.Conv1d(2, 3, 3, padding=1)
        self.rest = nn.Sequential(nn.Unflatten(1, (3, 4)), nn.Hardshrink(0.1), nn.Softmax(-1),
                                  nn.Flatten(), nn.Softshrink(0.01), nn.Threshold(0.02, 0.0))

    def message(self, x_i, x_j):
        rows = self.bilinear(x_i, x_j)
        return self.rest(rows) + self.conv(torch.stack([x_i, x_j], dim=1)).sum(1)


class Rms(Message):
    def __init__(self, aggr="add"):
        super().__init__(aggr)
        self.norm, self.plain = nn.RMSNorm(WIDTH), nn.RMSNorm(4, elementwise_affine=False)

    def message(self, x_i, x_j):
        return self.norm(x_j - x_i) * self.plain(x_j.view(-1, 3, 4)).flatten(1)


class Powers(Message):
    """Powers that are parameters, or rows."""

    def __init__(self, aggr="add"):
        super().__init__(aggr)
        self.power, self.powers = nn.Parameter(torch.tensor(1.7)), nn.Parameter(
            torch.rand(WIDTH) + 1)

    def message(self, x_i, x_j):
        rows = (x_j.abs() + 0.1) ** self.power + torch.pow((x_i - x_j).abs() + 0.1, self.powers)
        return rows + 1.5 ** (x_i * x_j).tanh() + self.power ** x_j.sigmoid()


class Groups(Message):
    def __init__(self, aggr="add"):
        super().__init__(aggr)
        self.norm, self.maps = nn.GroupNorm(3, WIDTH), nn.Parameter(torch.randn(WIDTH, 2, 2))

    def message(self, x_i, x_j):
        rows = self.norm(x_i * x_j) + F.group_norm(x_j, 2)
        left, right = rows.view(-1, 3, 4), x_j.view(-1, 4, 3)
        return torch.baddbmm(x_i[:, :9].view(-1, 3, 3), left, right).tanh().flatten(1)


TAKEN = [Powers, Groups, Angles, CrossProducts, Sorted, SideBySide, Weights, Cell, CellOfEdges, Modules]
TAKEN += [Rms] if hasattr(nn, "RMSNorm") else []


@pytest.mark.parametrize("aggr", ["add", "max"])
@pytest.mark.parametrize("cls", TAKEN)
def test_values_and_gradients(kernels, cls, aggr):
    compare(kernels, cls(aggr), *arguments(cls)[:3 if cls is Angles else 2])


@pytest.mark.parametrize("cls", TAKEN)
@pytest.mark.parametrize("edges", [0, 1, 3, WIDTH])
def test_few_edges(emulated, cls, edges):
    x, layer = arguments(Message)[0], cls()
    given = x, torch.randint(0, len(x), (2, edges)), torch.randn(edges, 4)
    expected = layer(*given[:3 if cls is Angles else 2])
    with emulated.on(on_fallback="native"):
        got = layer(*given[:3 if cls is Angles else 2])
    assert close(got, expected)


@pytest.mark.long
def test_weights_in_lists_may_become_others(emulated):
    x, ei, _ = arguments(Message)
    layer = Weights()
    both(emulated, layer, x, ei)
    layer.weights[1] = nn.Parameter(torch.randn(WIDTH, WIDTH))
    both(emulated, layer, x, ei)
    layer.named["scale"] = nn.Parameter(torch.randn(1))
    both(emulated, layer, x, ei)
    layer.weights.append(nn.Parameter(torch.randn(2)))
    both(emulated, layer, x, ei)
    layer.activation = "elu"
    both(emulated, layer, x, ei)


@pytest.mark.long
def test_options_of_modules_may_become_others(emulated):
    x, ei, _ = arguments(Message)
    layer = Modules()
    both(emulated, layer, x, ei)
    layer.rest[1].lambd, layer.rest[5].value = 0.4, 0.3
    both(emulated, layer, x, ei)
    layer.conv.padding_mode = "circular"
    with emulated.on(on_fallback="native"):
        got = layer(x, ei)
    assert close(got, layer(x, ei))


@pytest.mark.long
def test_a_group_norm_may_become_another(emulated, monkeypatch):
    x, ei, _ = arguments(Message)
    layer = Groups()
    both(emulated, layer, x, ei)
    layer.norm.num_groups, layer.norm.eps = 4, 0.3
    both(emulated, layer, x, ei)
    with torch.no_grad():
        layer.norm.weight.mul_(3)
    both(emulated, layer, x, ei)
    monkeypatch.setattr(nn.GroupNorm, "forward", lambda self, x: x * 2)
    both(emulated, layer, x, ei, on_fallback="native")


def test_powers_of_what_is_not_positive(emulated):
    """A whole power of a negative number, and of zero, is one."""
    layer, (x, ei, _) = PowersOfSigns(), arguments(Message)
    x[:, 0] = 0
    both(emulated, layer, x, ei)
    compare(emulated, layer, x, ei)


class PowersOfSigns(Message):
    def __init__(self):
        super().__init__()
        self.register_buffer("power", torch.tensor(3.0))

    def message(self, x_j):
        return x_j ** self.power


class ByName(Message):
    activation = "softsign"

    def message(self, x_i, x_j):
        return getattr(F, self.activation)(x_i - x_j)


def test_a_function_by_its_name_is_replaced(emulated, monkeypatch):
    x, ei, _ = arguments(Message)
    layer = ByName()
    both(emulated, layer, x, ei)
    monkeypatch.setattr(F, "softsign", lambda rows: rows * 0)
    with emulated.on(on_fallback="native"):
        got = layer(x, ei)
    assert close(got, layer(x, ei))


def test_rows_of_nodes_that_no_edge_reads(emulated):
    """What they become does not reach gradients."""
    x, ei, _ = arguments(Message)
    x[3], keep = -1.0, (ei != 3).all(0)

    class Logs(Message):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def message(self, x_j):
            return torch.log2(self.lin(torch.log10(x_j)) ** 2 + 1)

    layer, found = Logs(), []
    for on in (False, True):
        given = (x.abs() + 0.1).index_fill(0, torch.tensor([3]), -1.0).requires_grad_()
        layer.zero_grad()
        if on:
            with emulated.on():
                layer(given, ei[:, keep]).sum().backward()
        else:
            layer(given, ei[:, keep]).sum().backward()
        found.append([given.grad, *[p.grad.clone() for p in layer.parameters()]])
    assert all(torch.allclose(a, b, 1e-4, 1e-5) for a, b in zip(*found))
    assert all(one.isfinite().all() for one in found[1])


class AlongEdges(Message):
    """Along the edges, by a dimension that is told, or by default."""

    def message(self, x_i, x_j):
        return torch.flip(x_j, [0]) + torch.roll(x_i, 1, dims=0)


class Rolled(Message):
    def message(self, x_j):
        return torch.roll(x_j, 1)


class SortedEdges(Message):
    def message(self, x_j):
        return x_j.sort(dim=0)[0] + torch.max(x_j, 0)[0]


class PaddedEdges(Message):
    def message(self, x_j):
        return F.pad(x_j, (0, 0, 1, -1))


class RepeatedEdges(Message):
    def message(self, x_j):
        return torch.repeat_interleave(x_j, 2, dim=0)[::2]


class ConvolvedEdges(Message):
    """Edges are the positions of one signal."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 1)

    def message(self, x_j):
        return self.conv(x_j.t()).t()


@pytest.mark.parametrize("cls", [AlongEdges, Rolled, SortedEdges, PaddedEdges, RepeatedEdges,
                                 ConvolvedEdges])
def test_what_stays_native(emulated, cls):
    stays_native(emulated, cls())


class Diagonal(Message):
    """A matrix for each edge with weights on its diagonal, between the numbers of another."""

    def __init__(self, aggr="add"):
        super().__init__(aggr)
        self.lin = nn.Linear(4, WIDTH)

    def message(self, x_j, edge_attr):
        matrix = torch.diag_embed(self.lin(edge_attr)).view(-1, WIDTH, WIDTH)
        return torch.matmul(x_j.unsqueeze(1), matrix).squeeze(1) + torch.diag_embed(
            x_j[:, :3], 1, dim1=-2, dim2=-1).flatten(1)[:, :WIDTH]


class DiagonalOfRows(Message):
    def message(self, x_i, x_j):
        return torch.diag_embed(x_j * x_i, dim1=0, dim2=2).sum(0)


@pytest.mark.parametrize("aggr", ["add", "max"])
def test_diagonals(kernels, aggr):
    compare(kernels, Diagonal(aggr), *arguments(Diagonal))


def test_diagonals_along_the_rows_stay_native(emulated):
    stays_native(emulated, DiagonalOfRows())


class DroppedByAnotherName(Message):
    """`torch.dropout` has its argument's name from elsewhere."""

    def message(self, x_i, x_j):
        return torch.dropout(torch.tanh(x_j - x_i), p=0.4, train=self.training)


@pytest.mark.parametrize("train", [True, False])
def test_dropout_by_another_name(emulated, train):
    compare(emulated, DroppedByAnotherName(), *arguments(Message)[:2], train=train)
