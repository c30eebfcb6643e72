"""Models of two layers, as users write them."""
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.distributed.graphs import CLASSES, FEATURES

HIDDEN = 8


class TwoLayers(nn.Module):
    """``arguments``: names of the data's tensors that each layer takes besides x and edges."""

    def __init__(self, first: Any, second: Any, *arguments: str):
        super().__init__()
        self.first, self.second, self._arguments = first, second, arguments

    def forward(self, data: Any) -> torch.Tensor:
        more = [data[name] for name in self._arguments]
        hidden = F.elu(self.first(data.x, data.edge_index, *more))
        return self.second(hidden, data.edge_index, *more)


class Typed(nn.Module):
    """HeteroConv of layers of several kinds, and of a relation without edges."""

    def __init__(self, aggr: str = "sum"):
        from torch_geometric.nn import GATConv, GCNConv, HeteroConv, SAGEConv

        super().__init__()
        self.layers = nn.ModuleList()
        for width, out in ((FEATURES, HIDDEN), (HIDDEN, CLASSES)):
            self.layers.append(HeteroConv({
                ("paper", "cites", "paper"): GCNConv(width, out),
                ("author", "writes", "paper"): SAGEConv((width, width), out),
                ("paper", "by", "author"): GATConv((width, width), out, add_self_loops=False),
                ("author", "knows", "author"): SAGEConv(width, out)}, aggr=aggr))

    def forward(self, data: Any) -> dict[str, torch.Tensor]:
        found = data.x_dict
        for layer in self.layers:
            found = {kind: x.tanh() for kind, x in layer(found, data.edge_index_dict).items()}
        return found


def _mlp(width: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, out), nn.ReLU(), nn.Linear(out, out))


def make(name: str) -> nn.Module:
    """A model of `NAMES`, its weights always the same."""
    from torch_geometric import nn as pyg

    torch.manual_seed(1)
    wide = 2 * HIDDEN
    if name == "hetero":
        return Typed()
    return {
        "gcn": lambda: TwoLayers(pyg.GCNConv(FEATURES, HIDDEN), pyg.GCNConv(HIDDEN, CLASSES),
                                 "edge_weight"),
        "sage": lambda: TwoLayers(pyg.SAGEConv(FEATURES, HIDDEN),
                                  pyg.SAGEConv(HIDDEN, CLASSES, aggr="max")),
        "gat": lambda: TwoLayers(pyg.GATConv(FEATURES, HIDDEN, heads=2),
                                 pyg.GATConv(wide, CLASSES)),
        "gin": lambda: TwoLayers(pyg.GINConv(_mlp(FEATURES, HIDDEN), train_eps=True),
                                 pyg.GINConv(_mlp(HIDDEN, CLASSES))),
        "transformer": lambda: TwoLayers(pyg.TransformerConv(FEATURES, HIDDEN, heads=2),
                                         pyg.TransformerConv(wide, CLASSES, beta=True)),
        "rgcn": lambda: TwoLayers(pyg.RGCNConv(FEATURES, HIDDEN, 3, num_bases=2),
                                  pyg.RGCNConv(HIDDEN, CLASSES, 3), "edge_type"),
    }[name]()


NAMES = ("gcn", "sage", "gat", "gin", "transformer", "rgcn", "hetero")
