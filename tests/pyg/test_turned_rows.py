"""Messages whose heads come before the edges; rows in piles, such as those of several experts; and
einsum with "..." in it."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.utils import softmax

from tests.pyg.generated_calls import arguments, stays_native
from tests.pyg.generated_layers import WIDTH, Message
from tests.pyg.judge import close, compare

HEADS = 3


class HeadsFirst(Message):
    def message(self, x_i, x_j, index, ptr, size_i):
        query = x_i.view(-1, HEADS, 4).transpose(0, 1)
        key = torch.permute(x_j.view(-1, HEADS, 4), (1, 0, 2))
        scores = softmax((query * key).sum(dim=-1) / 2.0, index, ptr, size_i, dim=1)
        return (scores.unsqueeze(-1) * key).transpose(0, 1).reshape(-1, WIDTH)


class HeadsOverEdges(Message):
    """Back and forth, and channels before heads."""

    def message(self, x_i, x_j, index, size_i):
        query, key = x_i.view(-1, HEADS, 4).permute(2, 0, 1), x_j.view(-1, HEADS, 4).permute(2, 0, 1)
        mixed = torch.tanh(query - key).permute(1, 2, 0)
        scores = softmax(mixed.mean(-1).t().t(), index, num_nodes=size_i)
        return (mixed * scores[..., None]).permute(0, 2, 1).flatten(1)


class Rotated(Message):
    """A map of heads that are the last dimension but one."""

    def __init__(self, aggr="add"):
        super().__init__(aggr)
        self.map = nn.Linear(HEADS, HEADS)

    def message(self, x_i, x_j):
        turned = self.map((x_j - x_i).view(-1, HEADS, 4).permute(2, 0, 1)).contiguous()
        return F.relu(turned).permute(1, 0, 2).reshape(-1, WIDTH)


class Experts(Message):
    """Several networks, weighted by a gate."""

    def __init__(self, aggr="add"):
        super().__init__(aggr)
        self.nets = nn.ModuleList(nn.Linear(WIDTH, 6) for _ in range(HEADS))
        self.gate, self.scale = nn.Linear(WIDTH, HEADS), nn.Parameter(torch.rand(HEADS, 1))

    def message(self, x_i, x_j):
        outs = torch.stack([net(x_j) for net in self.nets], dim=1)
        gate = torch.softmax(self.gate(x_i), dim=-1)
        first = outs[:, 0] + outs[:, -1]
        return (torch.tanh(outs * self.scale) * gate.unsqueeze(-1)).sum(dim=1) + first


class ExpertsOfKinds(Message):
    def __init__(self, aggr="add"):
        super().__init__(aggr)
        self.nets = nn.ModuleList(nn.Linear(WIDTH, 5) for _ in range(HEADS))

    def forward(self, x, edge_index, kind):
        return self.propagate(edge_index, x=x, kind=kind)

    def message(self, x_j, kind):
        outs = torch.stack([net(x_j) for net in self.nets], dim=-2)
        picked = F.one_hot(kind, HEADS).to(x_j.dtype)
        return torch.einsum("...h,...hc->...c", picked, outs)


class Piled(Message):
    """Other operations on a pile."""

    def __init__(self, aggr="add"):
        super().__init__(aggr)
        self.weights = nn.Parameter(torch.randn(2, WIDTH))

    def message(self, x_i, x_j):
        both = torch.stack((x_i, x_j), 1)
        scores = F.leaky_relu((both * self.weights).sum(-1))
        weights = torch.softmax(scores, 1)
        return (both * weights.unsqueeze(2)).flatten(1) * both.norm(dim=-1).sum(1, keepdim=True)


class Dots(Message):
    def message(self, x_i, x_j):
        heads = x_i.view(-1, HEADS, 4), x_j.view(-1, HEADS, 4)
        scores = torch.einsum("...d,...d->...", *heads)
        return torch.einsum("eh, ehc -> ehc", [torch.tanh(scores), heads[1]]).flatten(1)


TAKEN = [HeadsFirst, HeadsOverEdges, Rotated, Experts, ExpertsOfKinds, Piled, Dots]


@pytest.mark.parametrize("aggr", ["add", "max"])
@pytest.mark.parametrize("cls", TAKEN)
def test_values_and_gradients(kernels, cls, aggr):
    x, ei, _ = arguments(cls)
    compare(kernels, cls(aggr), x, ei, *([torch.randint(0, HEADS, ei.shape[1:])]
                                     if cls is ExpertsOfKinds else []))


@pytest.mark.long
@pytest.mark.parametrize("cls", [HeadsFirst, Experts, Dots])
@pytest.mark.parametrize("edges", [0, 1, 2, HEADS, 4, 12])
def test_few_edges(emulated, cls, edges):
    """As many as there are heads or channels, too."""
    x, layer = arguments(Message)[0], cls()
    ei = torch.randint(0, len(x), (2, edges))
    with emulated.on(on_fallback="native"):
        got = layer(x, ei)
    assert close(got, layer(x, ei))


class TurnedThenFilled(Message):
    """A view sees what is written to the rows."""

    def message(self, x_i, x_j):
        out = x_j - x_i
        view = out.view(-1, HEADS, 4).transpose(0, 1)
        out[:, :4] = 1.0
        return view.transpose(0, 1).reshape(-1, WIDTH) * x_i


class OverHeads(Message):
    """Softmax over all heads, before the edges."""

    def message(self, x_i, x_j):
        heads = (x_i * x_j).view(-1, HEADS, 4).transpose(0, 1)
        return torch.softmax(heads, dim=0).transpose(0, 1).reshape(-1, WIDTH)


class PileOfEdges(Message):
    def message(self, x_i, x_j):
        return torch.stack((x_i, x_j)).permute(1, 0, 2).flatten(1)


@pytest.mark.parametrize("cls", [TurnedThenFilled, OverHeads, PileOfEdges])
def test_what_stays_native(emulated, cls):
    stays_native(emulated, cls())


class NoSuchView(Message):
    def message(self, x_j):
        return x_j.view(-1, HEADS, 4).transpose(0, 1).view(-1, WIDTH)


def test_views_that_the_host_refuses(emulated):
    x, ei, _ = arguments(Message)
    with emulated.on(on_fallback="native"), pytest.raises(RuntimeError, match="view"):
        NoSuchView()(x, ei)
