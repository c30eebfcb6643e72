"""Features that a script writes to between forward and backward, where DGL does not need them any
more."""
from __future__ import annotations

import dgl
import pytest
import torch
from dgl import nn as dgl_nn

from tests.pyg.judge import close

LAYERS = {
    "GINEConv": (lambda: dgl_nn.GINEConv(torch.nn.Linear(8, 8)), lambda e: (torch.rand(e, 8),)),
    "PNAConv": (lambda: dgl_nn.PNAConv(8, 8, ["mean", "max"], ["identity"], 1.0), lambda e: ()),
    "RelGraphConv": (lambda: dgl_nn.RelGraphConv(8, 8, 3, self_loop=False),
                     lambda e: (torch.arange(e) % 3,)),
    "GINConv": (lambda: dgl_nn.GINConv(None, "max"), lambda e: ()),
}


@pytest.mark.parametrize("name", LAYERS)
def test_features_are_written_to(emulated, name):
    torch.manual_seed(0)
    make, more = LAYERS[name]
    graph = dgl.add_self_loop(dgl.graph((torch.randint(0, 40, (200,)),
                                         torch.randint(0, 40, (200,)))))
    layer, x, extra = make().eval(), torch.randn(40, 8), more(graph.num_edges())

    def gradients():
        leaf = x.clone().requires_grad_()
        h = leaf * 1.0
        out = layer(graph, h, *extra)
        h += 1.0
        return torch.autograd.grad(out.square().sum(), [leaf, *layer.parameters()],
                                   allow_unused=True)

    expected = gradients()
    with emulated.on():
        for _ in range(7):
            for found, right in zip(gradients(), expected):
                assert (found is None) == (right is None)
                assert found is None or close(found, right, 1e-5)
