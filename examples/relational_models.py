"""Relational models in ordinary PyG code: they do not mention gnnaccel."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import FastRGCNConv, HGTConv, RGATConv, RGCNConv

from relational_tasks import EdgeType, EntityTask, HeteroTask, Task

BASES = 30


class RGCN(torch.nn.Module):
    """Two layers; the first has no input, so its weights are embeddings of the nodes, one per
    relation."""

    def __init__(self, conv: type, nodes: int, relations: int, classes: int,
                 hidden: int = 16) -> None:
        super().__init__()
        self.first = conv(nodes, hidden, relations, num_bases=BASES, aggr="mean")
        self.second = conv(hidden, classes, relations, num_bases=BASES, aggr="mean")

    def forward(self, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        x = F.relu(self.first(None, edge_index, edge_type))
        return self.second(x, edge_index, edge_type)


class RGAT(torch.nn.Module):
    """Two attention layers over learned embeddings (this layer cannot go without an input), then a
    linear one."""

    def __init__(self, nodes: int, relations: int, classes: int, hidden: int = 16) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(nodes, hidden)
        self.first = RGATConv(hidden, hidden, relations, num_bases=BASES)
        self.second = RGATConv(hidden, hidden, relations, num_bases=BASES)
        self.out = torch.nn.Linear(hidden, classes)

    def forward(self, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        x = F.relu(self.first(self.embedding.weight, edge_index, edge_type))
        x = F.relu(self.second(x, edge_index, edge_type))
        return self.out(x)


class HGT(torch.nn.Module):
    """Features of any width enter through a linear layer; a type without features through an
    embedding of its nodes, which is what a linear layer over one-hot features computes."""

    def __init__(self, task: HeteroTask, hidden: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.target = task.target
        self.linear = torch.nn.ModuleDict({kind: torch.nn.Linear(x.shape[1], hidden)
                                           for kind, x in task.x.items()})
        self.embedding = torch.nn.ModuleDict({kind: torch.nn.Embedding(nodes, hidden)
                                              for kind, nodes in task.num_nodes.items()
                                              if kind not in task.x})
        metadata = (list(task.num_nodes), list(task.edges))
        self.convs = torch.nn.ModuleList([HGTConv(hidden, hidden, metadata, heads)
                                          for _ in range(layers)])
        self.out = torch.nn.Linear(hidden, task.classes)

    def forward(self, x: dict[str, Tensor], edges: dict[EdgeType, Tensor]) -> Tensor:
        hidden = {kind: F.relu(self.linear[kind](features)) for kind, features in x.items()}
        hidden.update({kind: embedding.weight for kind, embedding in self.embedding.items()})
        for conv in self.convs:
            hidden = conv(hidden, edges)
        return self.out(hidden[self.target])


# for entities; DBLP has HGTConv
LAYERS = {"rgcn": RGCNConv, "fast_rgcn": FastRGCNConv, "rgat": RGATConv}


def build(task: Task, layer: str) -> torch.nn.Module:
    """The model of a task, drawn from torch's generator. ``layer``, a key of `LAYERS`, matters for
    entities only."""
    if isinstance(task, HeteroTask):
        return HGT(task)
    assert isinstance(task, EntityTask)
    if layer == "rgat":
        return RGAT(task.num_nodes, task.num_relations, task.classes)
    return RGCN(LAYERS[layer], task.num_nodes, task.num_relations, task.classes)


def layer_name(task: Task, layer: str) -> str:
    """The class of the model's relational layers."""
    return "HGTConv" if isinstance(task, HeteroTask) else LAYERS[layer].__name__


def learning_rate(task: Task) -> dict[str, float]:
    """Adam's settings: those of PyG's own examples."""
    if isinstance(task, HeteroTask):
        return {"lr": 0.005, "weight_decay": 0.001}
    return {"lr": 0.01, "weight_decay": 0.0005}
