"""`gnnaccel.quantize` on DGL's layers: GATConv has rows in fewer bytes, plain layers say why
not."""
from __future__ import annotations

import copy

import dgl
import pytest
import torch
from dgl.nn import GATConv, GraphConv, SAGEConv

import gnnaccel
from tests.helpers import relative


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (GraphConv(8, 12), SAGEConv(12, 12, "mean"),
                                          GATConv(12, 8, 3), GATConv(24, 5, 1))


def test_what_can_be_quantized():
    with gnnaccel.enabled():
        report = gnnaccel.quantize(Net())
    told = {row.name: row.reason for row in report.rows}
    assert told["c"] is None and told["d"].startswith("GA602")
    assert told["a"].startswith("GA603") and told["b"].startswith("GA603")


@pytest.mark.parametrize("form, error", [("int8", 0.02), ("bf16", 0.006)])
def test_gat_against_fp64(route, form, error):
    torch.manual_seed(0)
    graph, x = dgl.rand_graph(40, 300).add_self_loop(), torch.randn(40, 12)
    layer = GATConv(12, 8, 3)
    exact = copy.deepcopy(layer).double()(graph, x.double())
    with route.on():
        gnnaccel.quantize(layer, form)
        got = layer.to(route.device)(graph.to(route.device), x.to(route.device))
        got.square().sum().backward()
    assert 1e-4 < relative(got.detach().cpu(), exact.detach()) < error
    assert gnnaccel.quant_report(layer).rows[0].quantized == 1 and all(p.grad.isfinite().all()
                                                                       for p in layer.parameters())
