"""Layers whose results are as wide as features, under ``enable(compile=True)``: features of one
column are added to wider ones by repeating them, and the result is as wide as those."""
from __future__ import annotations

import pytest
import torch
from torch_geometric import nn

import gnnaccel
from tests.pyg import graphs
from tests.pyg.compiling import Pair, on, route, same, step, truth  # noqa: F401
from tests.pyg.graphs import EDGE, F, M


def gin(width=F):
    return nn.GINConv(torch.nn.Linear(width, 8))


def gine(width=F, edge_dim=None):
    return nn.GINEConv(torch.nn.Linear(width, 8), edge_dim=edge_dim)


def mapped():
    return gine(edge_dim=EDGE)


#: label -> (layer, widths of the pair, that of the edges' features, whether it is an operator)
PAIRS = {
    "GINConv": (gin, (F, F), None, True), "GINConv of one": (lambda: gin(1), (1, 1), None, True),
    "GINConv, narrow destinations": (gin, (F, 1), None, False),
    "GINConv, narrow sources": (gin, (1, F), None, False),
    "GINEConv": (gine, (F, F), F, True),
    "GINEConv, narrow destinations": (gine, (F, 1), F, False),
    "GINEConv with a map": (mapped, (F, F), EDGE, True),
    "GINEConv with a map, narrow sources": (mapped, (1, F), EDGE, False),
    "GINEConv with a map, narrow nodes": (mapped, (1, 1), EDGE, False),
}


@pytest.mark.long
@pytest.mark.parametrize("label", PAIRS)
def test_pairs_of_several_widths(route, label):
    make, widths, of_edges, carried = PAIRS[label]
    layer = make()
    model = Pair(layer).to(route.device)
    more = () if of_edges is None else (graphs.edge_features(width=of_edges),)
    inputs = [t.to(route.device) for t in (graphs.features(width=widths[0]),
                                           graphs.features(M, widths[1]), graphs.bipartite(), *more)]
    expected = truth(model, *inputs)
    on(route)
    same(step(torch.compile(model, backend="aot_eager", fullgraph=True), *inputs), expected)
    found = gnnaccel.stats().get(type(layer).__name__, {})
    assert found.get("compiled", 0) == carried


@pytest.mark.long
def test_narrow_nodes_beside_mapped_edges(route):
    layer = mapped().to(route.device)
    inputs = [t.to(route.device) for t in (graphs.features(width=1), graphs.square(),
                                           graphs.edge_features())]
    expected = truth(layer, *inputs)
    on(route)
    same(step(torch.compile(layer, backend="aot_eager", fullgraph=True), *inputs), expected)
