"""Compiled autograd: a compiler gets the backward of a step, whose forward ran as any other."""
from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch_geometric import nn
from torch_geometric.nn import MessagePassing

import gnnaccel
from tests.pyg import graphs
from tests.pyg.graphs import F


class Gated(MessagePassing):
    """A message that a kernel is written for."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return torch.sigmoid(x_i) * x_j


#: label -> layer; TransformerConv has x as sources and as destinations, with one gradient for both
LAYERS = {
    "GATConv": lambda: nn.GATConv(F, 8, 2),
    "TransformerConv": lambda: nn.TransformerConv(F, 8, 2),
    "GCNConv": lambda: nn.GCNConv(F, 8),
    "a message": Gated,
}


def steps(layer, x, edges, compiled):
    """Results and gradients of steps over edges that change in between, as fp32."""
    found = []
    for k in range(3):
        own = x.detach().clone().requires_grad_()
        out = layer(own, edges.roll(k, 1) if k < 2 else edges.flip(0))
        loss = out.tanh().sum()
        if compiled:
            with compiled_autograd._enable(torch.compile(backend="eager")):
                loss.backward()
        else:
            loss.backward()
        found += [out.detach(), own.grad, *(p.grad for p in layer.parameters())]
        layer.zero_grad()
    return [t.float() for t in found]


@pytest.mark.long
@pytest.mark.parametrize("label", LAYERS)
def test_a_compiled_backward_has_the_same_gradients(route, label):
    torch._dynamo.reset()
    layer = LAYERS[label]().to(route.device)
    x, edges = graphs.features().to(route.device), graphs.square().to(route.device)
    with gnnaccel.disabled():
        expected = steps(copy.deepcopy(layer).double(), x.double(), edges, False)
    with route.on(on_fallback="native"):
        found = steps(layer, x, edges, True)
    for a, b in zip(found, expected, strict=True):  # the key's bias has a gradient of zeros
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
