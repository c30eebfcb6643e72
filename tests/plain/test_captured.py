"""``enable(capture=True)``: models with plain modules are captured as others are."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import gnnaccel
from gnnaccel.adapters.captured import modules
from tests.plain import layers
from tests.plain.test_layers import tensors

pytest.importorskip("torch_geometric")
from torch_geometric.nn import GCNConv

from tests.pyg.recorded import recorded  # noqa: F401


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = layers.WeightedSum(), layers.Attention()
        self.last = GCNConv(8, 4)

    def forward(self, x, edge_index, w):
        x = self.second(self.first(x, edge_index, w).relu(), edge_index)
        return self.last(x, edge_index)


@pytest.mark.long
@pytest.mark.usefixtures("recorded")
def test_models_are_replayed():
    modules.reset()
    given, net = tensors("x edge_index w"), Net()
    expected = net(*given)
    with gnnaccel.enabled(capture=True, when="supported"):
        for _ in range(8):
            net.zero_grad()
            out = net(*given)
            out.square().sum().backward()
            torch.testing.assert_close(out, expected)
        assert gnnaccel.status()["captured"]["replays"].get("Net", 0) > 2
