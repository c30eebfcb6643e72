"""Many gradients at once through a checkpoint, which hands out no saved tensor twice."""
from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import (GATConv, GCNConv, GraphConv, LGConv, RGATConv, RGCNConv, SAGEConv,
                                TransformerConv)

from tests.pyg import graphs
from tests.pyg.judge import close
from tests.pyg.layers import spread
from tests.pyg.test_autograd import Own, batched

WIDTH = graphs.F
LAYERS = {
    "GATConv": lambda: GATConv(WIDTH, 4, heads=2),
    "TransformerConv": lambda: TransformerConv(WIDTH, 4, heads=2),
    "GCNConv": lambda: GCNConv(WIDTH, 4),
    "LGConv": LGConv,
    "GraphConv": lambda: GraphConv(WIDTH, 4),
    "SAGEConv": lambda: SAGEConv(WIDTH, 4, aggr="max"),
    "RGCNConv": lambda: RGCNConv(WIDTH, 4, 3),
    "RGATConv": lambda: RGATConv(WIDTH, 4, 3),
    "Own": Own,
}


@pytest.mark.parametrize("name", LAYERS)
def test_many_gradients_through_a_checkpoint(route, name):
    layer = spread(LAYERS[name]()).to(route.device)
    args = route.put(graphs.features(), graphs.square())
    if name.startswith("R"):
        args += route.put(torch.arange(graphs.E) % 3)
    elif name == "GraphConv":
        args += route.put(torch.linspace(0.5, 1.5, graphs.E).requires_grad_())
    x = args[0].requires_grad_()

    def call():
        out = checkpoint(layer, *args, use_reentrant=False)
        return batched(out, x, torch.linspace(-1, 1, 3 * out.numel()).view(3, *out.shape).to(x))

    expected = call()
    with route.on(on_fallback="native"):
        assert close(call(), expected, 1e-5)
