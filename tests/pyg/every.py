"""One call of every kind of layer that is taken over: for tests that hold for all of them."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch_geometric import nn

from tests.pyg import graphs
from tests.pyg.graphs import E, EDGE, F, N
from tests.pyg.judge import spread

RELATIONS = 3
METADATA = (["a", "b"], [("a", "to", "b"), ("b", "back", "a"), ("a", "with", "a")])


def _mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(F, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))


def _plain() -> tuple:
    return graphs.features(), graphs.square()


def _weighted() -> tuple:
    return graphs.features(), graphs.square(), torch.rand(E)


def _with_edges() -> tuple:
    return graphs.features(), graphs.square(), graphs.edge_features()


def _typed() -> tuple:
    return graphs.features(), graphs.square(), torch.randint(0, RELATIONS, (E,))


def _hetero() -> tuple:
    x = {name: graphs.features() for name in METADATA[0]}
    return x, {relation: graphs.square() for relation in METADATA[1]}


def _hetero_conv(make: Callable) -> Callable:
    return lambda: nn.HeteroConv({relation: make() for relation in METADATA[1]})


#: name -> (the layer, its inputs)
CALLS: dict[str, tuple[Callable, Callable]] = {
    "GATConv": (lambda: nn.GATConv(F, 4, 2), _plain),
    "GATConv, edges": (lambda: nn.GATConv(F, 4, 2, edge_dim=EDGE), _with_edges),
    "GATv2Conv": (lambda: nn.GATv2Conv(F, 4, 2), _plain),
    "TransformerConv": (lambda: nn.TransformerConv(F, 4, 2), _plain),
    "AGNNConv": (lambda: nn.AGNNConv(), _plain),
    "SuperGATConv": (lambda: nn.SuperGATConv(F, 4, 2), _plain),
    "SAGEConv": (lambda: nn.SAGEConv(F, 8), _plain),
    "SAGEConv, max": (lambda: nn.SAGEConv(F, 8, aggr="max"), _plain),
    "GraphConv": (lambda: nn.GraphConv(F, 8), _weighted),
    "GCNConv": (lambda: nn.GCNConv(F, 8), _plain),
    "GCNConv, weights": (lambda: nn.GCNConv(F, 8), _weighted),
    "GINConv": (lambda: nn.GINConv(_mlp()), _plain),
    "GINEConv": (lambda: nn.GINEConv(_mlp(), edge_dim=EDGE), _with_edges),
    "GENConv": (lambda: nn.GENConv(F, 8), _plain),
    "PNAConv": (lambda: nn.PNAConv(F, 8, ["mean", "max", "std"], ["identity", "amplification"],
                                   torch.tensor([1, 3, 5, 2])), _plain),
    "EGConv": (lambda: nn.EGConv(F, 8), _plain),
    "NNConv": (lambda: nn.NNConv(F, 8, torch.nn.Sequential(torch.nn.Linear(EDGE, 8 * F))),
               _with_edges),
    "ChebConv": (lambda: nn.ChebConv(F, 8, 2), _weighted),
    "RGCNConv": (lambda: nn.RGCNConv(F, 8, RELATIONS), _typed),
    "RGCNConv, blocks": (lambda: nn.RGCNConv(F, 8, RELATIONS, num_blocks=2), _typed),
    "FastRGCNConv": (lambda: nn.FastRGCNConv(F, 8, RELATIONS, num_bases=2), _typed),
    "RGATConv": (lambda: nn.RGATConv(F, 8, RELATIONS), _typed),
    "FiLMConv": (lambda: nn.FiLMConv(F, 8, RELATIONS), _typed),
    "HGTConv": (lambda: nn.HGTConv(F, 8, METADATA, 2), _hetero),
    "HANConv": (lambda: nn.HANConv(F, 8, METADATA, 2), _hetero),
    "HeteroConv, SAGEConv": (_hetero_conv(lambda: nn.SAGEConv((F, F), 8)), _hetero),
    "HeteroConv, GATConv": (_hetero_conv(lambda: nn.GATConv((F, F), 4, 2, add_self_loops=False)),
                            _hetero),
    "HeteroConv, GATv2Conv": (
        _hetero_conv(lambda: nn.GATv2Conv((F, F), 4, 2, add_self_loops=False)), _hetero),
    "HeteroConv, GraphConv": (_hetero_conv(lambda: nn.GraphConv((F, F), 8)), _hetero),
    "pool": (lambda: nn.MeanAggregation(), lambda: (graphs.features(), torch.arange(N) // 7)),
}


def made(name: str) -> tuple[torch.nn.Module, tuple]:
    """The layer, in eval mode, and its inputs, on the CPU, the same each time."""
    torch.manual_seed(1)
    layer, inputs = CALLS[name]
    return spread(layer()).eval(), inputs()


def leaves(value) -> list[torch.Tensor]:
    """The tensors of a layer's result."""
    if isinstance(value, dict):
        return [t for found in value.values() for t in leaves(found)]
    return [] if value is None else [value]


def moved(value, device):
    """The tensor, or a dictionary's tensors, on ``device``."""
    if isinstance(value, dict):
        return {key: moved(v, device) for key, v in value.items()}
    return value.to(device)
