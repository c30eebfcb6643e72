"""RGATConv for its tests: built, fitted with a graph, and compared."""
from __future__ import annotations

import torch
from torch_geometric.nn import RGATConv

from tests.pyg import graphs
from tests.pyg.graphs import E, F
from tests.pyg.judge import compare, spread

R, UNUSED = 5, 2
PRODUCT, WITHIN = dict(attention_mode="multiplicative-self-attention"), dict(
    attention_mechanism="within-relation")
MODES = [{}, WITHIN, PRODUCT, {**PRODUCT, **WITHIN}]
MODS = ["additive", "scaled", "f-additive", "f-scaled"]
KINDS = [*MODES, {**PRODUCT, "dim": 3}, {**PRODUCT, **WITHIN, "dim": 3}]


def build(width: int = 8, heads: int = 2, channels: int = F, relations: int = R,
          **options) -> RGATConv:
    layer = RGATConv(channels, width, relations, heads=heads, **options)
    torch.nn.init.normal_(layer.l2)  # whatever was in memory, in the host's own initialisation
    return spread(layer)


def types(edges: int = E) -> torch.Tensor:
    """Relations in no order; none of the edges has ``UNUSED``."""
    found = torch.randint(0, R - 1, (edges,))
    return found + (found >= UNUSED)


def inputs(route) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(t.to(route.device) for t in (graphs.features(), graphs.square(), types()))


def check(route, layer, x=None, edge_index=None, **kwargs):
    """`compare` on the usual graph; relations are drawn to fit."""
    edge_index = graphs.square() if edge_index is None else edge_index
    kwargs.setdefault("edge_type", types(edge_index.shape[1]))
    return compare(route, layer, graphs.features() if x is None else x, edge_index, **kwargs)
