"""Messages as users write them that are neither a copy of a neighbour nor attention."""
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import MessagePassing

WIDTH, EDGE = 12, 4
SLOPE = 0.3  # read by a message


class Message(MessagePassing):
    """Passes ``x`` and features of edges on; subclasses say what their message is."""

    edge: int | None = EDGE  # features of an edge; None for one number without an axis of its own

    def __init__(self, aggr: str = "add", **options):
        super().__init__(aggr=aggr, **options)

    def forward(self, x, edge_index, edge_attr=None, size=None):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr, size=size)


class Difference(Message):
    def message(self, x_i, x_j):
        return torch.relu(x_j - x_i)


class Gate(Message):
    """Gated by terms of both ends that come from linear maps in the message."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def message(self, x_i, x_j):
        return x_j * torch.sigmoid(self.left(x_i) + self.right(x_j))


class NormedEdge(Message):
    """OGB's convolution for molecules: a norm beside the features of edges."""

    edge = WIDTH

    def forward(self, x, edge_index, edge_attr):
        norm = edge_attr.abs().sum(-1)
        return self.propagate(edge_index, x=x, edge_attr=edge_attr, norm=norm)

    def message(self, x_j, edge_attr, norm):
        return norm.view(-1, 1) * F.relu(x_j + edge_attr)


