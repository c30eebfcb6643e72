"""Layers whose forward runs once, over all rows, with their `propagate` in bands."""
from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from gnnaccel import offload
from gnnaccel.dispatch.offload import rowwise
from gnnaccel.errors import OffloadError, PartitionError
from tests.distributed import graphs, layer_cases

torch_geometric = pytest.importorskip("torch_geometric")
from torch_geometric.nn import MessagePassing  # noqa: E402 - it has to be there

NODES, WIDTH, EDGES = 60, 6, 400
BANDS = 6000
#: layers with messages that look at numbers of nodes, and with nodes in another dimension
REFUSED = {"FastRGCNConv": "asks for edge_index_j", "ARMAConv": "not the first dimension"}


def graph():
    g = graphs.generator(0)
    return (torch.randn(NODES, WIDTH, generator=g),
            torch.randint(0, NODES, (2, EDGES), generator=g))


def outputs(out):
    """The tensors with gradients in what a layer gives."""
    return [t for t in (out if isinstance(out, tuple) else (out,))
            if isinstance(t, torch.Tensor) and t.is_floating_point()]


def judged(make, *inputs, limit=BANDS, steps=("propagate",), seed=0, **kwargs):
    """Holds a layer in bands against the whole: results, gradients and buffers."""
    def run():
        torch.manual_seed(seed)
        layer = make()
        given = [t.clone().requires_grad_() if torch.is_floating_point(t) else t for t in inputs]
        found = outputs(layer(*given, **kwargs))
        flat = [t for one in found for t in outputs(one)]
        sum((t * torch.linspace(-1, 1, t.numel()).view_as(t)).sum() for t in flat).backward()
        return [*(t.detach() for t in flat), *(t.grad for t in given if t.requires_grad),
                *(p.grad for p in layer.parameters()), *layer.buffers()]

    right = run()
    with offload(limit, device="cpu") as ran:
        found = run()
    for got, truth in zip(found, right, strict=True):
        assert (got is None) == (truth is None)
        if truth is not None and truth.numel():
            scale = max(1.0, truth.abs().max().item())
            torch.testing.assert_close(got, truth, rtol=0, atol=1e-5 * scale)
    assert {name.partition(".")[2] for name, _ in ran.ran} == set(steps)
    assert min(bands for _, bands in ran.ran) > 1
    return ran


@pytest.mark.parametrize("name", sorted(layer_cases.CASES))
def test_every_layer_with_a_hook(name, monkeypatch):
    warnings.simplefilter("ignore")
    make, given = layer_cases.CASES[name]
    out, gradients = layer_cases.run(name, layer_cases.data())

    def hooked(pyg):
        layer = make(pyg)
        for module in layer.modules():
            if isinstance(module, MessagePassing):
                module.register_forward_hook(lambda *given: None)
        return layer

    monkeypatch.setitem(layer_cases.CASES, name, (hooked, given))
    with offload(4000, device="cpu") as ran:
        if name in REFUSED:
            with pytest.raises(OffloadError, match=REFUSED[name]):
                layer_cases.run(name, layer_cases.data())
            return
        found, shares = layer_cases.run(name, layer_cases.data())
    assert all("." in step for step, _ in ran.ran)
    torch.testing.assert_close(found, out, rtol=0, atol=1e-6 * max(1.0, out.abs().max().item()))
    assert shares.keys() == gradients.keys()
    for key, truth in gradients.items():
        scale = max(1.0, truth.abs().max().item())
        torch.testing.assert_close(shares[key], truth, rtol=0, atol=1e-5 * scale, msg=key)


class OfAllNodes(MessagePassing):
    """Looks at all nodes before, and at edges and destinations in messages."""

    def __init__(self, flow="source_to_target", aggr="mean"):
        super().__init__(aggr=aggr, flow=flow)
        self.lin, self.edge_lin = nn.Linear(WIDTH, 8), nn.Linear(2, 8)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x, edge_index, edge_attr):
        x = self.lin(x - x.mean(0)).tanh()
        out = self.propagate(edge_index, x=x, attr=edge_attr, factor=self.scale, power=2)
        return out + x / x.norm()

    def message(self, x_i, x_j, attr, factor, power):
        return factor * (x_j - x_i) ** power * self.edge_lin(attr).sigmoid()

    def update(self, out, factor):
        return out * factor


