"""Messages with whole numbers and truth values of edges or nodes, such as kinds and masks."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.pyg import graphs
from tests.pyg.generated_calls import routes, to
from tests.pyg.generated_layers import WIDTH, Message
from tests.pyg.graphs import N
from tests.pyg.judge import close

KINDS = 4


class OfKinds(Message):
    """``kind``: [E] or [E, k] of edges, [N] of nodes."""

    def __init__(self, aggr: str = "add"):
        super().__init__(aggr, node_dim=0)
        self.table, self.embed = nn.Parameter(torch.randn(KINDS, WIDTH)), nn.Embedding(KINDS, WIDTH)

    def forward(self, x, edge_index, edge_attr=None, kind=None):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr, kind=kind)


# --- kinds of nodes -------------------------------------------------------------------------------

class Picked(OfKinds):
    def message(self, x_j, kind_j):
        return torch.sigmoid(x_j) * self.table[kind_j]


class Embedded(OfKinds):
    def message(self, x_i, x_j, kind_i):
        return torch.tanh(x_j - x_i) * self.embed(kind_i)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("cls", [Picked, Embedded])
def test_nodes_that_no_edge_reads_may_be_of_no_kind(kernels, cls, grad, frozen):
    """The host looks up the kinds that edges read alone."""
    layer, kind = cls().requires_grad_(not frozen), torch.randint(0, KINDS, (N,))
    kind[-1] = 77  # no edge is there
    layer, (x, ei, kind) = layer.to(kernels.device), to(kernels.device, graphs.features(),
                                                        graphs.square(), kind)
    with torch.set_grad_enabled(grad):
        expected = layer(x, ei, kind=kind)
        with kernels.on():
            assert close(layer(x, ei, kind=kind), expected)
    assert routes(layer) == {"cuda": 1}
