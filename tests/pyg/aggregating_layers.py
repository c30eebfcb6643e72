"""Layers with an ``aggregate`` of their own, as users write them."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric import utils
from torch_geometric.utils import scatter

from tests.pyg.generated_layers import EDGE, WIDTH, Message

SMALL = 1e-6  # read by an aggregate


class Scattered(Message):
    """A copy, reduced by scatter."""

    def __init__(self, reduce: str = "sum", **options):
        super().__init__(**options)
        self.reduce = reduce

    def message(self, x_j):
        return x_j

    def aggregate(self, inputs, index, dim_size):
        return scatter(inputs, index, dim=self.node_dim, dim_size=dim_size, reduce=self.reduce)


class ByModule(Message):
    """The layer's own aggregation of weighted copies."""

    edge = None

    def message(self, x_j, edge_attr):
        return edge_attr.view(-1, 1) * x_j

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        return self.aggr_module(inputs, index, ptr=ptr, dim_size=dim_size, dim=self.node_dim)


class BySuper(Message):
    """The host's aggregate, and something for each node."""

    def __init__(self, aggr: str = "mean"):
        super().__init__(aggr)
        self.scale, self.slope = nn.Parameter(torch.randn(WIDTH)), 0.1
        self.lin = nn.Linear(WIDTH, WIDTH)

    def message(self, x_i, x_j):
        return torch.tanh(x_j - x_i)

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        out = super().aggregate(inputs, index, ptr, dim_size)
        if self.training:
            out = self.lin(out)
        return F.leaky_relu(out * self.scale + 1.0, self.slope)


class Quotient(Message):
    """GatedGCN's form: a quotient of two sums, one of products with rows that only the aggregate
    gets, which also tell how many nodes there are."""

    def __init__(self):
        super().__init__()
        self.lins = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.edge_lin = nn.Linear(EDGE, WIDTH)

    def forward(self, x, edge_index, edge_attr, rows=None):
        a, b, d, e = (lin(x) for lin in self.lins)
        return self.propagate(edge_index, Bx=b, Dx=d, Ex=e, Ce=self.edge_lin(edge_attr), Ax=a,
                              like=b if rows is None else b[:rows])

    def message(self, Dx_i, Ex_j, Ce):
        return torch.sigmoid(Dx_i + Ex_j + Ce)

    def aggregate(self, sigma_ij, index, Bx_j, like):
        dim_size = like.shape[0]
        above = scatter(sigma_ij * Bx_j, index, 0, dim_size, reduce="sum")
        below = scatter(sigma_ij, index, 0, dim_size, reduce="sum")
        return above / (below + SMALL)

    def update(self, aggr_out, Ax):
        return Ax[:aggr_out.shape[0]] + aggr_out


class Told(Message):
    """A copy, where an argument of the aggregate alone says how many nodes receive."""

    def forward(self, x, edge_index, edge_attr=None):
        return self.propagate(edge_index, x=x[0], y=x[1])

    def message(self, x_j):
        return x_j

    def aggregate(self, inputs, index, y_i, dim_size):
        return scatter(inputs, index, 0, dim_size)


class Pair(Message):
    """PaiNN's form: two messages of other shapes for each edge, each summed."""

    def __init__(self):
        super().__init__(node_dim=0)

    def forward(self, x, edge_index, edge_attr):
        v = torch.stack([x, x.sin(), x.cos()], 1)
        q, mu = self.propagate(edge_index, x=x, v=v, edge_attr=edge_attr)
        return torch.cat([q, mu.flatten(1)], -1)

    def message(self, x_j, v_j, edge_attr):
        q = x_j * torch.tanh(x_j)
        return q, q.unsqueeze(1) * edge_attr[:, :3].unsqueeze(-1) + v_j

    def aggregate(self, features, index, ptr, dim_size):
        return tuple(scatter(x, index, dim=0, dim_size=dim_size) for x in features)

    def update(self, inputs):
        return inputs


