"""Worlds of training scripts with PyG: nodes of a graph, types, batches of graphs, a memory."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch_geometric.nn as pyg
import torch_geometric.utils as utils
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

from . import scripts_edits as edits
from .models import EDGE_TYPES, IN, METADATA, MODELS
from .scripts_ways import initialised, moves, optimizer

CLASSES = 3
FLAT = sorted(k for k, (_, edge) in MODELS.items() if edge != "types")
TYPED = sorted(k for k, (_, edge) in MODELS.items() if edge == "types")


class Learned(pyg.MessagePassing):
    """What users write: messages by modules, and by buffers and numbers that training moves."""

    moves = True  # a call repeated by a checkpoint is not the same

    def __init__(self):
        super().__init__(aggr="add")
        self.lin, self.gate = nn.Linear(IN, IN), nn.Linear(2 * IN, IN)
        self.rate, self.calls = 0.5, 0
        self.register_buffer("seen", torch.zeros(IN))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.calls += 1
        if self.training:
            self.rate *= 0.97
            self.seen.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.propagate(edge_index, x=self.lin(x)) + self.seen

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(torch.cat([x_i, x_j], -1)))
        return self.rate * gate * x_j + self.seen


class Annealed(pyg.MessagePassing):
    """Attention with a temperature that falls, and features of edges that are learned."""

    moves = True  # a call repeated by a checkpoint is not the same

    def __init__(self):
        super().__init__(aggr="add")
        self.lin, self.att = nn.Linear(IN, IN), nn.Parameter(torch.randn(IN))
        self.temperature = nn.Parameter(torch.ones(1))
        self.step = 0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.step += self.training
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        score = ((x_i + x_j).tanh() * self.att).sum(-1) / (self.temperature.abs() + 0.1 * self.step)
        return x_j * utils.softmax(score, index, num_nodes=size_i).unsqueeze(-1)


#: more layers than in `models`, whose results are as wide as their features
MORE: dict[str, Callable] = {
    "GCNConv cached": lambda: pyg.GCNConv(IN, IN, cached=True),
    "GATConv dropout": lambda: pyg.GATConv(IN, IN, dropout=0.4),
    "TransformerConv dropout": lambda: pyg.TransformerConv(IN, IN, dropout=0.4),
    "APPNP": lambda: pyg.APPNP(2, 0.1),
    "GatedGraphConv": lambda: pyg.GatedGraphConv(IN, 2),
    "EdgeConv": lambda: pyg.EdgeConv(nn.Linear(2 * IN, IN)),
    "ARMAConv": lambda: pyg.ARMAConv(IN, IN, num_stacks=2),
    "MFConv": lambda: pyg.MFConv(IN, IN, max_degree=4),
    "LGConv": pyg.LGConv,
    "Learned": Learned,
    "Annealed": Annealed,
    "DirGNNConv": lambda: pyg.DirGNNConv(pyg.SAGEConv(IN, IN)),
    "JumpingKnowledge": lambda: pyg.models.GraphSAGE(IN, IN, 2, jk="lstm"),
    "DeepGCNLayer": lambda: pyg.DeepGCNLayer(pyg.GENConv(IN, IN), nn.LayerNorm(IN), nn.ReLU(),
                                             "res+", 0.0, ckpt_grad=True),
    "Sequential": lambda: pyg.Sequential("x, edge_index", [
        (pyg.GCNConv(IN, IN), "x, edge_index -> y"), nn.ReLU(inplace=True),
        (pyg.GATConv(IN, IN), "y, edge_index -> y")]),
}


def layer(r: random.Random) -> tuple[nn.Module, str]:
    """A layer and what it takes with edges."""
    if r.random() < 0.25:
        name = r.choice([k for k in MORE if "dropout" not in k or r.random() < 0.1])
        return MORE[name](), ""
    make, edge = MODELS[r.choice(FLAT)]
    return make(), edge


class Net(nn.Module):
    """Layers over several lists of edges, put together in one of the ways of scripts."""

    def __init__(self, r: random.Random):
        super().__init__()
        found = [layer(r) for _ in range(r.choice((1, 2, 3, 3)))]
        self.form = r.choice(("plain", "norm", "residual", "jumping", "recurrent", "checkpointed",
                              "drop"))
        self.layers = nn.ModuleDict({str(k): one for k, (one, _) in enumerate(found)})
        self.edges, self.over = [edge for _, edge in found], [r.randrange(3) for _ in found]
        if r.random() < 0.3:  # the same layer twice, or two layers with one weight
            self.layers["again"] = self.layers["0"]
            self.edges.append(self.edges[0])
            self.over.append(r.randrange(3))
        self.norms = nn.ModuleList([nn.BatchNorm1d(IN) for _ in self.layers])
        self.cell, self.head = nn.GRUCell(IN, IN), nn.Linear(IN, CLASSES)
        self.jump = pyg.JumpingKnowledge("max")
        self.scale = nn.Parameter(torch.ones(3))
        self.embedding = nn.Embedding(8, IN, sparse=r.random() < 0.05)
        maps = [m for m in self.layers.modules() if isinstance(m, pyg.Linear)
                and tuple(m.weight.shape) == (IN, IN)]
        if len(maps) > 1 and r.random() < 0.3:
            maps[1].weight = maps[0].weight

    def given(self, k: int, graph) -> tuple[Tensor, Tensor | None]:
        """The edges that a layer gets, and what goes with them."""
        edge_index = graph.lists[self.over[k]]
        values = graph.values(self.edges[k], self.over[k])
        if self.edges[k] == "weight":
            values = values * self.scale[self.over[k]]
        return edge_index, values

    def one(self, k: int, x: Tensor, edge_index: Tensor, values: Tensor | None) -> Tensor:
        args = (x, edge_index) if values is None else (x, edge_index, values)
        out = list(self.layers.values())[k](*args)
        return out.reshape(x.shape[0], -1, IN).sum(1)

    def forward(self, x: Tensor, graph) -> Tensor:
        x, found = x + self.embedding(graph.y), []
        for k in range(len(self.layers)):
            given = self.given(k, graph)
            if self.form == "checkpointed" and not moves(self):
                y = checkpoint(self.one, k, x, *given, use_reentrant=False)
            elif self.form == "recurrent":
                y = x
                for _ in range(3):
                    y = self.cell(self.one(k, y, *given).tanh(), y)
            else:
                y = self.one(k, x, *given)
            if self.form == "norm":
                y = self.norms[k](y)
            if self.form == "drop":
                y = F.dropout(y, 0.3, self.training)
            x = torch.tanh(y) + (x if self.form == "residual" else 0)
            found.append(x)
        return self.head(self.jump(found) if self.form == "jumping" else x)


class Nodes:
    """A graph with labels of its nodes, and three lists of edges that share memory now and then."""

    second = True  # whether the host's second derivatives are right
    threads = True  # whether two may call a net at once

    def __init__(self, r: random.Random, device: torch.device):
        self.device, self.n, self.m = device, 24, 90
        self.made: dict = {}
        self.new(r)
        self.edits = [*edits.OF_NODES, layer_replaced]

    def net(self, r: random.Random) -> nn.Module:
        return Net(r)

    def draws(self, net: nn.Module) -> bool:
        return any(isinstance(getattr(m, "dropout", 0), float) and m.dropout
                   for m in net.modules()) or any(type(m) is pyg.SuperGATConv
                                                  for m in net.modules())

    def new(self, r: random.Random) -> None:
        self.x = torch.randn(self.n, IN).to(self.device)
        self.y = torch.randint(0, CLASSES, (self.n,)).to(self.device)
        self.lists = [self.drawn() for _ in range(3)]
        self.weight = torch.rand(4096).to(self.device) + 0.1
        self.attr = torch.randn(4096, 3).to(self.device)
        self.relation = torch.randint(0, 3, (4096,)).to(self.device)

    def drawn(self, size: int | None = None) -> Tensor:
        return torch.randint(0, self.n, (2, self.m if size is None else size)).to(self.device)

    def values(self, edge: str, k: int) -> Tensor | None:
        return None if not edge else getattr(self, edge)[: self.lists[k].shape[1]]

    def again(self, r: random.Random) -> None:
        r.choice((lambda: self.x.roll(1, 0), lambda: self.lists.reverse(),
                  lambda: self.lists.__setitem__(0, self.drawn())))()

    def out(self, net: Callable) -> Tensor:
        return net(self.x, self)

    def loss(self, net: Callable) -> Tensor:
        return F.cross_entropy(self.out(net), self.y)

    def inputs(self) -> list[Tensor]:
        return [self.x, self.weight, self.attr]

    def tensors(self) -> dict[str, Tensor]:
        return {"x": self.x, **{f"edges {k}": t for k, t in enumerate(self.lists)}}

    def failing(self, net: nn.Module, r: random.Random) -> None:
        x, narrow = self.x, r.random() < 0.5
        # an id without a row would end a GPU's process
        self.x = x[:, :5] if narrow or x.is_cuda else x[:5]
        try:
            self.out(net)
        finally:
            self.x = x


def layer_replaced(s, r) -> str:
    """Another layer in a layer's place, most likely where its memory was; the optimizer is new."""
    key = r.choice(sorted(s.net.layers))
    old = type(s.net.layers[key]).__name__
    again = s.net.layers["again"] is s.net.layers["0"] if "again" in s.net.layers else False
    if again:
        return "tied"
    s.net.layers[key] = nn.Identity()
    new, edge = layer(r)
    s.net.layers[key] = new.to(s.world.device)
    s.net.edges[list(s.net.layers).index(key)] = edge
    initialised(s.net)
    s.optimizers = [optimizer(s.net.parameters(), r)]
    return f"{old} by {type(new).__name__}"


