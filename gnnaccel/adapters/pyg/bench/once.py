"""PyG's relational layers for the benchmark of graphs that come once, each with as many channels
out as in."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from gnnaccel.adapters.pyg.bench.models import two_layers

Triple = tuple[str, str, str]
NODE_TYPES = ("a", "b", "c")
EDGE_CHANNELS = 3
_EMBEDDED, _HEADS, _BASES = 4, 4, 3


@dataclasses.dataclass(frozen=True)
class OnceLayer:
    """``build(nn, channels, triples)`` makes the layer, ``nn`` being torch_geometric.nn.

    ``takes``: "dictionaries" by node type and by (source type, relation, destination type);
    "edges": all nodes in one tensor, ``edge_index`` and ``edge_type``; "edges of typed nodes":
    ``node_type`` and EDGE_CHANNELS features of each edge besides; or "rows": one tensor and each
    row's type.
    """

    name: str
    takes: str
    build: Callable[[Any, int, list[Triple]], Any]


def _flat(name: str, class_name: str, **options: Any) -> OnceLayer:
    return OnceLayer(name, "edges", lambda nn, width,
                     triples: getattr(nn, class_name)(width, width, len(triples), **options))


def _heads(name: str, class_name: str) -> OnceLayer:
    return OnceLayer(f"{name} {_HEADS} heads", "dictionaries", lambda nn, width,
                     triples: getattr(nn, class_name)(
        width, width, (list(NODE_TYPES), triples), heads=_HEADS))


def _hetero(name: str, *inner: Callable[[Any, int], Any]) -> OnceLayer:
    """A HeteroConv whose relations take the ``inner`` layers in turns."""
    return OnceLayer(f"HeteroConv {name}", "dictionaries", lambda nn, width, triples: nn.HeteroConv(
        {triple: inner[number % len(inner)](nn, width) for number, triple in enumerate(triples)}))


def _model(function: str, *bases: int) -> OnceLayer:
    """A model over types, made of two SAGEConv."""
    return OnceLayer(f"{function} SAGE", "dictionaries", lambda nn, width,
                     triples: getattr(nn, function)(
        two_layers(_sage(nn, width), _sage(nn, width), lambda x: x.relu()),
        (list(NODE_TYPES), triples), *bases))


def _sage(nn: Any, width: int) -> Any:
    return nn.SAGEConv(width, width)


def _gat(nn: Any, width: int) -> Any:
    return nn.GATConv(width, width, add_self_loops=False)


def _gin(nn: Any, width: int) -> Any:
    import torch

    return nn.GINConv(torch.nn.Linear(width, width))


LAYERS = {layer.name: layer for layer in (
    _flat("RGCN", "RGCNConv"),
    _flat("RGCN 2 bases", "RGCNConv", num_bases=2),
    _flat("RGCN 4 blocks", "RGCNConv", num_blocks=4),
    _flat("RGCN max", "RGCNConv", aggr="max"),
    _flat("FastRGCN", "FastRGCNConv"),
    _flat("RGAT", "RGATConv"),
    _flat("FiLM", "FiLMConv"),
    OnceLayer("HEAT", "edges of typed nodes", lambda nn, width, triples: nn.HEATConv(
        width, width, len(NODE_TYPES), len(triples), _EMBEDDED, EDGE_CHANNELS, _EMBEDDED)),
    _heads("HGT", "HGTConv"),
    _heads("HAN", "HANConv"),
    OnceLayer("HeteroLinear", "rows", lambda nn, width,
              triples: nn.HeteroLinear(width, width, len(triples))),
    _hetero("SAGE", _sage),
    _hetero("GraphConv", lambda nn, width: nn.GraphConv(width, width)),
    _hetero("GAT", _gat),
    _hetero("GATv2", lambda nn, width: nn.GATv2Conv(width, width, add_self_loops=False)),
    _hetero("GIN", _gin),
    _hetero("SAGE max", lambda nn, width: nn.SAGEConv(width, width, aggr="max")),
    _hetero("SAGE and GAT", _gat, _sage),
    _model("to_hetero"),
    _model("to_hetero_with_bases", _BASES),
)}


def build_layer(layer: OnceLayer, channels: int, triples: list[Triple], device: Any,
                seed: int = 0) -> Any:
    """The layer for relations between ``NODE_TYPES``, with weights fixed by ``seed``. ``channels``
    must be a multiple of 4."""
    import torch
    import torch_geometric.nn

    torch.manual_seed(seed)
    return layer.build(torch_geometric.nn, channels, triples).to(device)
