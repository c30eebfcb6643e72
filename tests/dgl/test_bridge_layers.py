"""DGL's layers on a device, simulated or real, over graphs of a DGL without CUDA: outputs and
gradients as on the host."""
from __future__ import annotations

import copy

import dgl
import dgl.nn as dnn
import pytest
import torch
from torch import nn

import gnnaccel
from tests.dgl import bridged
from tests.dgl.bridged import place, same  # noqa: F401  (a fixture)
from tests.dgl.graphs import E, F, N

#: layer and its arguments behind the graph and the features
LAYERS = {
    "GraphConv": lambda: (dnn.GraphConv(F, 4), ()),
    "GraphConv right": lambda: (dnn.GraphConv(F, 4, norm="right"), ()),
    "GraphConv weighted": lambda: (_Weighted(dnn.GraphConv(F, 4)), ()),
    "GATConv": lambda: (dnn.GATConv(F, 4, 2), ()),
    "GATv2Conv": lambda: (dnn.GATv2Conv(F, 4, 2), ()),
    "DotGatConv": lambda: (dnn.DotGatConv(F, 4, 2), ()),
    "AGNNConv": lambda: (dnn.AGNNConv(), ()),
    "SAGEConv mean": lambda: (dnn.SAGEConv(F, 4, "mean"), ()),
    "SAGEConv gcn": lambda: (dnn.SAGEConv(F, 4, "gcn"), ()),
    "SAGEConv pool": lambda: (dnn.SAGEConv(F, 4, "pool"), ()),
    "SAGEConv lstm": lambda: (dnn.SAGEConv(F, 4, "lstm"), ()),
    "GINConv": lambda: (dnn.GINConv(nn.Linear(F, 4), "max"), ()),
    "SGConv": lambda: (dnn.SGConv(F, 4, k=2), ()),
    "TAGConv": lambda: (dnn.TAGConv(F, 4), ()),
    "APPNPConv": lambda: (dnn.APPNPConv(3, 0.2), ()),
    "GCN2Conv": lambda: (_Twice(dnn.GCN2Conv(F, 1)), ()),
    "ChebConv": lambda: (dnn.ChebConv(F, 4, 2), ()),
    "GatedGraphConv": lambda: (dnn.GatedGraphConv(F, 16, 2, 3), (("edge types", 3),)),
    "RelGraphConv": lambda: (dnn.RelGraphConv(F, 4, 3, "basis", 2), (("edge types", 3),)),
    "RelGraphConv bdd": lambda: (dnn.RelGraphConv(F, 4, 3, "bdd", 2), (("edge types", 3),)),
    "HGTConv": lambda: (dnn.HGTConv(F, 4, 2, 2, 3, dropout=0.0),
                        (("node types", 2), ("edge types", 3))),
    "EdgeGATConv": lambda: (dnn.EdgeGATConv(F, 3, 4, 2), (("edge features", 3),)),
    "EGATConv": lambda: (dnn.EGATConv(F, 3, 4, 3, 2), (("edge features", 3),)),
    "GatedGCNConv": lambda: (dnn.GatedGCNConv(F, 3, F), (("edge features", 3),)),
    "CFConv": lambda: (dnn.CFConv(F, 3, 8, 4), (("edge features", 3),)),
    "NNConv": lambda: (dnn.NNConv(F, 4, nn.Linear(3, F * 4), "sum"), (("edge features", 3),)),
    "GMMConv": lambda: (dnn.GMMConv(F, 4, 3, 2, "mean"), (("edge features", 3),)),
    "PNAConv": lambda: (dnn.PNAConv(F, 4, ["mean", "max", "sum", "std"],
                                    ["identity", "amplification"], 2.5), ()),
    "GINEConv": lambda: (dnn.GINEConv(nn.Linear(F, 4)), (("edge features", F),)),
    "TWIRLSConv": lambda: (dnn.TWIRLSConv(F, 4, 8, prop_step=2), ()),
    "EdgeConv": lambda: (dnn.EdgeConv(F, 4), ()),
    "DenseGraphConv": lambda: (_Dense(), ()),
}


class _Weighted(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, g, x):
        return self.layer(g, x, edge_weight=g.edata["w"].flatten())


class _Twice(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, g, x):
        return self.layer(dgl.add_self_loop(g), x, x)


class _Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = dnn.DenseGraphConv(F, 4)

    def forward(self, g, x):
        return self.layer(g.adj_external(ctx=g.device).to_dense(), x)


def argument(kind: str, size: int) -> torch.Tensor:
    return {"edge types": lambda: torch.randint(size, (E,)),
            "node types": lambda: torch.randint(size, (N,)),
            "edge features": lambda: torch.rand(E, size)}[kind]()