# ---- types ----


class TypedNet(nn.Module):
    def __init__(self, r: random.Random):
        super().__init__()
        made = [MODELS[r.choice(TYPED)][0]() for _ in range(r.choice((1, 2, 2)))]
        self.layers = nn.ModuleList(made + (made[:1] if r.random() < 0.2 else []))
        self.heads = nn.ModuleDict({t: nn.Linear(IN, CLASSES) for t in METADATA[0]})
        self.embedding = nn.Embedding(13, IN, sparse=False)

    def forward(self, x: dict, edges: dict) -> dict:
        x = {**x, "b": x["b"] + self.embedding.weight}
        for one in self.layers:
            x = {t: v.tanh() for t, v in one(x, edges).items() if v is not None}
        return {t: self.heads[t](v) for t, v in x.items()}


class Types(Nodes):
    """Nodes of two types; the three lists of edges are the types of edges."""

    def net(self, r: random.Random) -> nn.Module:
        return TypedNet(r)

    def __init__(self, r: random.Random, device: torch.device):
        super().__init__(r, device)
        self.n = 13
        self.new(r)
        self.edits = edits.OF_TYPES

    def out(self, net: Callable) -> Tensor:
        found = net({"a": self.x, "b": self.x.flip(0)}, dict(zip(EDGE_TYPES, self.lists)))
        return torch.stack([v for _, v in sorted(found.items())]).sum(0)

    def inputs(self) -> list[Tensor]:
        return [self.x]


