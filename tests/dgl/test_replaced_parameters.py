"""Every parameter and every size of every layer, replaced by others: as the host has it."""
from __future__ import annotations

import pytest
import torch
from dgl import nn

from gnnaccel.adapters.dgl import LAYERS
from tests import replaced
from tests.dgl import graphs, layers, test_hetero_graph_conv as hetero
from tests.dgl.graphs import F, N
from tests.dgl.typed_graphs import R, homogeneous, types
from tests.judge import spread

T = 3


def _plain() -> tuple:
    return graphs.square(), graphs.features()


def _with_edges() -> tuple:
    g, x = _plain()
    return g, x, layers.edge_features(g)


def _typed() -> tuple:
    return homogeneous(), graphs.features(), types()


def _by_type() -> tuple:
    return homogeneous(), graphs.features(), torch.randint(0, T, (N,)), types()


def _rows_by_type() -> tuple:
    return graphs.features(), torch.randint(0, T, (N,))


def _network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(layers.EDGE, 5), torch.nn.ReLU(),
                               torch.nn.Linear(5, 8 * F))


#: name -> (the layer, its inputs)
CALLS = {"GATConv": (lambda: nn.GATConv(F, 4, 2), _plain),
         "GATConv, residual": (lambda: nn.GATConv(F, 4, 2, residual=True), _plain),
         "GATv2Conv": (lambda: nn.GATv2Conv(F, 4, 2, residual=True), _plain),
         "DotGatConv": (lambda: nn.DotGatConv(F, 4, 2), _plain),
         "AGNNConv": (nn.AGNNConv, _plain),
         "EdgeGATConv": (lambda: nn.EdgeGATConv(F, layers.EDGE, 4, 2), _with_edges),
         "EGATConv": (lambda: nn.EGATConv(F, layers.EDGE, 4, 5, 2), _with_edges),
         "RelGraphConv": (lambda: nn.RelGraphConv(F, 8, R), _typed),
         "RelGraphConv, bases": (lambda: nn.RelGraphConv(F, 8, R, "basis", 2), _typed),
         "RelGraphConv, blocks": (lambda: nn.RelGraphConv(F, 8, R, "bdd", 2, layer_norm=True),
                                  _typed),
         "HGTConv": (lambda: nn.HGTConv(F, 4, 2, T, R, 0.0), _by_type),
         "HGTConv, as wide": (lambda: nn.HGTConv(F, 6, 2, T, R, 0.0, use_norm=True), _by_type),
         "TypedLinear": (lambda: nn.TypedLinear(F, 8, T), _rows_by_type),
         "TypedLinear, bases": (lambda: nn.TypedLinear(F, 8, T, "basis", 2), _rows_by_type),
         "TypedLinear, blocks": (lambda: nn.TypedLinear(F, 8, T, "bdd", 2), _rows_by_type),
         "HeteroGraphConv": (hetero.layer, lambda: (hetero.graph(), hetero.features())),
         "HeteroGraphConv, sage": (lambda: hetero.layer("sage"),
                                   lambda: (hetero.graph(), hetero.features())),
         "GraphConv": (lambda: nn.GraphConv(F, 8), _plain),
         "GraphConv, wider": (lambda: nn.GraphConv(F, 20), _plain),
         "SAGEConv": (lambda: nn.SAGEConv(F, 8, "mean"), _plain),
         "SAGEConv, wider": (lambda: nn.SAGEConv(F, 20, "gcn"), _plain),
         "SAGEConv, pool": (lambda: nn.SAGEConv(F, 8, "pool"), _plain),
         "GINConv": (lambda: nn.GINConv(torch.nn.Linear(F, 8), "mean", learn_eps=True), _plain),
         "GatedGCNConv": (lambda: nn.GatedGCNConv(F, layers.EDGE, 8, batch_norm=False),
                          _with_edges),
         "NNConv": (lambda: nn.NNConv(F, 8, _network(), "sum", residual=True), _with_edges)}
NAMED = [(name, parameter) for name, (make, _) in CALLS.items()
         for parameter in replaced.parameters(make())]
SIZED = [(name, size) for name, (make, _) in CALLS.items() for size in replaced.sizes(make())]


def made(name: str) -> tuple[torch.nn.Module, tuple]:
    torch.manual_seed(1)
    layer, inputs = CALLS[name]
    layer = spread(layer()).eval()
    args = inputs()
    for x in (t for a in args for t in (a.values() if isinstance(a, dict) else (a,))):
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x.requires_grad_()
    return layer, args


def test_every_layer_is_here():
    assert set(LAYERS) == {name.partition(",")[0] for name in CALLS}


@pytest.mark.long
@pytest.mark.parametrize("name,parameter", replaced.few_quick(NAMED))
def test_parameters(emulated, name, parameter):
    layer, args = made(name)
    changes = replaced.of_parameter(layer, parameter)
    if parameter == "attn":  # the host ends the process where a softmax is over scores of its kind
        changes = (change for change in changes if not change[0].startswith("attn [1, 1, "))
    replaced.check(emulated, layer, args, changes)


@pytest.mark.long
@pytest.mark.parametrize("name,size", replaced.few_quick(SIZED))
def test_sizes(emulated, name, size):
    replaced.check_sizes(emulated, made, name, size)