def trained(layer, g, x, rest):
    """Outputs, and gradients of the features and of each parameter."""
    x = x.detach().clone().requires_grad_()
    out = layer(g, x, *rest)
    outs = out if isinstance(out, tuple) else (out,)
    sum(o.pow(2).sum() for o in outs).backward()
    return [o.detach() for o in outs], x.grad, {name: p.grad for name, p in layer.named_parameters()
                                                if p.grad is not None}


def held_against_the_host(name, place):
    if not hasattr(dnn, name.partition(" ")[0]):
        pytest.skip(f"this DGL has no {name}")
    layer, kinds = LAYERS[name]()
    rest = [argument(*kind) for kind in kinds]
    g = bridged.homogeneous()
    x = g.ndata["x"]
    with gnnaccel.disabled():
        want = trained(layer, g, x, rest)
    layer.zero_grad()
    there = copy.deepcopy(layer).to(place)
    same(trained(there, g.to(place), x.to(place), [t.to(place) for t in rest]), want, place, name)


@pytest.mark.parametrize("norm", ["sym", "row"])
@pytest.mark.parametrize("several", [False, True], ids=["classes", "labels"])
def test_label_propagation(norm, several, place):
    labels, mask = (torch.rand(N, 4) > 0.7 if several else torch.arange(N) % 4,
                    torch.arange(N) % 3 > 0)
    layer = dnn.LabelPropagation(3, 0.5, norm_type=norm, reset=several)
    bridged.against_host(bridged.homogeneous,
                         lambda g: layer(g, labels.to(g.device), mask.to(g.device)), place)


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, place):
    held_against_the_host(name, place)


def test_heterogeneous_layer(place):
    g = bridged.hetero()
    convs = {e: dnn.GraphConv(5, 4, norm="right", allow_zero_in_degree=True) for e in g.etypes}
    layer = dnn.HeteroGraphConv(convs, aggregate="sum")
    want = layer(g, {k: g.nodes[k].data["x"] for k in g.ntypes})
    there = g.to(place)
    got = copy.deepcopy(layer).to(place)(there, {k: there.nodes[k].data["x"] for k in g.ntypes})
    same({k: v.detach() for k, v in got.items()}, {k: v.detach() for k, v in want.items()}, place)


OVER_BLOCKS = {"GraphConv": lambda: dnn.GraphConv(F, 4, norm="right"),
               "SAGEConv": lambda: dnn.SAGEConv(F, 4, "mean"),
               "GATConv": lambda: dnn.GATConv(F, 4, 2)}


@pytest.mark.parametrize("name", OVER_BLOCKS)
def test_layers_over_blocks(name, place):
    layer, block = OVER_BLOCKS[name](), bridged.block()
    x = torch.randn(block.num_src_nodes(), F)
    want = layer(block, x)
    same(copy.deepcopy(layer).to(place)(block.to(place), x.to(place)).detach(), want.detach(),
         place)


POOLING = {"SumPooling": dnn.SumPooling, "AvgPooling": dnn.AvgPooling, "MaxPooling": dnn.MaxPooling,
           "SortPooling": lambda: dnn.SortPooling(3),
           "GlobalAttentionPooling": lambda: dnn.GlobalAttentionPooling(nn.Linear(F, 1)),
           "Set2Set": lambda: dnn.Set2Set(F, 2, 1)}


@pytest.mark.parametrize("name", POOLING)
def test_pooling(name, place):
    layer, g = POOLING[name](), bridged.batched()
    want = layer(g, g.ndata["x"]).detach()
    there = g.to(place)
    same(copy.deepcopy(layer).to(place)(there, there.ndata["x"]).detach(), want, place)


def test_layers_refuse_nodes_without_edges_as_ever(place):
    g = dgl.graph(([0, 1], [1, 2])).to(place)
    for layer in (dnn.GraphConv(F, 4), dnn.GATConv(F, 4, 2)):
        with pytest.raises(dgl.DGLError, match="0-in-degree"):
            layer.to(place)(g, torch.randn(3, F).to(place))


def test_the_answer_is_the_graphs_own(place):
    """A layer that ran over a graph without bare nodes still refuses one with them; its own
    attribute never changes."""
    layer, x = dnn.GraphConv(F, 4).to(place), torch.randn(3, F).to(place)
    full, bare = dgl.graph(([0, 1, 2], [1, 2, 0])).to(place), dgl.graph(([0, 1], [1, 2])).to(place)
    for _ in range(2):
        layer(full, x)
        assert layer._allow_zero_in_degree is False and layer.__dict__[
            "_allow_zero_in_degree"] is False
        with pytest.raises(dgl.DGLError, match="0-in-degree"):
            layer(bare, x)
    layer.set_allow_zero_in_degree(True)
    assert layer._allow_zero_in_degree is True and layer(bare, x).device == place
    assert copy.deepcopy(layer)._allow_zero_in_degree is True
    gnnaccel.disable()
    assert layer._allow_zero_in_degree is True and "_allow_zero_in_degree" not in vars(
        dnn.GraphConv)