# ---- batches of graphs ----


class PoolNet(nn.Module):
    def __init__(self, r: random.Random):
        super().__init__()
        self.first, edge = layer(r)
        while edge:
            self.first, edge = layer(r)
        self.second = pyg.GraphConv(IN, IN)
        self.pool = r.choice((
            lambda: pyg.TopKPooling(IN, 0.6), lambda: pyg.SAGPooling(IN, 0.6),
            lambda: pyg.SAGPooling(IN, 0.6, GNN=pyg.GATConv), lambda: pyg.ASAPooling(IN, 0.6)))()
        if self.pool.select.weight.numel() == 1:
            # it is divided by its size: its gradient is zero but for roundings, of which Adam
            # makes whole steps
            self.pool.select.weight.requires_grad_(False)
        self.norm = r.choice((pyg.GraphNorm, pyg.BatchNorm, pyg.LayerNorm, pyg.PairNorm))
        self.norm = self.norm() if self.norm is pyg.PairNorm else self.norm(IN)
        self.reads = r.choice((pyg.global_add_pool, pyg.global_mean_pool, pyg.global_max_pool))
        self.attends = pyg.AttentionalAggregation(nn.Linear(IN, 1))
        self.head = nn.Linear(2 * IN, CLASSES)

    def forward(self, data: Data) -> Tensor:
        x = self.first(data.x, data.edge_index).reshape(data.x.shape[0], -1, IN).sum(1)
        x = self.norm(x).tanh()
        x, edge_index, weight, batch, *_ = self.pool(x, data.edge_index, None, data.batch)
        x = self.second(x, edge_index, weight).tanh()
        size = data.num_graphs
        attended = self.attends(x, batch, dim_size=size)
        return self.head(torch.cat([self.reads(x, batch, size), attended], 1))