class Vectors(Message):
    """PaiNN's messages: rows of edges are repeated for each direction."""

    def __init__(self):
        super().__init__(node_dim=0)
        self.filter, self.half = nn.Linear(EDGE, 3 * WIDTH), 0.5
        self.gain = nn.Parameter(torch.randn(1, 3, 1))

    def forward(self, x, edge_index, edge_attr):
        v, h = torch.stack([x, x.sin(), x.cos()], 1), torch.cat([x, -x, x.tanh()], -1)
        x, v = self.propagate(edge_index, h=h, v=v, filter=self.filter(edge_attr),
                              direction=edge_attr[:, :3])
        return torch.cat([x, v.flatten(1)], -1)

    def message(self, h_j, v_j, filter, direction):
        x, a, b = torch.split(h_j * filter, WIDTH, dim=-1)
        v = v_j * a.unsqueeze(1) + self.gain * b.unsqueeze(1) * direction.unsqueeze(2)
        return x, v * self.half

    def aggregate(self, features, index, dim_size):
        x, v = features
        x = scatter(x, index, dim=self.node_dim, dim_size=dim_size)
        return x, scatter(v, index, dim=self.node_dim, dim_size=dim_size, reduce="max")

    def update(self, inputs):
        return inputs


class Statistics(Message):
    """Side by side, and nobody says how many nodes there are."""

    def message(self, x_i, x_j):
        return F.silu(x_i * x_j)

    def aggregate(self, inputs, index):
        mean = scatter(inputs, index, dim=-2, reduce="mean")
        square = utils.scatter(inputs * inputs, index, dim=-2, reduce="mean")
        top = scatter(inputs, index, dim=-2, reduce="max")
        return torch.cat([mean, (square - mean * mean).relu(), top], dim=-1)


class Extremes(Message):
    """Two reductions of the same copies, which one pass makes."""

    def message(self, x_j):
        return x_j

    def aggregate(self, inputs, index, dim_size):
        low, high = [scatter(inputs, index, 0, dim_size, reduce=name) for name in ("min", "max")]
        return high - low


class Changed(Extremes):
    """Two reductions that one pass makes, one of which the layer changes in place."""

    def aggregate(self, inputs, index, dim_size):
        return tuple(scatter(inputs, index, 0, dim_size, reduce=name) for name in ("sum", "max"))

    def update(self, inputs):
        total, high = inputs
        total += 1.0
        return total * high


class Normed(Message):
    """What belongs to nodes beside sums, and rows at the edges beside messages."""

    def forward(self, x, edge_index, edge_attr=None):
        return self.propagate(edge_index, x=x, norm=x[:, :1].abs() + 1.0, weight=edge_attr[:, :1])

    def message(self, x_j, x_i):
        return torch.relu(x_j + x_i)

    def aggregate(self, inputs, index, norm, norm_j, weight, dim_size):
        total = scatter(inputs / norm_j * weight, index, dim_size=dim_size)
        middle = total.mean(-1, keepdim=True).view(norm.shape[0], -1)
        return torch.where(total > 0.1, F.normalize(total, dim=-1) / norm.clamp(max=2.0), middle)


class Appended(Message):
    """Several statistics, one after the other in a list, as PNA's code often has it."""

    def message(self, x_i, x_j):
        return torch.tanh(x_i * x_j)

    def aggregate(self, inputs, index, dim_size):
        outs = []
        for name in ("mean", "max", "min", "std"):
            if name == "std":
                square = scatter(inputs * inputs, index, 0, dim_size, reduce="mean")
                outs.append(torch.sqrt(torch.relu(square - outs[0] * outs[0]) + 1e-3))
            else:
                outs.append(scatter(inputs, index, 0, dim_size, reduce=name))
        return torch.cat(outs, dim=-1)


