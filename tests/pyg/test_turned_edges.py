"""Messages that take the list of edges with a row for each edge: turned, then its columns."""
from __future__ import annotations

import pytest
from torch_geometric.utils import softmax

from tests.pyg import graphs
from tests.pyg.generated_calls import stays_native
from tests.pyg.generated_layers import Message
from tests.pyg.judge import compare

#: (source, destination) of each edge
COLUMNS = {
    "t": lambda ei: (ei.t()[:, 0], ei.t()[:, 1]),
    "T": lambda ei: (ei.T[:, -2], ei.mT[..., -1]),
    "permute": lambda ei: (ei.permute(1, 0)[:, 0], ei.permute((-1, -2))[:, -1]),
    "transpose": lambda ei: (ei.transpose(0, 1)[:, 0], ei.swapaxes(-1, 0)[:, 1]),
    "back": lambda ei: (ei.t().t()[0], ei.T.permute(1, 0)[1]),
    "unbind": lambda ei: ei.t().unbind(1)}


class ByColumns(Message):
    """A softmax over the edges of a node."""

    def __init__(self, columns):
        super().__init__()
        self.columns = columns

    def message(self, x_i, x_j, edge_index):
        source, destination = self.columns(edge_index)
        weights = softmax((x_i * x_j).sum(-1), destination)
        other = softmax((x_i - x_j).square().sum(-1), source)
        return x_j * (weights * other).unsqueeze(-1)


@pytest.mark.long
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("name", COLUMNS)
def test_columns_are_ends(emulated, name, flow):
    layer, ei = ByColumns(COLUMNS[name]), graphs.square()
    ei[:, -1] = graphs.N - 1
    layer.flow = flow
    compare(emulated, layer, graphs.features(), ei)


@pytest.mark.parametrize("columns", [
    lambda ei: (ei.permute(0, 1)[0], ei.permute(0, 1)[1]),
    lambda ei: (ei.transpose(0, 0)[0], ei.t()[:, 1]),
    lambda ei: (ei.t()[:, 0:1].squeeze(1), ei[1]), lambda ei: (ei.t().flip(1)[:, 1], ei[1])])
def test_other_pieces_are_not_followed(emulated, columns):
    stays_native(emulated, ByColumns(columns))
