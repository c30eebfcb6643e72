"""Maps in the place of a layer's own, for which it matters which rows they are given, and how
often: with a batch norm, with dropout."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch_geometric.nn import (
    AGNNConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    HEATConv,
    RGCNConv,
    SuperGATConv,
    TransformerConv,
)

import gnnaccel
from tests.pyg import graphs
from tests.pyg.graphs import EDGE, F
from tests.pyg.judge import took

BOTH = pytest.mark.parametrize("cls", [GATConv, GATv2Conv])


class Normed(nn.Module):
    """A map with a batch norm after it and dropout before."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.drop = inner, nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(inner.weight.shape[0])

    def forward(self, x):
        return self.norm(self.inner(self.drop(x)))


def results(layer, args: list) -> dict[str, torch.Tensor]:
    """Of two steps in training: outputs, gradients, buffers."""
    torch.manual_seed(3)
    args = [t.clone().requires_grad_() if t.is_floating_point() else t for t in args]
    x, *rest = args
    for _ in range(2):
        out = layer.call(layer, x, *rest)
        out.square().sum().backward()
    return {"out": out, **{str(i): t.grad for i, t in enumerate(args)},
            **{n: p.grad for n, p in layer.named_parameters()}, **dict(layer.named_buffers())}


def compare(route, layer, *args, call=lambda layer, *args: layer(*args), calls: int = 2) -> None:
    """By the host and by the route, over a graph with self loops. Off a CPU, dropout draws
    others."""
    if route.device.type != "cpu":
        layer.apply(lambda m: setattr(m, "p", 0.0) if type(m) is nn.Dropout else None)
    layer, args = layer.to(route.device).train(), [t.to(route.device) for t in args]
    layer.call = call
    expected = results(copy.deepcopy(layer), args)
    with route.on():
        got = results(layer, args)
    took(route, calls)
    for name, one in expected.items():
        torch.testing.assert_close(got[name], one, rtol=1e-3, atol=1e-3, msg=name)


@BOTH
@pytest.mark.parametrize("fill", ["mean", 2.0])
def test_features_of_edges_without_the_dropped_loops(route, cls, fill):
    """Of a batch norm's mean, and of what dropout draws, the rows of self loops are no part."""
    torch.manual_seed(1)
    layer = cls(F, 4, heads=2, edge_dim=EDGE, fill_value=fill)
    layer.lin_edge = Normed(layer.lin_edge)
    edges = graphs.square()
    edges[1, ::5] = edges[0, ::5]
    compare(route, layer, graphs.features(), edges, graphs.edge_features())


FUNCTIONS = [(GATConv, "lin"), (GATConv, "lin_edge"), (GATConv, "aggr_module"),
             (GATv2Conv, "lin_l"), (GATv2Conv, "lin_edge"), (TransformerConv, "lin_key"),
             (TransformerConv, "lin_edge"), (TransformerConv, "lin_skip")]


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("cls,part", FUNCTIONS)
def test_a_function_in_the_place_of_a_module(cls, part, before):
    """``before``: so many calls with the module are remembered."""
    torch.manual_seed(1)
    layer = cls(F, 4, heads=2, edge_dim=EDGE if part == "lin_edge" else None)
    args = [graphs.features(), graphs.square()]
    args += [graphs.edge_features()] if part == "lin_edge" else []
    with gnnaccel.enabled(when="supported", backend="torch"):
        for _ in range(before):
            layer(*args)
        module = getattr(layer, part)
        delattr(layer, part)  # torch refuses to assign it as it is
        setattr(layer, part, lambda *given, **named: module(*given, **named))
        gnnaccel.reset_stats()
        got = [layer(*args) for _ in range(2)]
    code = "GA201" if part == "aggr_module" else "GA205"
    assert gnnaccel.stats()[cls.__name__]["reasons"] == {code: 2}
    with gnnaccel.disabled():
        expected = layer(*args)
    for one in got:
        torch.testing.assert_close(one, expected, rtol=0, atol=0)


NUMBERS = {
    "GAT": (lambda: GATConv(F, 4, heads=2), "att_src"),
    "GAT edges": (lambda: GATConv(F, 4, heads=2, edge_dim=EDGE), "att_edge"),
    "GAT bias": (lambda: GATConv(F, 4, heads=2), "bias"),
    "GATv2": (lambda: GATv2Conv(F, 4, heads=2), "att"),
    "SuperGAT": (lambda: SuperGATConv(F, 4, heads=2), "att_l"),
    "AGNN": (AGNNConv, "beta"),
    "RGCN bias": (lambda: RGCNConv(F, 4, 3), "bias"),
    "GCN": (lambda: GCNConv(F, 4), "bias"),
    "GIN": (lambda: GINConv(nn.Linear(F, 4), train_eps=True), "eps"),
}


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("case", NUMBERS)
def test_a_number_in_the_place_of_a_parameter(case, before):
    """``before``: so many calls with the parameter are remembered."""
    torch.manual_seed(1)
    make, name = NUMBERS[case]
    layer, args = make().eval(), [graphs.features(), graphs.square()]
    args += [graphs.edge_features()] if name == "att_edge" else []
    args += [torch.arange(args[1].shape[1]) % 3] if type(layer) is RGCNConv else []
    with gnnaccel.enabled(when="supported", backend="torch"):
        for _ in range(before):
            layer(*args)
        delattr(layer, name)
        setattr(layer, name, 0.5)
        got = [layer(*args) for _ in range(2)]
    with gnnaccel.disabled():
        expected = layer(*args)
    for one in got:
        torch.testing.assert_close(one, expected)


@BOTH
def test_both_of_a_pair_are_mapped(route, cls):
    """The host maps sources and destinations one after the other, be they one tensor."""
    torch.manual_seed(1)
    layer = cls(F, 4, heads=2, **(dict(share_weights=True) if cls is GATv2Conv else {}))
    if cls is GATv2Conv:
        layer.lin_l = layer.lin_r = Normed(layer.lin_l)
    else:
        layer.lin = Normed(layer.lin)
    compare(route, layer, graphs.features(), graphs.square(),
            call=lambda layer, x, edges: layer((x, x), edges))


def test_shared_weights_are_those_of_the_sources(route):
    """``lin_r`` was the same map; now it is nobody's."""
    torch.manual_seed(1)
    layer = GATv2Conv(F, 4, heads=2, share_weights=True)
    layer.lin_l = Normed(layer.lin_l)
    layer.lin_r.requires_grad_(False)
    compare(route, layer, graphs.features(), graphs.square())


def test_a_map_that_does_not_say_its_width():
    torch.manual_seed(1)
    layer = HEATConv(F, 4, 2, 3, 4, EDGE, 4, heads=2)
    layer.edge_attr_emb = Normed(layer.edge_attr_emb)
    x, edges = graphs.features(), graphs.square()
    types = torch.arange(x.shape[0]) % 2, torch.arange(edges.shape[1]) % 3
    args = x, edges, *types, graphs.edge_features()
    with torch.no_grad():
        expected = layer.eval()(*args)
        with gnnaccel.enabled(when="supported", backend="torch"):
            for _ in range(2):
                torch.testing.assert_close(layer(*args), expected)
    assert gnnaccel.stats()["HEATConv"]["reasons"] == {"GA208": 2}
