"""Features that a script writes to between forward and backward, where DGL does not need them any
more."""
from __future__ import annotations

import dgl
import dgl.function as fn
import pytest
import torch
from dgl import nn as dgl_nn

import gnnaccel
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


#: users' functions, for which DGL gathers the features of nodes: (message, reduce function), or a
#: message alone
FUNCTIONS = {
    "products": (lambda edges: {"m": edges.src["h"] * edges.data["w"]}, fn.sum("m", "y")),
    "both ends": (lambda edges: {"m": edges.src["h"] * edges.dst["h"]}, fn.sum("m", "y")),
    "a function": (lambda edges: {"m": torch.tanh(edges.src["h"]) * edges.data["w"]},
                   fn.mean("m", "y")),
    "a maximum": (lambda edges: {"m": edges.src["h"] * edges.data["w"]}, fn.max("m", "y")),
    "a mailbox": (lambda edges: {"m": edges.src["h"] * edges.data["w"]},
                  lambda nodes: {"y": nodes.mailbox["m"].sum(1)}),
    "a softmax": (lambda edges: {"m": edges.src["h"], "s": edges.src["h"] * edges.dst["h"]},
                  lambda nodes: {"y": (torch.softmax(nodes.mailbox["s"], 1)
                                       * nodes.mailbox["m"]).sum(1)}),
    "nodes' own": (lambda edges: {"m": edges.src["h"] * edges.data["w"]},
                   lambda nodes: {"y": nodes.mailbox["m"].sum(1) * nodes.data["h"]}),
    "edges": (lambda edges: {"y": edges.src["h"] * edges.dst["h"]}, None),
    "dots": (lambda edges: {"y": (edges.src["h"] * edges.dst["h"]).sum(-1)}, None),
    "a map": (lambda edges: {"m": edges.src["h"] @ WEIGHT + edges.dst["h"]}, fn.sum("m", "y")),
}
WEIGHT = torch.linspace(-1, 1, 64).view(8, 8)


@pytest.mark.parametrize("where", ["emulated", "torch"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_features_that_users_functions_read(name, where):
    from tests.routes import opened

    torch.manual_seed(0)
    message, reduce = FUNCTIONS[name]
    graph = dgl.add_self_loop(dgl.graph((torch.randint(0, 40, (200,)),
                                         torch.randint(0, 40, (200,)))))
    x, w = torch.randn(40, 8), torch.rand(graph.num_edges(), 1)

    def gradients():
        leaf = x.clone().requires_grad_()
        with graph.local_scope():
            graph.ndata["h"] = h = leaf * 1.0
            graph.edata["w"] = w
            if reduce is None:
                graph.apply_edges(message)
                out = graph.edata["y"]
            else:
                graph.update_all(message, reduce)
                out = graph.ndata["y"]
            h += 1.0
            return torch.autograd.grad(out.square().sum(), leaf)[0]

    expected = gradients()
    gnnaccel.reset_stats()
    with opened(where) as route, gnnaccel.enabled(backend=route.backend, when="supported"):
        for _ in range(7):
            assert close(gradients(), expected, 1e-5)
    assert any("native" != way for one in gnnaccel.stats().values() for way in one["routes"])