class OfEdges(Message):
    """Sums of features of edges alone, and of the receiving node, beside one of neighbours."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(EDGE, WIDTH)

    def message(self, x_j, edge_attr):
        return x_j, self.lin(edge_attr)

    def aggregate(self, inputs, index, x_i, dim_size):
        near, far = inputs
        near = scatter(near, index, 0, dim_size, "max") + scatter(x_i.tanh(), index, 0, dim_size)
        return near * sum(scatter(one, index, 0, dim_size, "mean") for one in (far, far.abs()))


class Twice(Message):
    """The same sum twice, of which the layer changes one in place."""

    def forward(self, x, edge_index, edge_attr=None):
        one, other, same = self.propagate(edge_index, x=x)
        one += 1.0
        same *= 2.0
        return one + 3.0 * other

    def message(self, x_j):
        return x_j

    def aggregate(self, inputs, index, dim_size):
        one = scatter(inputs, index, 0, dim_size)
        return one, scatter(inputs, index, 0, dim_size), one


class Overwriting(Message):
    """PNA's scalers, as public code has them: values per node that are written over."""

    def message(self, x_i, x_j):
        return torch.tanh(x_i * x_j)

    def aggregate(self, inputs, index, dim_size):
        out = scatter(inputs, index, 0, dim_size, reduce="mean")
        deg = utils.degree(index, dim_size, dtype=inputs.dtype)
        shrunk = 2.0 / torch.log(deg + 1.0)
        shrunk[deg == 0] = 1
        before, root = shrunk.sqrt(), deg.pow(-0.5)
        root[root == float("inf")] = 0.0
        deg = deg.clamp_(1).view(-1, 1)
        shrunk *= 0.5
        return out / deg + (before * shrunk * root).view(-1, 1) * out.abs()


class Counted(Message):
    """A mean by hand: of the sum, and of ones for each edge."""

    def message(self, x_i, x_j):
        return torch.tanh(x_i * x_j)

    def aggregate(self, inputs, index, dim_size):
        total = scatter(inputs, index, dim=0, dim_size=dim_size, reduce="sum")
        count = scatter(torch.ones_like(inputs[:, :1]), index, 0, dim_size)
        count[count == 0] = 1.0
        return total / count


class Deviations(Message):
    """PNA's deviation of linear messages: without rounding it is none where one edge enters."""

    def __init__(self):
        super().__init__()
        self.pre = nn.Linear(2 * WIDTH, WIDTH)

    def message(self, x_i, x_j):
        return self.pre(torch.cat([x_i, x_j.tanh()], -1) * 3.0)

    def aggregate(self, inputs, index, dim_size):
        mean = scatter(inputs, index, 0, dim_size, reduce="mean")
        squares = scatter(inputs * inputs, index, 0, dim_size, reduce="mean")
        return torch.sqrt(torch.relu(squares - mean * mean) + 1e-5)


class Towers(Message):
    """PNA's towers: messages of several networks in a dimension of their own."""

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(2))

    def message(self, x_i, x_j):
        h = torch.cat([x_i.view(-1, 2, 6), x_j.view(-1, 2, 6)], -1)
        return torch.stack([net(h[:, k]) for k, net in enumerate(self.nets)], dim=1)

    def aggregate(self, inputs, index, dim_size):
        means = scatter(inputs, index, 0, dim_size, reduce="mean")
        squares = scatter(inputs * inputs, index, 0, dim_size, reduce="mean")
        deg = utils.degree(index, dim_size, dtype=inputs.dtype).view(-1, 1, 1)
        outs = [means, scatter(inputs, index, 0, dim_size, reduce="max"), squares - means * means]
        return (torch.cat(outs, -1) * torch.log(deg + 1.0)).flatten(1)


FORMS = (Scattered, ByModule, BySuper, Quotient, Pair, Vectors, Statistics, Extremes, Changed,
         Normed, Appended, OfEdges, Twice, Overwriting, Deviations,
         Towers, Counted)
#: those that torch operations take over on a CPU
PLAIN = (Scattered, ByModule)
