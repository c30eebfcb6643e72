"""Layers as users write them that call functions of their own, keep tensors of edges, and use
indices of the edges: degrees, sums that go back to the edges, a softmax of their own."""
from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric import utils
from torch_geometric.utils import degree, scatter, softmax

from tests.pyg.edge_layers import Ends
from tests.pyg.generated_layers import EDGE, WIDTH, Message
from tests.pyg.graphs import E

SLOPE = 0.2  # read by a function


def bent(x, by=1.0):
    return F.leaky_relu(x, SLOPE) * by


def squared(x):
    return bent(x).square()


ACTIVATIONS = {"bent": bent, "tanh": torch.tanh, "squared": squared}


class Helped(Message):
    """Functions of the module: called, and picked from a dictionary by what the layer says."""

    def __init__(self):
        super().__init__()
        self.kind = "squared"

    def message(self, x_i, x_j, edge_attr):
        found = ACTIVATIONS[self.kind](x_j - x_i)
        return bent(found, by=0.5) + edge_attr[:, :1]


class ByModule(Message):
    """Functions and numbers of a module that was imported as a whole; a branch that is not taken
    names what is not followed."""

    edge = None

    def message(self, x_i, x_j, edge_attr):
        found = this_module.bent(x_i * x_j) * this_module.SLOPE
        if self.training and edge_attr.dim() > 7:
            found = sorted(found) + Helped(found)
        return found * this_module.torch.tanh(x_j)


this_module = sys.modules[__name__]


class FromList(Message):
    """Functions and modules in a list of the layer, numbers in a dictionary."""

    def __init__(self):
        super().__init__("mean")
        self.steps = [bent, torch.sin, nn.Tanh()]
        self.scales = {"first": 0.5, "last": 2.0}

    def message(self, x_i, x_j):
        found = x_i * x_j * self.scales["first"]
        for step in self.steps:
            found = step(found)
        return found * self.scales.get("last")


class Held(Message):
    """A weight for each edge that the layer holds, new in each call."""

    def forward(self, x, edge_index, edge_attr):
        self.weight_vector = edge_attr[:, :1]
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j * self.weight_vector


class Learned(Message):
    """Learned features of the edges of one graph."""

    def __init__(self, edges: int = E):
        super().__init__()
        self.strength = nn.Parameter(torch.randn(edges, 1))

    def forward(self, x, edge_index, edge_attr=None):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return torch.sigmoid(self.strength) * (x_j - x_i).tanh()


class Degrees(Message):
    """GCN's weights, made of degrees in the message, as tutorials have it."""

    def forward(self, x, edge_index, edge_attr=None):
        return self.propagate(edge_index, size=(x.size(0), x.size(0)), x=x)

    def message(self, x_j, edge_index, size):
        row, col = edge_index
        deg = degree(row, size[0], dtype=x_j.dtype) + 1.0
        inverse = deg.pow(-0.5)
        norm = inverse[row] * inverse[col]
        return norm.view(-1, 1) * x_j


class DegreesAtEnds(Message):
    """Degrees of either end that nobody says the number of."""

    def message(self, x_i, x_j, edge_index_i, edge_index_j):
        left = utils.degree(edge_index_j)[edge_index_j]
        right = degree(edge_index_i)[edge_index_i].rsqrt()
        return torch.relu(x_j - x_i) * right.unsqueeze(-1) / left.view(-1, 1)


class Shares(Message):
    """Gates that are divided by their sum over the edges that enter a node."""

    def message(self, x_i, x_j, index, dim_size):
        gate = torch.sigmoid(x_i + x_j)
        total = scatter(gate, index, dim=0, dim_size=dim_size) + 1e-3
        return gate / total[index] * x_j


def own_softmax(score, at, count=None):
    top = scatter(score.detach(), at, 0, count, reduce="max")
    score = (score - top.index_select(0, at)).exp()
    total = scatter(score, at, 0, count) + 1e-12
    return score / torch.index_select(total, 0, at)


class BySoftmaxFunction(Ends):
    """Attention by a softmax that the user wrote."""

    def message(self, q_i, k_j, v_j, index, size_i):
        score = (q_i * k_j).sum(-1, keepdim=True) * 0.2
        return own_softmax(score, index, size_i) * v_j


class OfModule(Ends):
    """A softmax that a module of PyG's has."""

    def message(self, q_i, k_j, v_j, edge_attr, index, ptr, size_i):
        score = torch.tanh(q_i + k_j).sum(-1) + edge_attr[:, 0]
        return utils.softmax(score, index, ptr, size_i).unsqueeze(-1) * v_j


class EdgesOnly(Message):
    """Features of edges, summed; as many nodes as the last that an edge enters."""

    def __init__(self, aggr: str = "add"):
        super().__init__(aggr)
        self.lin = nn.Linear(EDGE, 5)

    def message(self, edge_attr):
        return torch.relu(self.lin(edge_attr))


class Receiver(Message):
    """Features of edges and of the node that receives."""

    def message(self, x_i, edge_attr):
        return x_i.tanh() * edge_attr[:, :1]


# --- aggregates -----------------------------------------------------------------------------------

