"""Ids out of range are an error that says which are valid, as PyG's own is, on every route."""
from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import (GATConv, GENConv, GINEConv, PNAConv, ResGatedGraphConv, SAGEConv,
                                TransformerConv)

from gnnaccel.errors import GraphError
from tests.routes import opened

NODES, EDGES, WIDTH = 12, 40, 8
LAYERS = {"GATConv": lambda: GATConv(WIDTH, 4), "TransformerConv": lambda: TransformerConv(WIDTH, 4),
          "SAGEConv": lambda: SAGEConv(WIDTH, 4), "SAGEConv max": lambda: SAGEConv(WIDTH, 4, "max"),
          "GENConv": lambda: GENConv(WIDTH, 4), "ResGatedGraphConv": lambda: ResGatedGraphConv(WIDTH, 4),
          "GINEConv": lambda: GINEConv(torch.nn.Linear(WIDTH, 4)),
          "PNAConv": lambda: PNAConv(WIDTH, 4, ["mean", "max"], ["identity"], torch.tensor([1, 2]))}


@pytest.fixture(params=["torch", "emulated"])
def route(request):
    with opened(request.param) as found:
        yield found


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("name", LAYERS)
def test_ids_out_of_range(route, name, row):
    layer = LAYERS[name]()
    edges = torch.randint(NODES, (2, EDGES))
    edges[row, 5] = 99
    more = (torch.randn(EDGES, WIDTH),) if name == "GINEConv" else ()
    with route.on(), pytest.raises(GraphError, match="valid indices") as raised:
        layer(torch.randn(NODES, WIDTH), edges, *more)
    assert isinstance(raised.value, IndexError)