class Graphs(Nodes):
    """Batches of small graphs, some without edges; each call of `again` takes the next."""

    def __init__(self, r: random.Random, device: torch.device):
        super().__init__(r, device)
        self.edits = edits.OF_BATCHES
        self.next(r)

    def net(self, r: random.Random) -> nn.Module:
        return PoolNet(r)

    def next(self, r: random.Random) -> None:
        self.data = None
        graphs = []
        for _ in range(r.choice((1, 4, 4, 7))):
            n = r.choice((2, 5, 9, 9))
            graphs.append(Data(x=torch.randn(n, IN), y=torch.randint(0, CLASSES, (1,)),
                               edge_index=torch.randint(0, n, (2, r.choice((0, 3, 20, 20))))))
        self.data = next(iter(DataLoader(graphs, len(graphs)))).to(self.device)
        self.x, self.y, self.lists = self.data.x, self.data.y, [self.data.edge_index]

    again = next

    def out(self, net: Callable) -> Tensor:
        self.data.x = self.x
        return net(self.data)

    def inputs(self) -> list[Tensor]:
        return [self.x]


# ---- a memory ----


class MemoryNet(nn.Module):
    """Embeddings out of a memory that each call writes to, as in TGN."""

    moves = True  # a call repeated by a checkpoint is not the same

    def __init__(self, r: random.Random):
        super().__init__()
        self.conv = r.choice((
            lambda: pyg.TransformerConv(IN, IN, heads=2, concat=False),
            lambda: pyg.GATConv(IN, IN), lambda: pyg.GCNConv(IN, IN),
            lambda: pyg.SAGEConv(IN, IN, aggr="max")))()
        self.cell, self.head = nn.GRUCell(IN, IN), nn.Linear(IN, CLASSES)
        self.register_buffer("memory", torch.zeros(40, IN))

    def forward(self, x: Tensor, graph) -> Tensor:
        n = x.shape[0]
        before = self.memory[:n].clone()
        state = self.cell(x, before)
        z = self.conv(state, graph.lists[0]) + self.conv(before, graph.lists[1])
        if self.training:
            ids = graph.lists[0][1].unique()
            self.memory[ids] = z[ids].detach().tanh().to(self.memory.dtype)
        return self.head(z.tanh())


class Memory(Nodes):
    def net(self, r: random.Random) -> nn.Module:
        return MemoryNet(r)


WORLDS = {"nodes": Nodes, "types": Types, "graphs": Graphs, "memory": Memory}
