"""The models whose histories are told, and the arguments that they take."""

from __future__ import annotations

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.utils import softmax

from .graphs import mlp

IN, OUT = 8, 8
SIZES = {"b": 13}  # nodes of type b; those of type a change
EDGE_TYPES = [("a", "to", "b"), ("b", "to", "a"), ("a", "own", "a")]
METADATA = (["a", "b"], EDGE_TYPES)
_DEGREES = torch.tensor([3, 5, 4, 2, 1, 1])


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = pyg.SAGEConv((IN, IN), IN), pyg.SAGEConv((IN, IN), OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Weighted(pyg.MessagePassing):
    """What users write: a linear map, and neighbours times weights of edges."""

    def __init__(self, aggr: str = "add"):
        super().__init__(aggr=aggr)
        self.lin = nn.Linear(IN, OUT)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x), edge_weight=edge_weight)

    def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:
        return edge_weight.view(-1, 1) * x_j


class Between(Weighted):
    def message(self, x_i: Tensor, x_j: Tensor, edge_weight: Tensor) -> Tensor:
        return torch.relu(x_i - x_j) * edge_weight.unsqueeze(-1)


class Attending(pyg.MessagePassing):
    """GAT as users write it."""

    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.lin, self.edge = nn.Linear(IN, OUT), nn.Linear(3, 2)
        self.att = nn.Parameter(torch.randn(1, 2, OUT))
        self.slope, self.dropout = 0.2, 0.0

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        x = self.lin(x).view(-1, 2, OUT // 2)
        return self.propagate(edge_index, x=x, edge_attr=edge_attr).view(-1, OUT)

    def message(self, x_i, x_j, edge_attr, index, ptr, size_i) -> Tensor:
        alpha = (torch.cat([x_i, x_j], dim=-1) * self.att).sum(dim=-1) + self.edge(edge_attr)
        alpha = softmax(F.leaky_relu(alpha, self.slope), index, ptr, size_i)
        return x_j * F.dropout(alpha, self.dropout, self.training).unsqueeze(-1)


def _pairs(layer: type, **options) -> dict:
    return {e: layer((IN, IN), OUT, **options) for e in EDGE_TYPES}


def _mixed() -> nn.Module:
    layers = _pairs(pyg.SAGEConv)
    layers["a", "own", "a"] = pyg.GATConv((IN, IN), OUT, add_self_loops=False)
    return pyg.HeteroConv(layers)


def _homogeneous() -> dict:
    return {
        "GATConv": lambda: pyg.GATConv(IN, OUT, heads=2),
        "GATConv residual": lambda: pyg.GATConv(IN, OUT, heads=2, concat=False, residual=True),
        "GATConv without loops": lambda: pyg.GATConv(IN, OUT, add_self_loops=False),
        "GATv2Conv": lambda: pyg.GATv2Conv(IN, OUT, heads=2),
        "TransformerConv": lambda: pyg.TransformerConv(IN, OUT, heads=2, beta=True),
        "SuperGATConv": lambda: pyg.SuperGATConv(IN, OUT, heads=2),
        "AGNNConv": pyg.AGNNConv,
        "GCNConv": lambda: pyg.GCNConv(IN, OUT),
        "SAGEConv": lambda: pyg.SAGEConv(IN, OUT),
        "SAGEConv max": lambda: pyg.SAGEConv(IN, OUT, aggr="max"),
        "SAGEConv several": lambda: pyg.SAGEConv(IN, OUT, aggr=["mean", "std", "max"]),
        "SAGEConv softmax": lambda: pyg.SAGEConv(IN, OUT, aggr="softmax",
                                                 aggr_kwargs={"learn": True}),
        "SAGEConv powermean": lambda: pyg.SAGEConv(IN, OUT, aggr="powermean",
                                                   aggr_kwargs={"p": 2.0}),
        "GINConv": lambda: pyg.GINConv(mlp(IN, OUT), train_eps=True),
        "EGConv": lambda: pyg.EGConv(IN, OUT, num_heads=2, num_bases=2,
                                     aggregators=["sum", "std", "symnorm"]),
        "PNAConv": lambda: pyg.PNAConv(IN, OUT, ["mean", "max", "std"],
                                       ["identity", "amplification"], _DEGREES),
        "ClusterGCNConv": lambda: pyg.ClusterGCNConv(IN, OUT),
        "GCN": lambda: pyg.models.GCN(IN, OUT, num_layers=2),
        "GAT": lambda: pyg.models.GAT(IN, OUT, num_layers=2, heads=2),
    }


def _with_values() -> dict:
    return {
        "GCNConv weighted": (lambda: pyg.GCNConv(IN, OUT), "weight"),
        "ChebConv": (lambda: pyg.ChebConv(IN, OUT, 3), "weight"),
        "LEConv": (lambda: pyg.LEConv(IN, OUT), "weight"),
        "GraphConv": (lambda: pyg.GraphConv(IN, OUT), "weight"),
        "TAGConv": (lambda: pyg.TAGConv(IN, OUT), "weight"),
        "SGConv": (lambda: pyg.SGConv(IN, OUT, K=2), "weight"),
        "SimpleConv": (lambda: pyg.SimpleConv(combine_root="self_loop"), "weight"),
        "Weighted": (Weighted, "weight"),
        "Attending": (Attending, "attr"),
        "Between": (lambda: Between("mean"), "weight"),
        "GATConv edges": (lambda: pyg.GATConv(IN, OUT, edge_dim=3), "attr"),
        "GATv2Conv edges": (lambda: pyg.GATv2Conv(IN, OUT, edge_dim=3), "attr"),
        "TransformerConv edges": (lambda: pyg.TransformerConv(IN, OUT, edge_dim=3), "attr"),
        "GINEConv": (lambda: pyg.GINEConv(mlp(IN, OUT), edge_dim=3), "attr"),
        "GENConv": (lambda: pyg.GENConv(IN, OUT, learn_t=True, edge_dim=3), "attr"),
        "ResGatedGraphConv": (lambda: pyg.ResGatedGraphConv(IN, OUT, edge_dim=3), "attr"),
        "RGCNConv": (lambda: pyg.RGCNConv(IN, OUT, 3), "relation"),
        "RGCNConv bases": (lambda: pyg.RGCNConv(IN, OUT, 3, num_bases=2), "relation"),
        "FastRGCNConv": (lambda: pyg.FastRGCNConv(IN, OUT, 3), "relation"),
        "FiLMConv": (lambda: pyg.FiLMConv(IN, OUT, 3), "relation"),
        "RGATConv": (lambda: pyg.RGATConv(IN, OUT, 3), "relation"),
        "HGTConv": (lambda: pyg.HGTConv(IN, OUT, METADATA, heads=2), "types"),
        "HANConv": (lambda: pyg.HANConv(IN, OUT, METADATA, heads=2), "types"),
        "HeteroConv SAGE": (lambda: pyg.HeteroConv(_pairs(pyg.SAGEConv)), "types"),
        "HeteroConv GAT": (lambda: pyg.HeteroConv(_pairs(pyg.GATConv, add_self_loops=False)),
                           "types"),
        "HeteroConv mixed": (_mixed, "types"),
        "to_hetero": (lambda: pyg.to_hetero(Two(), METADATA), "types"),
    }


MODELS = {**{name: (make, "") for name, make in _homogeneous().items()}, **_with_values()}
