"""DGL's layers and graphs for the benchmark: the only place of it that imports DGL."""
from __future__ import annotations

import dataclasses
from typing import Any

IN_CHANNELS = 64


@dataclasses.dataclass(frozen=True)
class DglLayer:
    """A layer: ``heads`` heads of ``width`` features each. ``typed`` layers take edge types, or
    node and edge types."""

    name: str
    class_name: str
    heads: int
    width: int
    typed: bool = False


LAYERS = {layer.name: layer for layer in (
    DglLayer("GAT 8x8", "GATConv", 8, 8),
    DglLayer("GATv2 4x16", "GATv2Conv", 4, 16),
    DglLayer("DotGat 1x64", "DotGatConv", 1, 64),
    DglLayer("GraphConv 64", "GraphConv", 1, 64),
    DglLayer("SAGE 64", "SAGEConv", 1, 64),
    DglLayer("RelGraphConv 64", "RelGraphConv", 1, 64, typed=True),
    DglLayer("HGT 4x16", "HGTConv", 4, 16, typed=True),
)}


def problem() -> str | None:
    """Why DGL cannot be used here; None if it can."""
    try:
        import dgl  # noqa: F401
    except Exception as error:  # noqa: BLE001 - a DGL for another torch fails in ways of its own
        return f"{type(error).__name__}: {error}"
    return None


def build_layer(layer: DglLayer, node_types: int, edge_types: int, device: Any,
                seed: int = 0) -> Any:
    """The layer with its host's defaults and weights fixed by ``seed``, but without HGTConv's
    dropout, whose random numbers nobody shares. Nodes without incoming edges are allowed: synthetic
    graphs have them."""
    import torch
    from dgl.nn import pytorch as nn

    torch.manual_seed(seed)
    cls = getattr(nn, layer.class_name)
    if layer.class_name == "HGTConv":
        built = cls(IN_CHANNELS, layer.width, layer.heads, node_types, edge_types, dropout=0.0)
    elif layer.class_name == "RelGraphConv":
        built = cls(IN_CHANNELS, layer.width, edge_types)
    elif layer.class_name == "SAGEConv":
        built = cls(IN_CHANNELS, layer.width, "mean")
    elif layer.class_name == "GraphConv":
        built = cls(IN_CHANNELS, layer.width, allow_zero_in_degree=True)
    else:
        built = cls(IN_CHANNELS, layer.width, layer.heads, allow_zero_in_degree=True)
    return built.to(device)


def build_graph(edge_index: Any, num_nodes: int) -> Any:
    """The graph of these edges, on their device, which takes an enabled gnnaccel where DGL was
    built without CUDA.

    Made on the host and moved, as a script does it: DGL makes its structures of tensors on the
    host in any case.
    """
    import dgl

    src, dst = edge_index.cpu()
    return dgl.graph((src, dst), num_nodes=num_nodes).to(edge_index.device)


def arguments(layer: DglLayer, graph: Any, x: Any, node_type: Any,
              edge_type: Any) -> tuple[tuple, dict]:
    """(arguments, keyword arguments) of the layer's call. Nodes and edges are sorted by type, which
    typed layers may be told: DGL's own code is faster then."""
    if layer.class_name == "HGTConv":
        return (graph, x, node_type, edge_type), {"presorted": True}
    if layer.class_name == "RelGraphConv":
        return (graph, x, edge_type), {"presorted": True}
    return (graph, x), {}