def mean_of(src, index, dim_size):
    return scatter(src, index, 0, dim_size, reduce="mean")


def largest_of(src, index, dim_size):
    return scatter(src, index, 0, dim_size, reduce="max")


def deviation_of(src, index, dim_size):
    mean = mean_of(src, index, dim_size)
    return torch.sqrt(torch.relu(mean_of(src * src, index, dim_size) - mean * mean) + 1e-5)


def same(src, deg, average):
    return src


def amplified(src, deg, average):
    return src * (torch.log(deg + 1) / average["log"])


class Principal(Message):
    """PNA's form: functions for aggregations and for scalers in lists."""

    def __init__(self):
        super().__init__(aggr=None)
        self.aggregators, self.scalers = [mean_of, largest_of, deviation_of], [same, amplified]
        self.average = {"log": 1.3, "lin": 4.0}

    def message(self, x_j):
        return x_j

    def aggregate(self, inputs, index, dim_size=None):
        out = torch.cat([one(inputs, index, dim_size) for one in self.aggregators], dim=-1)
        deg = degree(index, dim_size, dtype=inputs.dtype).view(-1, 1)
        return torch.cat([one(out, deg, self.average) for one in self.scalers], dim=-1)


class Softened(Message):
    """GENConv's form: a softmax in the aggregate, without gradients or with, as a flag says."""

    def __init__(self, learned: bool = False):
        super().__init__(aggr=None)
        self.kind, self.learned = "softmax", learned
        self.t = nn.Parameter(torch.tensor([0.7])) if learned else 0.7

    def message(self, x_j, edge_attr):
        return F.relu(x_j + edge_attr[:, :1]) + 1e-7

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        if self.kind in ["add", "mean"]:
            return super(Softened, self).aggregate(inputs, index, ptr, dim_size)  # noqa: UP008
        if self.kind == "softmax":
            if self.learned:
                out = softmax(inputs * self.t, index, num_nodes=dim_size)
            else:
                with torch.no_grad():
                    out = softmax(inputs * self.t, index, num_nodes=dim_size)
            return scatter(inputs * out, index, dim=0, dim_size=dim_size, reduce="sum")
        elif self.kind == "power":
            torch.clamp_(inputs, 1e-7, 1e1)
            self.seen = inputs
        raise NotImplementedError("To be implemented")


class GivesBack(Message):
    """Messages beside their sums (interaction networks); the index is a piece of the edges."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * WIDTH + EDGE, 8), nn.SiLU(), nn.Linear(8, EDGE))

    def forward(self, x, edge_index, edge_attr):
        out, edges = self.propagate(edge_index, x=x, edge_attr=edge_attr)
        edges += 1.0
        return out, edges

    def message(self, x_i, x_j, edge_attr):
        return self.net(torch.cat([x_i, x_j, edge_attr], dim=1)) + edge_attr

    def aggregate(self, inputs, edge_index, dim_size=None):
        return scatter(inputs, edge_index[1], dim=0, dim_size=dim_size, reduce="sum"), inputs


class DropsAndGives(GivesBack):
    """What is given back is what was summed, with the same mask."""

    def message(self, x_i, x_j, edge_attr):
        return F.dropout(super_tanh(x_i - x_j), 0.5, self.training)

    def aggregate(self, inputs, index, dim_size=None):
        return scatter(inputs, index, 0, dim_size) * 1.0, inputs


def super_tanh(x):
    return torch.tanh(x) * 1.7


class BackToEdges(Message):
    """Messages minus their mean, reduced again."""

    def message(self, x_i, x_j):
        return torch.tanh(x_i * x_j)

    def aggregate(self, inputs, index, dim_size):
        mean = scatter(inputs, index, 0, dim_size, "mean")
        return scatter((inputs - mean[index]).square(), index, 0, dim_size) + mean


class WithoutGradients(Message):
    def message(self, x_i, x_j):
        with torch.no_grad():
            gate = torch.sigmoid(x_i - x_j)
        return gate * x_j + x_i.detach()


class Embedding(nn.Module):
    """A network for each of several inputs, whose results are added up (HiVT)."""

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(width, 8), nn.LayerNorm(8),
                                                nn.ReLU(inplace=True), nn.Linear(8, 8))
                                  for width in (WIDTH, EDGE))
        self.last = nn.Sequential(nn.LayerNorm(8), nn.ReLU(inplace=True))

    def forward(self, inputs, more=None):
        for i in range(len(self.nets)):
            inputs[i] = self.nets[i](inputs[i])
        output = torch.stack(inputs).sum(dim=0)
        if more is not None:
            output += torch.stack(more).mean(dim=0)
        return self.last(output)


class Piled(Message):
    def __init__(self):
        super().__init__()
        self.embed = Embedding()

    def message(self, x_i, x_j, edge_attr):
        both = torch.stack([x_i, x_j], 0).mean(0)
        return self.embed([x_j, edge_attr]) * both[:, :1]


FORMS = [Helped, ByModule, FromList, Held, Learned, Degrees, DegreesAtEnds, Shares, BySoftmaxFunction, OfModule,
         Receiver, Principal, Softened, lambda: Softened(True), GivesBack, BackToEdges,
         WithoutGradients, Piled]
