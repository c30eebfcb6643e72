"""Messages whose statements write over what they have made, or over what they were given."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter, softmax

from tests.pyg import graphs
from tests.pyg.generated_calls import to
from tests.pyg.graphs import N
from tests.pyg.judge import close, compare
from tests.routes import emulated, gpu, one_thread  # noqa: F401

WIDTH = 8


class Message(MessagePassing):
    """Of rows that a map makes."""

    def __init__(self):
        super().__init__(aggr="add")
        self.map, self.act = nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2, inplace=True)
        self.table = nn.Embedding(16, WIDTH)

    def forward(self, x, edge_index, edge_attr):
        kinds = edge_index.sum(0) % 4
        return self.propagate(edge_index, x=self.map(x), edge_attr=edge_attr, kinds=kinds)


class Chain(Message):
    def message(self, x_i, x_j, edge_attr):
        out = x_j * edge_attr
        out.add_(1.0).mul_(0.5)
        out.sub_(x_i)
        return out


class Activations(Message):
    """What is changed is used by its own name, which has others."""

    def message(self, x_i, x_j):
        out = x_i - x_j
        same = out
        out.clamp_(max=2.0)
        self.act(same)
        turned = x_i + x_j
        F.relu_(turned)
        return out + same * turned


class Mixed(Message):
    """By numbers that a mask picks, by columns, and by operations."""

    def message(self, x_i, x_j):
        out = x_i + x_j
        out *= 2.0
        out[out > 3.0] = 3.0
        out.add_(x_i)
        out[:, :2] = x_j[:, :2]
        out.sub_(0.25)
        return out


class OfSums(Message):
    """What was summed, and what a softmax was taken of, is as it was then."""

    def message(self, x_i, x_j, index, size_i):
        gate = torch.sigmoid(x_i * x_j) + 0.1
        total = scatter(gate, index, dim=0, dim_size=size_i)
        share = gate * 1.0
        share.div_(total[index])
        score = (x_i * x_j).sum(-1)
        score.mul_(0.3)
        share *= softmax(score, index, num_nodes=size_i).unsqueeze(-1)
        return share * x_j


class Kinds(Message):
    """Whole numbers that are added up step by step."""

    def message(self, x_j, kinds):
        place = kinds * 3
        place += 1
        place.clamp_(max=9)
        return x_j * self.table(place) * (place + kinds).unsqueeze(-1)


class Map(Message):
    """The result of a map."""

    def message(self, x_i, x_j):
        out = self.map(x_i - x_j)
        out.mul_(0.5).add_(x_j)
        return torch.tanh(out)


class BothOf(Message):
    """A part of rows side by side is changed before these are mapped: not followed."""

    def __init__(self):
        super().__init__()
        self.pair = nn.Linear(2 * WIDTH, WIDTH)

    def message(self, x_i, x_j):
        out = x_i - x_j
        both = torch.cat([out, x_j], -1)
        out.mul_(2.0)
        return self.pair(both) + out


class AView(Message):
    """Of which there was a view: not followed."""

    def message(self, x_i, x_j):
        out = x_i - x_j
        rows = out.view(-1, 2, WIDTH // 2)
        out.mul_(2.0)
        return rows.reshape(-1, WIDTH) + out


class Detached(Message):
    def message(self, x_i, x_j):
        out = x_i - x_j
        before = out.detach()
        out.mul_(2.0)
        return before + out


class WithoutGradients(Message):
    """Gradients flow on as if nothing had been written: not followed."""

    def message(self, x_i, x_j):
        out = x_i - x_j
        with torch.no_grad():
            out = self.act(out)
        return out * x_j


FOLLOWED = [Chain, Activations, Mixed, OfSums, Kinds, Map]


def given() -> tuple[torch.Tensor, ...]:
    return torch.randn(N, WIDTH), graphs.square(), torch.randn(graphs.E, WIDTH)


@pytest.mark.long
@pytest.mark.parametrize("form", FOLLOWED)
def test_values_and_gradients(kernels, form):
    compare(kernels, form(), *given())


@pytest.mark.parametrize("form", [BothOf, AView, Detached, WithoutGradients])
def test_what_is_not_followed(kernels, form):
    layer, (x, edge_index, edge) = form().to(kernels.device), to(kernels.device, *given())

    def results():
        leaf = x.clone().requires_grad_()
        out = layer(leaf, edge_index, edge)
        return [out, *torch.autograd.grad(out.sin().sum(), (leaf, layer.map.weight))]

    expected = results()
    with kernels.on(on_fallback="native"):
        for found, host in zip(results(), expected):  # on a GPU the host's own sums vary
            assert (found - host).abs().max() <= 1e-4 * host.abs().max()


class Given(Message):
    """PyG hands the very rows that a message writes to on to the aggregate."""

    def aggregate(self, inputs, index, x_j, dim_size):
        return scatter(inputs * x_j, index, 0, dim_size)


class ByMask(Given):
    def message(self, x_j, edge_attr):
        x_j[x_j < 0.0] = 0.1
        return x_j * edge_attr


class ByColumns(Given):
    def message(self, x_j, edge_attr):
        x_j[:, :3] = edge_attr[:, :3]
        return x_j * edge_attr


class ByStatement(Given):
    def message(self, x_j, edge_attr):
        x_j.mul_(0.5)
        return x_j * edge_attr


@pytest.mark.parametrize("form", [ByMask, ByColumns, ByStatement])
def test_what_the_aggregate_is_handed(kernels, form):
    layer, args = form().to(kernels.device), to(kernels.device, *given())
    expected = layer(*args)
    with kernels.on(on_fallback="native"):
        assert close(layer(*args), expected)


class Repeated(Message):
    """Torch refuses to write to numbers that are one in memory."""

    def message(self, x_j, edge_attr):
        out = torch.tanh(edge_attr[:, :1]).expand(-1, WIDTH)
        out *= x_j
        return out


class Wider(Message):
    """And to write more numbers than there are."""

    def message(self, x_j, edge_attr):
        out = torch.tanh(edge_attr[:, :1])
        out *= x_j
        return out


class Halves(Message):
    """And halves to whole numbers."""

    def message(self, x_j, kinds):
        place = kinds * 3
        place *= 0.5
        return x_j * place.view(-1, 1)


@pytest.mark.parametrize("form", [Repeated, Wider, Halves])
def test_the_hosts_error(kernels, form):
    layer, args = form().to(kernels.device), to(kernels.device, *given())
    with pytest.raises(RuntimeError) as expected:
        layer(*args)
    with kernels.on(on_fallback="native"), pytest.raises(RuntimeError) as found:
        layer(*args)
    assert str(found.value) == str(expected.value)
