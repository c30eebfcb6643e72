"""RGATConv: what is left to the host, and for which reason."""
from __future__ import annotations

import copy

import pytest
import torch
from torch_geometric.nn import Linear, RGATConv

import gnnaccel
from tests.pyg import graphs
from tests.routes import Route
from tests.pyg.graphs import EDGE, E, F, N
from tests.pyg.judge import native_again, native_because, runs_natively
from tests.pyg.rgat import R, build, inputs, types

TORCH = Route("torch", "torch", torch.device("cpu"))  # where a test needs no other


@pytest.mark.parametrize("weights", [True, False])
def test_attention_weights(route, weights):
    layer, args = build().to(route.device), inputs(route)
    native = layer(*args, return_attention_weights=weights)
    with route.on(on_fallback="native"):
        got = layer(*args, return_attention_weights=weights)
    assert gnnaccel.stats()["RGATConv"]["reasons"] == {"GA208": 1}
    assert native_again(got[0], native[0]) and torch.equal(got[1][0],
                                                           native[1][0]) and native_again(got[1][1],
                                                                                          native[1][
                                                                                              1])


CALLS = {
    "ids": ("GA206", lambda x, ei, et: (torch.arange(N, device=x.device), ei, et)),
    "width": ("GA206", lambda x, ei, et: (x[:, 1:], ei, et)),
    "three dimensions": ("GA206", lambda x, ei, et: (x.unsqueeze(1), ei, et)),
    "pair without destinations": ("GA206", lambda x, ei, et: ((x, None), ei, et)),
    "triple": ("GA206", lambda x, ei, et: ((x, x, x), ei, et)),
    "edge features": ("GA206", lambda x, ei,
                      et: (x, ei, et, torch.randn(E, EDGE, device=x.device))),
    "size": ("GA206", lambda x, ei, et: (x, ei, et, None, (N, N + 1))),
    "half features": ("GA203", lambda x, ei, et: (x.half(), ei, et)),
    "double features": ("GA203", lambda x, ei, et: (x.double(), ei, et)),
    "no types": ("GA204", lambda x, ei, et: (x, ei)),
    "short types": ("GA204", lambda x, ei, et: (x, ei, et.short())),
    "types of other edges": ("GA206", lambda x, ei, et: (x, ei, et[1:])),
    "no edges": ("GA303", lambda x, ei, et: (x, ei[:, :0], et[:0])),
    "too many arguments": ("GA206", lambda x, ei, et: (x, ei, et, None, None, None, None)),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_that_stay_native(case):
    code, make = CALLS[case]
    runs_natively(TORCH, code, build(), *make(graphs.features(), graphs.square(), types()))


EDGES = {"one for all": ("GA206", torch.randn(1, EDGE)),
         "half": ("GA203", torch.randn(E, EDGE).half()),
         "ids": ("GA203", torch.randint(0, 3, (E, EDGE)))}


@pytest.mark.parametrize("case", EDGES)
def test_edge_features_that_stay_native(case):
    code, attr = EDGES[case]
    runs_natively(TORCH, code, build(edge_dim=EDGE), graphs.features(), graphs.square(), types(), attr)


def _activated(layer):
    layer.activation = torch.nn.GELU()
    return layer


def _lazy(layer):
    layer.lin_edge = Linear(-1, 16, bias=False)
    return layer


def _hooked(layer):
    layer.register_message_forward_hook(lambda module, args, out: out)
    return layer


class Doubled(RGATConv):
    def message(self, x_i, x_j, edge_type, edge_attr, index, ptr, size_i):
        return 2 * super().message(x_i, x_j, edge_type, edge_attr, index, ptr, size_i)


@pytest.mark.parametrize("code, make", [
    ("GA205", lambda: _activated(build(mod="scaled"))), ("GA501", lambda: _hooked(build())),
    ("GA201", lambda: build(aggr="mean")), ("GA202", lambda: build(flow="target_to_source")),
    ("GA209", lambda: _lazy(build(edge_dim=EDGE))),
], ids=["activation", "hook", "mean", "flow", "lazy"])
def test_layers_that_stay_native(code, make):
    layer = make()
    edge_attr = None if layer.lin_edge is None else graphs.edge_features()
    args = graphs.features(), graphs.square(), types(), edge_attr
    # a lazy layer is none the second time
    native_because(TORCH, code, lambda: copy.deepcopy(layer)(*args), layer)


def test_a_subclass_that_computes():
    """By the host's forward, within which nothing is read: what super() gives runs natively."""
    layer, args = Doubled(F, 8, R), (graphs.features(), graphs.square(), types())
    expected = layer(*args)
    gnnaccel.reset_stats()
    with gnnaccel.enabled(when="supported", backend="torch"):
        got = layer(*args)
    found = gnnaccel.stats()["Doubled"]
    assert set(found["routes"]) == {"native"} and found["reasons"]["GA205"] == 1
    assert torch.allclose(got, expected, 1e-5, 1e-5)


def test_float64_on_the_kernels(emulated):
    args = graphs.features().double(), graphs.square(), types()
    runs_natively(emulated, "GA203", build().double(), *args)


def test_a_negative_slope_on_the_kernels(emulated):
    runs_natively(emulated, "GA208", build(negative_slope=-0.5), graphs.features(), graphs.square(),
                  types())


@pytest.mark.parametrize("attribute, value", [("num_relations", R + 2), ("heads", 1), ("heads", 4),
                                              ("out_channels", 2)])
def test_an_attribute_that_is_no_longer_that_of_the_weights(route, attribute, value):
    """Of more relations than there are weights the host knows nothing, as it picks the weights by
    edge; for other heads it raises, and kernels would read beyond the weights."""
    layer, args = build().to(route.device), inputs(route)
    setattr(layer, attribute, value)
    runs_natively(route, "GA206", layer, *args)
