"""The layers, each built one usual way, for tests that hold for all of them."""
from __future__ import annotations

import torch
from torch_geometric.nn import AGNNConv, GATConv, GATv2Conv, SuperGATConv, TransformerConv

from tests.pyg.graphs import F
from tests.pyg.judge import spread

CLASSES = {"GATConv": GATConv, "GATv2Conv": GATv2Conv, "TransformerConv": TransformerConv,
           "AGNNConv": AGNNConv, "SuperGATConv": SuperGATConv}
NAMES = list(CLASSES)
WITH_EDGES = ["GATConv", "GATv2Conv", "TransformerConv"]
WITH_DROPOUT = [name for name in NAMES if name != "AGNNConv"]


def build(name: str, heads: int = 2, width: int = 8, features: int = F, device="cpu",
          **options) -> torch.nn.Module:
    """A layer of class ``name``; AGNNConv takes no sizes. Biases are not zero."""
    cls = CLASSES[name]
    layer = cls(**options) if name == "AGNNConv" else cls(features, width, heads, **options)
    return spread(layer).to(device)
