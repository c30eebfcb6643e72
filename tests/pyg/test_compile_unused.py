"""Parameters and features that take no part in a call have no gradient under ``enable(compile=True)``, as
natively: one of zeros is followed by weight decay and momentum."""
from __future__ import annotations

import pytest
import torch
from torch_geometric import nn

import gnnaccel
from tests.pyg import graphs
from tests.pyg.compiling import Pair, on, route, same, step, truth  # noqa: F401
from tests.pyg.graphs import EDGE, F, M

LAYERS = {
    "GATConv": lambda: nn.GATConv(F, 4, 2, edge_dim=EDGE),
    "GATv2Conv": lambda: nn.GATv2Conv(F, 4, 2, edge_dim=EDGE),
    "TransformerConv": lambda: nn.TransformerConv(F, 4, 2, root_weight=False),
    "TransformerConv with edges": lambda: nn.TransformerConv(F, 4, 2, root_weight=False, beta=True,
                                                             bias=False, edge_dim=EDGE),
}


@pytest.mark.long
@pytest.mark.parametrize("label", LAYERS)
def test_what_takes_no_part_has_no_gradient(route, label):
    layer = LAYERS[label]().to(route.device)
    more = (graphs.edge_features(),) if "with edges" in label else ()
    inputs = [t.to(route.device) for t in (graphs.features(), graphs.square(), *more)]
    expected = truth(layer, *inputs)
    assert None in expected[1]
    on(route)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        same(step(compiled, *inputs), expected)
    found = gnnaccel.stats()[label.split()[0]]
    assert found["compiled"] == 2 and found["routes"] == {route.backend: 2}


@pytest.mark.long
@pytest.mark.parametrize("name", ["SAGEConv", "RGCNConv", "SimpleConv"])
def test_destinations_that_are_only_counted_have_no_gradient(route, name):
    make = {"SAGEConv": lambda: nn.SAGEConv((F, F), 8, root_weight=False),
            "RGCNConv": lambda: nn.RGCNConv((F, F), 8, 3, root_weight=False),
            "SimpleConv": lambda: nn.SimpleConv()}
    model = Pair(make[name]()).to(route.device)
    more = (torch.randint(0, 3, (graphs.E,)),) if name == "RGCNConv" else ()
    inputs = [t.to(route.device) for t in (graphs.features(), graphs.features(M),
                                           graphs.bipartite(), *more)]
    expected = truth(model, *inputs)
    assert expected[1][1] is None
    on(route)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        same(step(compiled, *inputs), expected)
    assert gnnaccel.stats()[name]["compiled"] == 2
