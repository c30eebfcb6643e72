"""Maps of edges' features whose weights are of another dtype than these: PyG raises."""
from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import GATConv, RGATConv

from tests.pyg import graphs


def gat(edges: int) -> tuple:
    return (GATConv(6, 4, heads=2, edge_dim=3),)


def rgat(edges: int) -> tuple:
    return RGATConv(6, 4, 2, edge_dim=3), torch.randint(2, (edges,))


@pytest.mark.long
@pytest.mark.parametrize("make", [gat, rgat])
def test_the_hosts_error_comes(route, make):
    edge_index = graphs.square()
    layer, *types = make(edge_index.shape[1])
    x, edge_attr = torch.randn(graphs.N, 6), graphs.edge_features(edge_index.shape[1], 3)
    layer, *given = (one.to(route.device) for one in (layer, x, edge_index, *types, edge_attr))
    with route.on():
        layer(*given)
    layer.lin_edge.double()
    with pytest.raises(RuntimeError, match="same dtype"):
        layer(*given)
    with route.on(on_fallback="native"), pytest.raises(RuntimeError, match="same dtype"):
        layer(*given)
