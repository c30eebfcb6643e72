"""Messages as users write them that need something for each edge before they are reduced: networks
of both ends, attention of forms of its own, messages that keep something on the layer."""
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

from tests.pyg.generated_layers import EDGE, WIDTH, Message

HEADS, CHANNELS = 3, 4  # together as many as `WIDTH`


def network(*widths: int, act: type[nn.Module] = nn.SiLU, norm: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for left, right in zip(widths, widths[1:]):
        layers += [nn.Linear(left, right), *([nn.LayerNorm(right)] if norm else []), act()]
    return nn.Sequential(*layers)


class Deep(Message):
    """A network of four maps of both ends (symbolic regression, interaction networks)."""

    def __init__(self, aggr="add"):
        super().__init__(aggr)
        self.net = nn.Sequential(*network(2 * WIDTH, 16, 16, 8, act=nn.ReLU), nn.Linear(8, 6))

    def message(self, x_i, x_j):
        return self.net(torch.cat([x_i, x_j], dim=1))


class DeepBent(Message):
    """A network that ends with an activation, of both ends, the edge and their distance (EGNN, mesh
    networks)."""

    def __init__(self, aggr="mean"):
        super().__init__(aggr)
        self.first, self.second = nn.Linear(2 * WIDTH + EDGE + 1, 8), nn.Linear(8, 8)

    def message(self, x_i, x_j, edge_attr):
        far = ((x_i - x_j) ** 2)[:, :3].sum(-1, keepdim=True)
        found = F.silu(self.first(torch.cat([x_i, x_j, edge_attr, far], dim=-1)))
        return F.silu(self.second(found))


class Normed(Message):
    """A network with norms of layers in it."""

    def __init__(self):
        super().__init__("mean")
        act = nn.ReLU()  # one module, twice
        self.net = nn.Sequential(nn.Linear(2 * WIDTH, 8), nn.LayerNorm(8), act, nn.Linear(8, 8),
                                 nn.LayerNorm(8), act)

    def message(self, x_i, x_j):
        return self.net(torch.cat([x_i, x_j], dim=-1))


class GatedByItself(Message):
    """A network's result, gated by a map of it to one number."""

    def __init__(self):
        super().__init__()
        self.net, self.gate = network(2 * WIDTH, 8, 6), nn.Sequential(nn.Linear(6, 1), nn.Sigmoid())

    def message(self, x_i, x_j):
        found = self.net(torch.cat([x_i, x_j], -1))
        return self.gate(found) * found


class Ends(MessagePassing):
    """Passes maps of ``x`` on; subclasses say what their message is."""

    edge: int | None = EDGE

    def __init__(self, dropout: float = 0.0):
        super().__init__(aggr="add", node_dim=0)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.att = nn.Parameter(torch.randn(WIDTH))
        self.dropout = dropout

    def forward(self, x, edge_index, edge_attr=None, size=None):
        return self.propagate(edge_index, q=self.q(x), k=self.k(x), v=self.v(x),
                              edge_attr=edge_attr, size=size)


class Attended(Ends):
    """Softmax of a product of tanh of both ends' sum, values gated by the receiver."""

    def message(self, q_i, k_j, v_j, index, ptr, size_i):
        score = (self.att * torch.tanh(q_i + k_j)).sum(-1)
        alpha = softmax(score, index, ptr, size_i)
        alpha = F.dropout(alpha, p=self.dropout, training=self.training)
        return alpha.unsqueeze(-1) * (torch.sigmoid(q_i) * v_j)


class ByMap(Ends):
    """A score by a linear map to one number."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)

    def message(self, q_i, k_j, v_j, index, ptr, size_i):
        return v_j * softmax(self.score(torch.relu(q_i * k_j)), index, ptr, size_i)


class ByHeads(Ends):
    """Heads; keys and values with different maps of the edge; a bias in the product."""

    def __init__(self):
        super().__init__()
        self.for_keys, self.for_values = nn.Linear(EDGE, WIDTH), nn.Linear(EDGE, WIDTH)
        self.bias = nn.Parameter(torch.randn(1, HEADS, CHANNELS))

    def message(self, q_i, k_j, v_j, edge_attr, index, size_i):
        shape = -1, HEADS, CHANNELS
        keys = k_j.view(shape) + self.for_keys(edge_attr).view(shape)
        score = (q_i.view(shape) * keys + self.bias).sum(-1) / math.sqrt(CHANNELS)
        alpha = softmax(score, index, num_nodes=size_i)
        values = v_j.view(shape) + self.for_values(edge_attr).view(shape)
        return (values * alpha.unsqueeze(-1)).view(-1, WIDTH)


class Keeps(Ends):
    """Keeps its attention on the layer, for whoever looks at it."""

    def __init__(self):
        super().__init__()
        self.alpha = None

    def forward(self, x, edge_index, edge_attr=None):
        out = super().forward(x, edge_index, edge_attr)
        alpha, self.alpha = self.alpha, None
        return out, alpha

    def message(self, q_i, k_j, v_j, index, ptr, size_i):
        alpha = softmax((q_i * k_j).sum(dim=-1, keepdim=True) * 0.3, index, ptr, size_i)
        self.alpha = alpha
        return alpha * v_j


class WithoutSoftmax(Ends):
    """A sigmoid of a product of both ends, by a method of the layer."""

    def score(self, left, right):
        return torch.sigmoid((left * right).mean(-1, keepdim=True))

    def message(self, q_i, k_j, v_j):
        return self.score(q_i, k_j) * v_j


class HeadGates(Ends):
    """A gate for each head, from a sum over its channels; one for all of them, too."""

    def message(self, q_i, k_j, v_j, edge_attr):
        shape = -1, 2, WIDTH // 2
        gate = torch.sigmoid((q_i * k_j).view(shape).sum(-1, keepdim=True))
        values = v_j.view(shape) * gate + edge_attr[:, :1].unsqueeze(-1)
        return (values / (1 + values.square().mean(-1, keepdim=True))).view(-1, WIDTH)


class BySoftmaxMethod(Ends):
    """The softmax in a method that is handed the index."""

    def attend(self, score, at):
        return softmax(score, at)

    def message(self, q_i, k_j, v_j, index):
        return v_j * self.attend((q_i * torch.sin(k_j)).sum(-1), index).view(-1, 1)


class OfEachChannel(Ends):
    """A softmax for each channel (point transformers)."""

    def message(self, q_i, k_j, v_j, edge_attr, index, ptr, size_i):
        delta = edge_attr[:, :1]
        alpha = softmax(torch.tanh(q_i - k_j) + delta, index, ptr, size_i)
        return alpha * (v_j + delta)


class NormOfProduct(Ends):
    """A gate after a norm of a product of both ends."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def message(self, q_i, k_j, v_j):
        return torch.sigmoid(self.norm(q_i * k_j)) * v_j


class OverChannels(Ends):
    """Torch's softmax, over channels."""

    def message(self, q_i, k_j, v_j):
        return F.softmax(q_i * k_j, dim=-1) * v_j


class Dropped(Message):
    """Each edge has a mask of its own."""

    def message(self, x_i, x_j):
        return F.dropout((x_j - x_i).tanh(), 0.5, self.training)


class Distance(Message):
    """A sum over the channels of both ends."""

    def message(self, x_i, x_j):
        return x_j * torch.exp(-(x_j - x_i).square().sum(-1, keepdim=True))


class MapOfDifference(Message):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def message(self, x_i, x_j):
        return self.lin(x_j - x_i).relu()


class Swish(nn.Module):
    """An activation of the user's own."""

    def __init__(self):
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


class Layers(nn.Module):
    """A network of the user's own, which goes over a list of modules."""

    def __init__(self, *widths: int):
        super().__init__()
        self.maps = nn.ModuleList(map(nn.Linear, widths, widths[1:]))
        self.act, self.last = nn.ModuleList([Swish(), nn.Tanh()]), 2.0

    def forward(self, x):
        for at, one in enumerate(self.maps):
            x = self.act[at % 2](one(x))
        return x / self.last


class OwnModules(Message):
    def __init__(self):
        super().__init__()
        self.net = Layers(2 * WIDTH + EDGE, 8, 6)

    def message(self, x_i, x_j, edge_attr):
        return self.net(torch.cat([x_i, x_j, edge_attr], -1))


class Statistics(Message):
    """A norm over all edges, which keeps what it saw."""

    def __init__(self):
        super().__init__()
        self.lin, self.norm = nn.Linear(2 * WIDTH, 6), nn.BatchNorm1d(6)

    def message(self, x_i, x_j):
        return F.softplus(self.norm(self.lin(torch.cat([x_i, x_j], -1))))


class Embedded(MessagePassing):
    """Embeddings of the kinds of edges in a score; a parameter's rows, picked by them."""

    edge = None

    def __init__(self):
        super().__init__(aggr="add")
        self.kinds, self.scale = nn.Embedding(4, WIDTH), nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x, edge_index, edge_attr=None):
        kind = torch.arange(edge_index.shape[1], device=x.device) * 7 % 4
        return self.propagate(edge_index, x=x, kind=kind)

    def message(self, x_i, x_j, kind, index):
        score = F.leaky_relu((x_i * x_j * self.kinds(kind)).sum(-1), 0.2)
        return softmax(score, index).unsqueeze(-1) * x_j * self.scale[kind]


class SideBySide(Message):
    """Rows of both ends and the edge side by side, not in a linear map."""

    def message(self, x_i, x_j, edge_attr):
        found = torch.cat([x_i * 0.5, x_j, edge_attr], dim=-1)
        return found * torch.sigmoid(found.mean(-1, keepdim=True))


FORMS = [Deep, DeepBent, Normed, GatedByItself, Attended, ByMap, ByHeads, HeadGates, Keeps, WithoutSoftmax,
         BySoftmaxMethod, OfEachChannel, NormOfProduct, OverChannels, Dropped, Distance,
         MapOfDifference, OwnModules, Statistics, Embedded, SideBySide]
