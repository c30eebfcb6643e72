"""DGL's attention layers, each built one usual way, for tests that hold for all of them."""
from __future__ import annotations

from typing import Any

import dgl
import torch
from dgl.nn import AGNNConv, DotGatConv, EdgeGATConv, EGATConv, GATv2Conv
from torch import Tensor

from tests.dgl import graphs
from tests.dgl.graphs import F
from tests.judge import spread

EDGE = 4
NAMES = ["GATv2Conv", "DotGatConv", "AGNNConv", "EdgeGATConv", "EGATConv"]
WITH_EDGES = ["EdgeGATConv", "EGATConv"]
WITH_DROPOUT = ["GATv2Conv", "EdgeGATConv"]
# nodes of in-degree 0, unless told otherwise; EGATConv always does
REFUSING = [name for name in NAMES if name != "EGATConv"]


def build(name: str, heads: int = 2, width: int = 8, features: Any = F,
          **options) -> torch.nn.Module:
    """A layer of class ``name``; AGNNConv takes no sizes. Biases are not zero."""
    if name == "AGNNConv":
        layer = AGNNConv(**options)
    elif name == "EdgeGATConv":
        layer = EdgeGATConv(features, EDGE, width, heads, **options)
    elif name == "EGATConv":
        layer = EGATConv(features, EDGE, width, 5, heads, **options)
    else:
        layer = {"GATv2Conv": GATv2Conv,
                 "DotGatConv": DotGatConv}[name](features, width, heads, **options)
    return spread(layer)


def arguments(name: str, g: dgl.DGLGraph, x: Any = None) -> tuple:
    """What a layer of that class is called with: the graph, features of its nodes, and of its edges
    if it wants them."""
    x = graphs.features(g.num_src_nodes()) if x is None else x
    return (g, x, edge_features(g)) if name in WITH_EDGES else (g, x)


def edge_features(g: dgl.DGLGraph, width: int = EDGE) -> Tensor:
    return torch.randn(g.num_edges(), width)
