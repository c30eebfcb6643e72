"""Layers give the same bits whether or not the device has reported on their graph yet, which a busy
one does late."""
from __future__ import annotations

import copy

import pytest
import torch
from torch_geometric.nn import CGConv, GATConv, GATv2Conv, TransformerConv

from gnnaccel.cuda.structures.structure import Split
from gnnaccel.dispatch.graph import cache
from tests.pyg import graphs
from tests.pyg.graphs import F, N

WIDE = 4 * F
LAYERS = {
    "Transformer": lambda: TransformerConv(F, WIDE, 1),
    "Transformer without a root": lambda: TransformerConv(F, WIDE, 1, root_weight=False),
    "Transformer beta": lambda: TransformerConv(F, WIDE, 1, beta=True),
    "GAT": lambda: GATConv(F, 8, 2), "GATv2": lambda: GATv2Conv(F, 8, 2), "CG": lambda: CGConv(F),
}


def results(layer, x, ei) -> list[torch.Tensor]:
    layer, x = copy.deepcopy(layer), x.clone().requires_grad_()
    out = layer(x, ei)
    (out * torch.linspace(-1, 2, N).unsqueeze(1)).sum().backward()
    return [out, x.grad, *[p.grad for p in layer.parameters() if p.grad is not None]]


@pytest.mark.parametrize("name", LAYERS)
def test_the_same_bits(emulated, monkeypatch, name):
    torch.manual_seed(0)
    layer, x = LAYERS[name](), graphs.features()
    ei = torch.cat([graphs.square(), torch.arange(N).expand(2, -1)], 1)
    with emulated.on():
        early = results(layer, x, ei)
        cache.clear()
        with monkeypatch.context() as patched:
            patched.setattr(Split, "known", False)
            late = results(layer, x, ei)
    assert len(early) > 4 and all(map(torch.equal, early, late))
