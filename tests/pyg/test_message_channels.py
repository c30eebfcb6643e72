"""Operations on the channels of a message, of one end of the edge and of both."""
from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import degree, softmax

from tests.pyg import graphs
from tests.pyg.generated_calls import both, routes
from tests.pyg.generated_layers import Message
from tests.pyg.graphs import F as WIDTH
from tests.pyg.judge import close, compare
from tests.pyg.test_generated_changes import each_seen


class Standard(Message):
    """A norm by hand, of the source and of both ends."""

    def message(self, x_i, x_j):
        out = (x_j - x_j.mean(-1, keepdim=True)) / (x_j.std(-1, keepdim=True) + 1e-5)
        both = x_j * x_i
        return out + both / torch.sqrt(both.var(dim=-1, unbiased=False, keepdim=True) + 1e-3)


class Extremes(Message):
    def message(self, x_i, x_j):
        return (x_i * x_j.amax(-1, keepdim=True) - (x_j - x_i).amin(dim=1, keepdim=True)
                + torch.logsumexp(x_j + x_i, -1, keepdim=True))


class Logarithms(Message):
    def __init__(self):
        super().__init__()
        self.of_one, self.of_both = nn.LogSoftmax(-1), nn.Softmax(dim=1)

    def message(self, x_i, x_j):
        return self.of_one(x_j) * F.softmin(x_i, dim=-1) + self.of_both(x_j - x_i)


class Cumulative(Message):
    def message(self, x_i, x_j):
        return x_j.cumsum(-1) * x_i + torch.cumsum(x_j * x_i, dim=1)


class Gated(Message):
    def __init__(self):
        super().__init__()
        self.lin, self.glu = nn.Linear(2 * WIDTH, 2 * WIDTH), nn.GLU()

    def message(self, x_i, x_j):
        out = self.lin(torch.cat([x_i, x_j], -1))
        return F.glu(out) + self.glu(out * 0.5)


class Similar(Message):
    def message(self, x_i, x_j):
        return x_j * F.cosine_similarity(x_i, x_j, dim=-1).unsqueeze(-1) + (
            x_i * torch.cosine_similarity(x_i * x_j, x_j).view(-1, 1))


class Dots(Message):
    def message(self, x_i, x_j):
        heads_i, heads_j = x_i.unflatten(-1, (3, 4)), x_j.unflatten(-1, (3, 4))
        score = torch.linalg.vecdot(heads_i, heads_j, dim=-1) * 0.5
        return (score.tanh().unsqueeze(-1) * heads_j).flatten(-2) + (
            x_i * torch.linalg.vecdot(x_j, x_i).unsqueeze(1))


class Distant(Message):
    def message(self, x_i, x_j):
        far = F.pairwise_distance(x_i, x_j, keepdim=True)
        return x_j * torch.exp(-far) + x_i * F.pairwise_distance(x_i, x_j, p=1).unsqueeze(1)


class Rotated(Message):
    """RotatE's and ComplEx's: halves side by side, in turns."""

    def message(self, x_i, x_j):
        (a, b), (c, d) = x_j.chunk(2, -1), x_i.chunk(2, -1)
        return torch.stack([a * c - b * d, a * d + b * c], dim=-1).flatten(1)


class ByClass(Message):
    """A map for each class of channels, of uneven pieces of both ends."""

    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleList([nn.Linear(2 * width, 4) for width in (3, 3, 2, 2, 2)])

    def message(self, x_i, x_j):
        pieces = zip(torch.tensor_split(x_i, 5, dim=1), x_j.tensor_split(5, dim=-1))
        score = torch.cat([one(torch.cat(ends, 1)) for one, ends in zip(self.maps, pieces)], 1)
        return score.tensor_split((4,), 1)[1].sum(-1, keepdim=True).tanh() * x_j


class Angles(Message):
    """Of PPFNet: numbers of the edge beside one another."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, WIDTH)

    def message(self, x_i, x_j):
        far = torch.linalg.norm(x_i[:, :3] - x_j[:, :3], dim=-1)
        kinds = [far, torch.linalg.vector_norm(x_j, dim=1), (x_i * x_j).sum(-1)]
        return self.lin(torch.stack(kinds, dim=1)) * x_j


class Repeated(Message):
    """SAN's: what is divided beside what divides."""

    def message(self, x_i, x_j):
        x_i, x_j = x_i.view(-1, 3, 4), x_j.view(-1, 3, 4)
        score = torch.exp((x_i * x_j).sum(-1, keepdim=True).clamp(-2, 2))
        return torch.cat([x_j * score, score.expand(-1, -1, 4)], -1).flatten(1)


class RepeatedAs(Message):
    def message(self, x_i, x_j):
        x_j = x_j.view(-1, 3, 4)
        return (x_j * x_i[:, :3].unsqueeze(-1).expand_as(x_j)).reshape(-1, WIDTH)


class Filled(Message):
    def message(self, x_i, x_j):
        return torch.where(x_j > x_i, x_j * x_i, torch.zeros_like(x_i)) + (
            torch.ones_like(x_j) - x_i)


FORMS = [Standard, Extremes, Logarithms, Cumulative, Gated, Similar, Dots, Distant, Rotated, ByClass,
         Angles, Repeated, RepeatedAs, Filled]


@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients(kernels, form):
    compare(kernels, form(), graphs.features(), graphs.square())