@pytest.mark.long
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("aggr", ["mean", "max", "std"])
def test_classes_that_users_write(flow, aggr, monkeypatch):
    monkeypatch.setattr(rowwise, "_SMALL", 0)
    judged(lambda: OfAllNodes(flow, aggr), *graph(), torch.randn(EDGES, 2))


def test_sources_and_destinations():
    class Between(MessagePassing):
        def __init__(self):
            super().__init__(aggr="add")
            self.lin = nn.Linear(WIDTH + 5, 4)

        def forward(self, x, y, edge_index):
            return self.propagate(edge_index, x=(x, y), size=(NODES, 20))

        def message(self, x_i, x_j):
            return self.lin(torch.cat([x_i, x_j], -1)).relu()

    edges = torch.stack([graph()[1][0], graph()[1][1] % 20])
    judged(Between, graph()[0], torch.randn(20, 5), edges)


@pytest.mark.long
def test_layers_of_pyg_that_need_all_nodes():
    from torch_geometric.nn import ChebConv, DirGNNConv, GATConv, GINConv, HypergraphConv, SAGEConv

    x, edges = graph()

    def gin():
        return GINConv(nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(),
                                     nn.Linear(8, 8)), train_eps=True)

    judged(gin, x, edges)
    judged(lambda: ChebConv(WIDTH, 8, 3), x, edges)
    judged(lambda: HypergraphConv(WIDTH, 8), x, edges % 40)
    judged(lambda: DirGNNConv(SAGEConv(WIDTH, 8)), x, edges, steps=("",))
    judged(lambda: GATConv(WIDTH, 4, 2), x, edges, steps=("edge_updater", "propagate"),
           return_attention_weights=True)


def test_dropout_in_messages_repeats():
    class Dropped(MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_j):
            return nn.functional.dropout(x_j, 0.5, self.training)

    x, edges = graph()
    x.requires_grad_()
    with offload(BANDS, device="cpu"):
        out = Dropped()(x, edges)
    out.sum().backward()
    # linear in x, so that the gradient gives the result again
    assert (x * x.grad).sum().item() == pytest.approx(out.sum().item(), rel=1e-4)


class Told(MessagePassing):
    """Calls propagate with what it is told."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x, edge_index):
        return self.told(x, edge_index)


def refused(words, message, told, error=OffloadError, backward=False):
    message.__name__ = "message"
    made = type("Mine", (Told,), {"message": message, "told": told})
    x, edges = graph()
    with offload(BANDS, device="cpu"), pytest.raises(error, match=words):
        out = made()(x.requires_grad_(), edges)
        assert backward
        out.sum().backward()


def plainly(self, x, edge_index):
    return self.propagate(edge_index, x=x)


def test_what_bands_would_get_wrong_is_refused():
    refused("asks for edge_index, and", lambda self, x_j, edge_index: x_j, plainly)
    refused("asks for x both", lambda self, x, x_j: x_j, plainly)
    refused("no plain tensor", lambda self, x_j: x_j,
            lambda self, x, edge_index: self.propagate(edge_index.int(), x=x))
    refused("no argument with a row a node", lambda self, w: w,
            lambda self, x, edge_index: self.propagate(edge_index, w=x[edge_index[0]]))
    refused("two holds several tensors", lambda self, x_j, two: x_j,
            lambda self, x, edge_index: self.propagate(edge_index, x=x, two=(x, x)))
    refused("statistics of all edges", lambda self, x_j: self.norm(x_j), plainly)
    refused("with a gradient that is none of its arguments",
            lambda self, x_j: x_j * self.told_besides,
            lambda self, x, edge_index: (setattr(self, "told_besides", x.mean()),
                                         plainly(self, x, edge_index))[1], backward=True)
    from torch_geometric.nn import GraphNorm

    refused("GraphNorm", lambda self, x_j: self.graph_norm(x_j),
            lambda self, x, edge_index: (setattr(self, "graph_norm", GraphNorm(WIDTH)),
                                         plainly(self, x, edge_index))[1], error=PartitionError)


def test_a_size_alone_says_how_many_nodes_there_are():
    class OfEdges(MessagePassing):
        def forward(self, edge_attr, edge_index):
            return self.propagate(edge_index, attr=edge_attr, size=(NODES, NODES))

        def message(self, attr):
            return attr * 2

    judged(lambda: OfEdges(aggr="add"), torch.randn(EDGES, 3), graph()[1], limit=3000)
