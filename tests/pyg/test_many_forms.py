"""Layers that are called in turn for many kinds of edges, each with a form or a graph of its own."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch_geometric.nn import MessagePassing

from gnnaccel.adapters.tracing import tracing
from tests.helpers import assert_accurate
from tests.pyg import graphs
from tests.routes import emulated, gpu, one_thread  # noqa: F401

KINDS = 9


class ByKind(MessagePassing):
    """A map for each kind of edges, which is an argument, or an attribute that forward sets."""

    def __init__(self, told: bool):
        super().__init__(aggr="add")
        self.maps = nn.ModuleList([nn.Linear(8, 8) for _ in range(KINDS)])
        self.told, self.kind = told, 0

    def forward(self, x, edge_index, kind):
        self.kind = kind
        return self.propagate(edge_index, x=x, kind=kind if self.told else None)

    def message(self, x_j, kind):
        return torch.tanh(self.maps[kind if self.told else self.kind](x_j))


class ByWidth(MessagePassing):
    """Features of edges of several widths."""

    def __init__(self):
        super().__init__(aggr="add")

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_j, edge_attr):
        return torch.tanh(x_j) * edge_attr.mean(-1, keepdim=True)


@pytest.mark.parametrize("layer", [ByKind(True), ByKind(False), ByWidth()],
                         ids=["argument", "attribute", "width"])
def test_none_is_read_anew(kernels, layer, monkeypatch):
    layer = layer.to(kernels.device)
    made, native = [], tracing._trace
    monkeypatch.setattr(tracing, "_trace", lambda *args: made.append(1) or native(*args))
    x = torch.randn(graphs.N, 8, device=kernels.device)
    edges = [graphs.square().clone().to(kernels.device) for _ in range(KINDS)]
    more = (list(range(KINDS)) if isinstance(layer, ByKind) else
            [torch.randn(graphs.E, 2 + k, device=kernels.device) for k in range(KINDS)])
    wanted = [layer(x, *one) for one in zip(edges, more)]
    exact = [layer.double()(x.double(), edge, one if isinstance(one, int) else one.double())
             for edge, one in zip(edges, more)]
    layer.float()

    with kernels.on(), torch.no_grad():
        for _ in range(2):
            found = [layer(x, *one) for one in zip(edges, more)]
        first = len(made)
        for _ in range(3):
            found = [layer(x, *one) for one in zip(edges, more)]
        assert 0 < first == len(made)
        if not isinstance(layer, ByKind) or layer.told:  # edges that are new each time
            for _ in range(3):
                for edge, one in zip(edges, more):
                    layer(x, edge.clone(), one)
            assert first == len(made)
        if isinstance(layer, ByKind):
            kept, layer.maps[3] = layer.maps[3], nn.Linear(8, 8).to(kernels.device)
            changed = layer(x, edges[3], 3)
            assert not torch.equal(changed, found[3])
            layer.maps[3] = kept
            found[3] = layer(x, edges[3], 3)
    for at, (one, host, true) in enumerate(zip(found, wanted, exact)):
        assert_accurate(str(at), one, host, true)