class Filter(Message):
    """SchNet's continuous filter, a network of the features of edges."""

    def __init__(self):
        super().__init__()
        self.nn = nn.Sequential(nn.Linear(EDGE, WIDTH), nn.Softplus(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, weights=self.nn(edge_attr),
                              cutoff=0.5 * (torch.cos(edge_attr[:, 0]) + 1.0))

    def message(self, x_j, weights, cutoff):
        return x_j * weights * cutoff.unsqueeze(-1)


class EdgeNetwork(Message):
    """The same with the network inside the message."""

    def __init__(self):
        super().__init__()
        self.nn = nn.Sequential(nn.Linear(EDGE, WIDTH), nn.Tanh())

    def message(self, x_j, edge_attr):
        return x_j * self.nn(edge_attr)


class TransE(Message):
    edge = WIDTH

    def message(self, x_i, x_j, edge_attr):
        return torch.abs(x_j + edge_attr - x_i)


class DistMult(Message):
    edge = WIDTH

    def message(self, x_i, x_j, edge_attr):
        return x_i * edge_attr * x_j


class Rotate(Message):
    """RotatE's real part: a rotation of complex numbers by the angles of a relation."""

    edge = WIDTH // 2

    def message(self, x_j, edge_attr):
        real, imaginary = x_j.chunk(2, dim=-1)
        return real * torch.cos(edge_attr) - imaginary * torch.sin(edge_attr)


class Crystal(Message):
    """CGConv's message."""

    def __init__(self):
        super().__init__("mean")
        self.lin_f, self.lin_s = (nn.Linear(2 * WIDTH + EDGE, WIDTH) for _ in range(2))

    def message(self, x_i, x_j, edge_attr):
        z = torch.cat([x_i, x_j, edge_attr], dim=-1)
        return self.lin_f(z).sigmoid() * F.softplus(self.lin_s(z))


class Halves(Message):
    """One linear map of all that there is, whose halves are a gate and what it lets through."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2 * WIDTH, 2 * WIDTH)

    def message(self, x_i, x_j):
        gate, value = self.lin(torch.cat((x_i, x_j), -1)).chunk(2, dim=-1)
        return gate.sigmoid() * value.tanh()


class Channels(Message):
    """Vectors of parameters, and one number."""

    def __init__(self):
        super().__init__("mean")
        self.scale, self.shift = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(1,
                                                                                           WIDTH))
        self.alpha = nn.Parameter(torch.tensor(0.7))

    def message(self, x_i, x_j):
        return torch.exp(-self.alpha * (x_j - x_i).square()) * self.scale + self.shift * x_j


class Gaussian(Message):
    """A kernel of a number at each edge, with a width that is learned."""

    edge = None

    def __init__(self):
        super().__init__()
        self.sigma = nn.Parameter(torch.ones(1))

    def message(self, x_j, edge_attr):
        return x_j.tanh() * torch.exp(-edge_attr.pow(2) / self.sigma).unsqueeze(-1)


class Clamped(Message):
    edge = WIDTH

    def message(self, x_i, x_j, edge_attr):
        return torch.clamp(x_j * edge_attr, -0.5, 0.8) + (x_i - x_j).clamp(min=0.1)


class Chosen(Message):
    def message(self, x_i, x_j):
        return torch.where(x_j > x_i, x_j - x_i, 0.1 * x_j * x_i)


class Bends(Message):
    """One bend after the other."""

    edge = WIDTH

    def message(self, x_i, x_j, edge_attr):
        return (F.leaky_relu(x_j + x_i, 0.2) + F.elu(x_j - edge_attr) + F.silu(x_i * edge_attr)
                + F.gelu(x_j + edge_attr) + F.gelu(x_i, approximate="tanh"))


class Roots(Message):
    """Roots, logarithms and quotients."""

    def message(self, x_i, x_j):
        s = x_j * x_j + x_i * x_i + 0.5
        return torch.sqrt(s) + torch.log(s) / s - x_j * torch.rsqrt(s) + (1.0 + s) ** 1.5


class Extremes(Message):
    def message(self, x_i, x_j):
        return torch.maximum(x_i, x_j) - 2 * torch.minimum(x_i, x_j * 0.5)


class Heads(Message):
    """Heads with a weight at each edge, flattened in the end."""

    edge = 3

    def __init__(self):
        super().__init__()
        self.heads = 3

    def message(self, x_j, x_i, edge_attr):
        out = (x_j + x_i.tanh()).view(-1, self.heads, x_j.size(-1) // 3)
        return (out * edge_attr.sigmoid().unsqueeze(-1)).view(-1, x_j.shape[1])


class Stacked(Message):
    """Heads that messages keep, with a vector of parameters each."""

    def __init__(self):
        super().__init__(node_dim=0)
        self.att = nn.Parameter(torch.randn(1, 3, WIDTH // 3))
        self.each = nn.Parameter(torch.randn(3, 1))

    def forward(self, x, edge_index, edge_attr=None):
        return self.propagate(edge_index, x=x.view(-1, 3, WIDTH // 3))

    def message(self, x_i, x_j):
        return (x_j * self.att + x_i * self.each).sigmoid() * x_j


class Scalars(Message):
    """Numbers of nodes next to their features."""

    def forward(self, x, edge_index, edge_attr=None):
        return self.propagate(edge_index, x=x, a=x[:, :1], b=x[:, 1:2])

    def message(self, x_j, a_j, b_i):
        return x_j * torch.sigmoid(a_j + b_i)


class Row(Message):
    """What is computed of one end's channels, in the message."""

    def message(self, x_i, x_j):
        return x_j * x_i.mean(dim=-1, keepdim=True) - x_j[:, :1] * x_i


class Mapped(Message):
    """A linear map of a sum."""

    edge = WIDTH

    def __init__(self):
        super().__init__()
        self.lin, self.act = nn.Linear(WIDTH, 7), nn.SiLU()

    def message(self, x_i, x_j, edge_attr):
        return self.act(self.lin(x_j + x_i.relu() - edge_attr))


class Product(Message):
    """A matrix, and a global number."""

    def __init__(self):
        super().__init__("mean")
        self.weight = nn.Parameter(torch.randn(WIDTH, 5))

    def message(self, x_i, x_j):
        return F.leaky_relu(x_j @ self.weight + torch.matmul(x_i, self.weight), SLOPE)


class Written(Message):
    """Methods, powers, and what Python has for them."""

    def message(self, x_i, x_j):
        d = x_i.sub(x_j).abs() + 1e-3
        return d ** 2 / (1 + d).pow(3) + d.reciprocal() * x_j.mul(0.5) - math.pi * d.log1p()


class Flagged(Message):
    """Options, an activation among them, and the training flag."""

    def __init__(self):
        super().__init__()
        self.act, self.power, self.gated, self.drop = F.silu, 2, True, 0.5

    def message(self, x_i, x_j):
        out = self.act(x_j - x_i) ** self.power
        if self.gated:
            out = out * x_i.sigmoid()
        if not self.training:
            out = out * 2
        return out


class Moved(Message):
    """Relations as rows that are picked outside of the message; masks."""

    edge = WIDTH

    def message(self, x_j, x_i, edge_attr):
        near = ((x_j - x_i).abs() < 1.0) & (edge_attr > -1.0)
        return x_j * near.float() + (x_i * edge_attr).masked_fill(~near, 0.25)


class Network(Message):
    """A network of all that there is; its last map is linear."""

    def __init__(self, aggr: str = "add"):
        super().__init__(aggr)
        self.mlp = nn.Sequential(nn.Linear(2 * WIDTH + EDGE, 16), nn.ReLU(), nn.Linear(16, 7))

    def message(self, x_i, x_j, edge_attr):
        return self.mlp(torch.cat([x_i, x_j, edge_attr], dim=-1))


class MeanNetwork(Network):
    def __init__(self):
        super().__init__("mean")


class EdgeConvolution(Message):
    """EdgeConv with a sum."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2 * WIDTH, 16), nn.Parameter(torch.randn(16, 7))

    def message(self, x_i, x_j):
        return self.first(torch.cat([x_i, x_j - x_i], dim=-1)).tanh() @ self.last


class Positions(Message):
    """EGNN's: what is sent depends on how far both ends are apart."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, 8)

    def forward(self, x, edge_index, edge_attr=None):
        return self.propagate(edge_index, x=self.lin(x), pos=x[:, :3])

    def message(self, x_i, x_j, pos_i, pos_j):
        square = (pos_i - pos_j).square().sum(dim=-1, keepdim=True)
        distance = torch.sqrt((pos_i * pos_j).mean(-1).abs() + 0.1)
        return (x_i * x_j).tanh() * torch.exp(-square) + x_j / (1.0 + distance.unsqueeze(-1))


class Logged(Message):
    """Infinite where there is no channel, in lanes that have none."""

    edge = None

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, a=x[:, :1], edge_attr=edge_attr)

    def message(self, x_j, a_j, a_i, edge_attr):
        return torch.log(x_j.square()) * a_j * edge_attr.view(-1, 1) - a_i / x_j.abs()


class Shared(Message):
    """Each result goes into the next one twice: as a tree this has millions of leaves."""

    def message(self, x_i, x_j):
        y = x_j.tanh() + 0.1 * x_i.tanh()
        y = y * y + y
        y = 0.3 * y * y - y
        y = 0.3 * y * y + y
        y = (y * y - y).tanh()
        y = 0.3 * y * y + y
        y = 0.3 * y * y - y
        y = (0.3 * y * y + y).tanh()
        y = 0.3 * y * y + y
        y = 0.3 * y * y - y
        y = 0.3 * y * y + y
        y = (0.3 * y * y - y).tanh()
        y = 0.3 * y * y + y
        y = 0.3 * y * y - y
        return 0.3 * y * y + y


FORMS = [Difference, Gate, NormedEdge, Filter, EdgeNetwork, TransE, DistMult, Rotate, Crystal,
         Halves, Channels, Gaussian, Clamped, Chosen, Bends, Roots, Extremes, Heads, Stacked,
         Scalars, Row, Mapped, Product, Written, Flagged, Moved, Network, MeanNetwork, EdgeConvolution,
         Positions, Logged, Shared]
