"""Results that were made without gradients and are changed in place with them. The host's are no
views, which torch would let nobody change so."""
from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import (AGNNConv, GATConv, GATv2Conv, GCNConv, LGConv, RGATConv,
                                SuperGATConv)

from tests.pyg import graphs
from tests.pyg.judge import close
from tests.pyg.layers import spread

WIDTH = graphs.F
LAYERS = {
    "GATConv": lambda: GATConv(WIDTH, 8, heads=2),
    "GATConv, pairs": lambda: GATConv((WIDTH, WIDTH), 8, heads=2, add_self_loops=False),
    "GATConv, averaged": lambda: GATConv(WIDTH, 8, heads=2, concat=False),
    "GATv2Conv": lambda: GATv2Conv(WIDTH, 8, heads=2),
    "SuperGATConv": lambda: SuperGATConv(WIDTH, 8, heads=2),
    "RGATConv": lambda: RGATConv(WIDTH, 8, 3),
    "AGNNConv": AGNNConv,
    "GCNConv": lambda: GCNConv(WIDTH, 8, bias=False),
    "LGConv": LGConv,
}


def without_gradients(layer, *args):
    with torch.no_grad():
        return layer(*args)


def in_a_checkpoint(layer, x, *args):
    return checkpoint(layer, x.detach().requires_grad_(), *args, use_reentrant=True)


@pytest.mark.parametrize("called", [without_gradients, in_a_checkpoint])
@pytest.mark.parametrize("name", LAYERS)
def test_what_was_made_without_gradients_can_be_changed_in_place(route, name, called):
    layer, (x, ei) = (spread(LAYERS[name]()).to(route.device).eval(),
                      route.put(graphs.features(), graphs.square()))
    types = [torch.arange(ei.shape[1], device=ei.device) % 3] if name == "RGATConv" else []
    args = ((x, x) if name.endswith("pairs") else x, ei, *types)
    if called is in_a_checkpoint and name.endswith("pairs"):
        pytest.skip("checkpoints see no pairs")
    factor = torch.tensor(2.0, device=route.device, requires_grad=True)

    def found():
        out = called(layer, *args)
        out *= factor
        return [out.detach(), *torch.autograd.grad(out.relu_().pow(2).sum(), factor)]

    expected = found()
    with route.on():
        for _ in range(2):  # a call, and its repetition
            got = found()
            assert all(close(a, b, 1e-5) for a, b in zip(got, expected))
