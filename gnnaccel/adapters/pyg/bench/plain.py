"""PyG's plain aggregation layers for the benchmark."""
from __future__ import annotations

import dataclasses
from typing import Any

from gnnaccel.adapters.pyg.bench.models import two_layers


@dataclasses.dataclass(frozen=True)
class PlainLayer:
    """A layer from and to ``width`` channels. ``copies``: how many tensors of the size of its
    messages PyG holds at once, forward and in training, at the least. ``reduce``: its reduction
    over neighbours."""

    name: str
    class_name: str
    width: int
    reduce: str
    copies: tuple[int, int]

    @property
    def out_channels(self) -> int:
        return self.width


LAYERS = {layer.name: layer for layer in (
    PlainLayer("GCN 64", "GCNConv", 64, "sum", (2, 3)),
    PlainLayer("SAGE 64", "SAGEConv", 64, "mean", (1, 2)),
    PlainLayer("GCN 128", "GCNConv", 128, "sum", (2, 3)),
    PlainLayer("SAGE 128", "SAGEConv", 128, "mean", (1, 2)),
    PlainLayer("GIN 64", "GINConv", 64, "sum", (1, 2)),
    PlainLayer("SAGE max 64", "SAGEConv", 64, "max", (1, 3)),
    PlainLayer("PNA 64", "PNAConv", 64, "several", (5, 10)),
)}


def build_layer(layer: PlainLayer, edge_index: Any, num_nodes: int, seed: int = 0) -> Any:
    """The layer on the edges' device, with its host's defaults and weights fixed by ``seed``. PNA
    has four reduces and three scalers, of this graph's degrees."""
    import torch
    import torch_geometric.nn as nn

    torch.manual_seed(seed)
    if layer.class_name == "GINConv":
        built = nn.GINConv(torch.nn.Linear(layer.width, layer.width))
    elif layer.class_name == "PNAConv":
        degrees = torch.bincount(torch.bincount(edge_index[1], minlength=num_nodes)).cpu()
        built = nn.PNAConv(layer.width, layer.width, ["mean", "min", "max", "std"],
                           ["identity", "amplification", "attenuation"], degrees)
    elif layer.class_name == "SAGEConv":
        built = nn.SAGEConv(layer.width, layer.width, aggr=layer.reduce)
    else:
        built = getattr(nn, layer.class_name)(layer.width, layer.width)
    return built.to(edge_index.device)


def build_two_layers(class_name: str, device: Any, channels: int, classes: int,
                     seed: int = 0) -> Any:
    """Two layers as in sampled training: ``channels`` -> 64 -> ``classes``."""
    import torch
    import torch_geometric.nn as nn

    torch.manual_seed(seed)
    cls = getattr(nn, class_name)
    return two_layers(cls(channels, 64), cls(64, classes)).to(device)
