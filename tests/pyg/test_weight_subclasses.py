"""Weights with functions of their own in layers that take their maps apart elsewhere: what the
host's map makes of them is what counts, from the first call with them on."""
from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch_geometric.nn import (CGConv, EdgeConv, FiLMConv, GATConv, GATv2Conv, HANConv, HEATConv,
                                HeteroConv, HGTConv, MessagePassing, NNConv, PNAConv, ResGatedGraphConv,
                                RGCNConv)

import gnnaccel
from tests.judge import spread
from tests.pyg import graphs
from tests.pyg.graphs import EDGE, F
from tests.rounded import put, put_as_attribute

KINDS = {"a": F, "b": F}
RELATIONS = [("a", "to", "b"), ("b", "of", "a"), ("b", "in", "b")]


class Mapping(MessagePassing):
    """A user's layer, which maps both ends of an edge."""

    def __init__(self):
        super().__init__(aggr="add")
        self.lin, self.act = nn.Linear(2 * F, 4), nn.PReLU(4)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return self.act(self.lin(torch.cat([x_i, x_j], -1)))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "PNAConv": lambda: PNAConv(F, 6, ["mean", "max"], ["identity", "amplification"],
                               torch.arange(40), edge_dim=EDGE, divide_input=False),
    "FiLMConv": lambda: FiLMConv(F, 6, num_relations=3), "CGConv": lambda: CGConv(F, EDGE),
    "HEATConv": lambda: HEATConv(F, 4, 2, 3, 4, EDGE, 4, heads=2),
    "EdgeConv": lambda: EdgeConv(nn.Sequential(nn.Linear(2 * F, 6), nn.ReLU(), nn.Linear(6, 4))),
    "ResGatedGraphConv": lambda: ResGatedGraphConv(F, 6, edge_dim=EDGE),
    "HGTConv": lambda: HGTConv(F, 8, (list(KINDS), RELATIONS), heads=2), "Mapping": Mapping,
    "GATConv": lambda: GATConv(F, 4, heads=2), "GATv2Conv": lambda: GATv2Conv(F, 4, heads=2),
    "RGCNConv": lambda: RGCNConv(F, 6, 3),
    "NNConv": lambda: NNConv(F, 3, nn.Sequential(nn.Linear(EDGE, 5), nn.ReLU(),
                                                 nn.Linear(5, F * 3))),
    "HANConv": lambda: HANConv(F, 8, (list(KINDS), RELATIONS), heads=2),
    "HeteroConv": lambda: HeteroConv({one: GATConv((F, F), 4, add_self_loops=False)
                                      for one in RELATIONS})}
#: called with dictionaries
OF_TYPES = ("HGTConv", "HANConv", "HeteroConv")
WITH_EDGES = ("PNAConv", "CGConv", "HEATConv", "ResGatedGraphConv", "NNConv")
PARTS = [("PNAConv", "pre_nns.0.0", "weight"), ("PNAConv", "edge_encoder", "weight"),
         ("FiLMConv", "lins.0", "weight"), ("FiLMConv", "films.0", "weight"),
         ("CGConv", "lin_f", "weight"), ("HEATConv", "lin", "weight"),
         ("HEATConv", "att", "weight"), ("EdgeConv", "nn.0", "weight"), ("EdgeConv", "nn.0", "bias"),
         ("ResGatedGraphConv", "lin_key", "weight"), ("ResGatedGraphConv", "lin_value", "weight"),
         ("HGTConv", "kqv_lin.lins.a", "weight"), ("HGTConv", "k_rel", "weight"),
         ("Mapping", "lin", "weight"), ("Mapping", "lin", "bias"),
         ("GATConv", "", "att_src"), ("GATv2Conv", "", "att"), ("RGCNConv", "", "weight"),
         ("NNConv", "nn.0", "weight"), ("NNConv", "nn.2", "weight"), ("NNConv", "nn.2", "bias"),
         ("NNConv", "", "bias"), ("HANConv", "lin_src", "b__in__b"), ("HeteroConv", "convs.<b___in___b>", "att_src")]
CASES = pytest.mark.parametrize("name,part,parameter", PARTS)


def arguments(name: str, device: torch.device) -> list:
    """Of a call over a graph of its own."""
    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).requires_grad_()

    if name in OF_TYPES:
        return [{kind: made(20, F) for kind in KINDS},
                {one: torch.randint(0, 20, (2, 40), device=device) for one in RELATIONS}]
    edges = graphs.square().to(device)
    of_nodes, of_edges = (torch.arange(n, device=device) % 2 for n in (graphs.N, graphs.E))
    types = {"HEATConv": [of_nodes, of_edges], "FiLMConv": [of_edges], "RGCNConv": [of_edges]}.get(name, [])
    return [made(graphs.N, F), edges, *types,
            *([made(graphs.E, EDGE)] if name in WITH_EDGES else [])]


def results(layer: nn.Module, args: list) -> list:
    """Outputs, and gradients of features and parameters."""
    out = layer(*args)
    outs = list(out.values()) if isinstance(out, dict) else [out]
    found = [*(args[0].values() if isinstance(args[0], dict) else args[:1]), *args[2:]]
    leaves = [t for t in (*found, *layer.parameters()) if t.requires_grad]
    loss = sum((one * torch.arange(one.numel(), device=one.device).view_as(one).sin()).sum()
               for one in outs)
    return [*outs, *torch.autograd.grad(loss, leaves, allow_unused=True)]


def alike(got: list, expected: list) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)


def layer_of(name: str, device: torch.device) -> nn.Module:
    torch.manual_seed(1)
    return spread(LAYERS[name]()).to(device)


def twice_alike(layer: nn.Module, args) -> None:
    """Two calls give what the host gives."""
    got = [results(layer, args) for _ in range(2)]
    with gnnaccel.disabled():
        expected = results(layer, args)
    for one in got:
        alike(one, expected)


@CASES
def test_from_the_first_call_on(route, name, part, parameter):
    layer = layer_of(name, route.device)
    put(layer, part, parameter)
    args = arguments(name, route.device)
    expected = results(copy.deepcopy(layer), args)
    with route.on(on_fallback="native"):
        for _ in range(3):
            alike(results(layer, args), expected)


@CASES
@pytest.mark.parametrize("swapped", [False, True], ids=["set", "swapped"])
@pytest.mark.parametrize("again", [True, False], ids=["known graph", "new graphs"])
def test_after_calls_that_are_remembered(route, name, part, parameter, swapped, again):
    layer = layer_of(name, route.device)
    args = arguments(name, route.device)
    with route.on(on_fallback="native"):
        for _ in range(4):
            results(layer, args)
            args = args if again else arguments(name, route.device)
        put(layer, part, parameter, swapped)
        twice_alike(layer, args)


@CASES
@pytest.mark.parametrize("known", [False, True], ids=["first", "remembered"])
def test_a_plain_attribute_in_the_place_of_a_parameter(route, name, part, parameter, known):
    layer = layer_of(name, route.device)
    args = arguments(name, route.device)
    with route.on(on_fallback="native"):
        for _ in range(4 * known):
            results(layer, args)
        put_as_attribute(layer, part, parameter)
        twice_alike(layer, args)


@CASES
def test_a_plain_attribute_after_an_ordinary_one(route, name, part, parameter):
    layer = layer_of(name, route.device)
    args = arguments(name, route.device)
    put_as_attribute(layer, part, parameter, torch.Tensor)
    with route.on(on_fallback="native"):
        for _ in range(4):
            results(layer, args)
        put_as_attribute(layer, part, parameter)
        twice_alike(layer, args)
