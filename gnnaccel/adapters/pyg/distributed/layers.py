"""PyG's layers that may run over a part, and reasons against the others."""
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from gnnaccel.dispatch.policy.reasons import Reason, reason

#: layers called with (sources, destinations): their adapters have kernels for that, and RGCN's
#: forward would send rows once a relation
BIPARTITE = ("GATConv", "GATv2Conv", "TransformerConv", "RGCNConv", "FastRGCNConv", "NNConv")
#: layers called with dictionaries by type of nodes and of edges; own and halo rows are their nodes
TYPED = ("HGTConv",)
#: layers that run natively over parts, and write rows for edges
NATIVE = frozenset(("AGNNConv", "FiLMConv", "HEATConv", "PNAConv", "RGATConv", "SuperGATConv"))
#: layers that do nothing with rows of sources but gather them, as tests/offload/test_in_place.py
#: shows
GATHERING = frozenset((
    "APPNP", "ARMAConv", "ClusterGCNConv", "GCN2Conv", "GCNConv", "GINConv", "GINEConv",
    "GatedGraphConv", "GraphConv", "LEConv", "LGConv", "MixHopConv", "SAGEConv", "SGConv",
    "SSGConv", "SimpleConv", "TAGConv"))
#: layers compared with the whole graph's results by tests/distributed/test_layers.py
COMPARED = frozenset((
    "AGNNConv", "APPNP", "ARMAConv", "CGConv", "ClusterGCNConv", "DNAConv", "EGConv", "EdgeConv",
    "FAConv", "FastRGCNConv", "FeaStConv", "FiLMConv", "GATConv", "GATv2Conv", "GCN2Conv",
    "GCNConv", "GENConv", "GINConv", "GINEConv", "GMMConv", "GatedGraphConv", "GeneralConv",
    "GraphConv", "HEATConv", "LEConv", "LGConv", "MFConv", "MixHopConv", "NNConv", "PDNConv",
    "PNAConv", "PPFConv", "PointGNNConv", "PointNetConv", "PointTransformerConv", "RGATConv",
    "RGCNConv", "ResGatedGraphConv", "SAGEConv", "SGConv", "SSGConv", "SimpleConv", "SuperGATConv",
    "TAGConv", "TransformerConv", "WLConvContinuous"))

_ALL = "it computes over all nodes of the graph at once"
_LEAVING = "it needs the edges that leave a node; a part has those that enter"
_OTHERS = "its messages pass over other edges than the graph's own"
#: classes of PyG that cannot run over a part, and why
REFUSED = {
    "ChebConv": _LEAVING, "DirGNNConv": _LEAVING,
    "HypergraphConv": _OTHERS, "SignedConv": _OTHERS, "GravNetConv": _OTHERS, "PANConv": _OTHERS,
    "DynamicEdgeConv": _OTHERS, "XConv": _OTHERS,
    "HANConv": _ALL,
    "WLConv": "it numbers colours by a table of its own process",
    **dict.fromkeys(("GraphNorm", "InstanceNorm", "PairNorm", "MeanSubtractionNorm",
                     "DiffGroupNorm", "GraphSizeNorm", "TopKPooling", "SAGPooling", "EdgePooling",
                     "ASAPooling", "PANPooling", "MemPooling", "ClusterPooling", "GPSConv",
                     "DenseGCNConv", "DenseSAGEConv", "DenseGINConv", "DenseGraphConv",
                     "DenseGATConv"), _ALL),
}


def refusal(layer: Any) -> Reason | None:
    """Why a layer cannot run over a part; None where nothing is known against it. Classes that
    users write are let pass."""
    base = next((cls for cls in type(layer).__mro__
                 if cls.__module__.startswith("torch_geometric.")), type(layer))
    name = base.__name__
    if name in REFUSED:
        return reason("GA701", f"{name}: {REFUSED[name]}")
    if getattr(layer, "flow", "source_to_target") != "source_to_target":
        return reason("GA702", f"{name} has flow={layer.flow!r}; a part has the edges that enter")
    if getattr(layer, "_explain", None):
        return reason("GA702", f"{name} is being explained")
    if base.__module__.startswith("torch_geometric.") and name != "MessagePassing":
        if name in TYPED:
            return None if forward_is_hosts(layer) else reason(
                "GA702", f"a class that derives from {name} has a forward of its own")
        if name not in COMPARED:
            return reason("GA702", f"{name} was never compared over a partitioned graph")
    return None


def is_bipartite(layer: Any) -> bool:
    """Whether a layer is one of `BIPARTITE`, with the ``forward`` that PyG gave it."""
    return any(base.__name__ in BIPARTITE and base.__module__.startswith("torch_geometric.")
               and type(layer).forward is vars(base).get("forward") for base in type(layer).__mro__)


def gathers(layer: Any) -> bool:
    """Whether a layer is one of `GATHERING`, with the ``forward`` that PyG gave it."""
    return type(layer).__name__ in GATHERING and forward_is_hosts(layer)


def is_typed(layer: Any) -> bool:
    """Whether a layer is one of `TYPED`, with the ``forward`` that PyG gave it."""
    return any(base.__name__ in TYPED and base.__module__.startswith("torch_geometric.")
               for base in type(layer).__mro__) and forward_is_hosts(layer)


@functools.cache
def signature(forward: Callable) -> inspect.Signature:
    return inspect.signature(forward)


def forward_is_hosts(layer: Any) -> bool:
    """Whether a layer has the ``forward`` that PyG gave its class."""
    base: Any = next((cls for cls in type(layer).__mro__
                      if cls.__module__.startswith("torch_geometric.")), None)
    return (base is not None and "forward" not in layer.__dict__
            and type(layer).forward is base.forward)


def whole_graph(module: Any) -> Reason | None:
    """Why a module that passes no messages cannot run over a part."""
    from torch_geometric.nn import LayerNorm

    name = type(module).__name__
    if type(module).__module__.startswith("torch_geometric."):
        if name in REFUSED:
            return reason("GA701", f"{name}: {REFUSED[name]}")
        if isinstance(module, LayerNorm) and module.mode == "graph":
            return reason("GA701", f"LayerNorm(mode='graph'): {_ALL}",
                          "use mode='node', or torch.nn.LayerNorm")
    return None


def findings(model: Any) -> tuple[list[tuple[str, Reason]], list[tuple[str, Reason]]]:
    """(reasons why a model cannot run over a part, advice), as (module's name, reason)."""
    import torch
    from torch_geometric.nn import MessagePassing

    wrong, advice = [], []
    for name, module in model.named_modules():
        problem = refusal(module) if isinstance(module, MessagePassing) else whole_graph(module)
        if problem is not None:
            wrong.append((name, problem))
        elif (isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
              and not isinstance(module, torch.nn.SyncBatchNorm) and module.training):
            advice.append((name, reason("GA703")))
    return wrong, advice