@pytest.mark.parametrize("form", [Standard, Extremes, Similar, Distant, Angles])
def test_at_zero(emulated, form):
    """Where ends are equal, or rows are zero, gradients are torch's."""
    layer, ei = form(), graphs.square()
    ei = torch.cat([ei, torch.arange(6).expand(2, -1)], 1)
    x = graphs.features().round()
    x[:4], x[4:7] = 0, 1
    found = []
    for route in (False, True):
        given = x.clone().requires_grad_()
        with emulated.on() if route else contextlib.nullcontext():
            out = layer(given, ei)
            out.sin().sum().backward()
        found.append((out, given.grad))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, 1e-4, 1e-4 * max(1.0, b.detach().abs().max().item()), equal_nan=True)


class OverRows(Message):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def message(self, x_i, x_j):
        return self.function(x_j - x_i) * x_j


@pytest.mark.parametrize("function", [
    lambda t: t.std(0), lambda t: t.cumsum(0), lambda t: t.cumsum(dim=-2),
    lambda t: torch.cumsum(t, axis=0), lambda t: t.var(0, keepdim=True), lambda t: t.std(),
    lambda t: t.amax((0, 1)), lambda t: t.log_softmax(0), lambda t: F.softmin(t, dim=0),
    lambda t: t.logsumexp(0), lambda t: torch.zeros_like(t), lambda t: F.glu(t.t(), 0).sum(),
    lambda t: F.cosine_similarity(t, t, dim=0)])
def test_over_edges(emulated, function):
    """All edges together: the host does that."""
    layer, x, ei = OverRows(function), graphs.features(), graphs.square()
    both(emulated, layer, x, ei, on_fallback="native")


class Nothing(Message):
    def message(self, x_i, x_j):
        return torch.ones_like(x_j)


def test_a_message_of_nothing(emulated):
    both(emulated, Nothing(), graphs.features(), graphs.square(), on_fallback="native")
    assert routes(Nothing()) == {"native": 1}


class Frequencies(MessagePassing):
    """FAGCN's: a number for each node, without an axis."""

    def __init__(self, **options):
        super().__init__(node_dim=0, **options)
        self.gate = nn.Linear(2 * WIDTH, 1)

    def forward(self, x, edge_index):
        deg = degree(edge_index[1], x.size(0)).to(x).clamp(min=1)
        return self.propagate(edge_index, d=deg.pow(-0.5) * x[:, 0], h=x)

    def message(self, d_i, d_j, h_i, h_j):
        gate = torch.tanh(self.gate(torch.cat([h_i, h_j], dim=1))).squeeze(-1)
        return h_j * (gate * d_i * d_j).unsqueeze(-1)


@pytest.mark.parametrize("aggr", ["add", "max"])
def test_numbers_of_nodes(kernels, aggr):
    compare(kernels, Frequencies(aggr=aggr), graphs.features(), graphs.square())


class Lonely(MessagePassing):
    """Of such numbers alone."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, d=x[:, 0].contiguous())

    def message(self, d_i, d_j):
        return torch.tanh(d_j - d_i)


def test_numbers_alone(emulated):
    layer, x, ei = Lonely(node_dim=0), graphs.features(), graphs.square()
    expected = layer(x, ei)
    with emulated.on(on_fallback="native"):
        assert close(layer(x, ei), expected)


class Turned(Message):
    """Vector neurons: linear maps of the dimension before the last; one of both ends."""

    def __init__(self):
        super().__init__()
        self.one, self.both = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)

    def message(self, x_i, x_j):
        x_i, x_j = x_i.view(-1, 3, 4), x_j.view(-1, 3, 4)
        one = self.one(x_j.transpose(-1, -2)).transpose(-1, -2)
        both = self.both(torch.tanh(x_i * x_j).permute(0, 2, 1)).mT
        swapped = x_i.transpose(1, 2).contiguous().view(-1, 12)  # of which no view would do
        return (both.tanh() * one).flatten(1) + swapped


class TurnedInPlace(Message):
    def message(self, x_j):
        x_j = x_j.view(-1, 3, 4)
        turned = x_j.transpose(1, 2)
        turned += 1.0
        return (turned.transpose(1, 2) * x_j).flatten(1)


def test_turned_channels(kernels):
    compare(kernels, Turned(), graphs.features(), graphs.square())
    both(kernels, TurnedInPlace(), graphs.features(), graphs.square(), on_fallback="native")


class Roots(Message):
    """Numbers of numpy's: on the layer, as an argument and on the left."""

    def __init__(self):
        super().__init__()
        self.scale = np.sqrt(12.0)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, shift=np.float64(0.25))

    def message(self, x_i, x_j, shift):
        return self.scale * torch.tanh(x_i * x_j / self.scale + shift)


def test_numbers_of_numpy(kernels):
    layer = Roots()
    compare(kernels, layer, graphs.features(), graphs.square())
    each_seen(kernels, layer, graphs.features(), graphs.square(),
              changes=(lambda: setattr(layer, "scale", np.sqrt(3.0)),))


class UpToLast(Message):
    """A softmax that is told of nodes up to the last that an edge enters."""

    def message(self, x_i, x_j, index, ptr):
        scores = (x_i * x_j).sum(-1, keepdim=True)
        return softmax(scores, index, ptr, index.max() + 1) * x_j


def test_softmax_up_to_the_last_node(kernels):
    ei = graphs.square()
    ei[1, ei[1] > 3] = 3
    compare(kernels, UpToLast(), graphs.features(), ei)
