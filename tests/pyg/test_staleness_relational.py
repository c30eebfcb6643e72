"""A relational call that repeats takes a short way. Whatever changes between two otherwise equal
calls has to be seen."""
from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch_geometric
from torch_geometric import EdgeIndex
from torch_geometric.nn import FastRGCNConv, MaxAggregation, RGATConv, RGCNConv

import gnnaccel
from gnnaccel.dispatch.memory.layer_memory import memories
from tests.pyg import rgat
from tests.pyg.graphs import F, N
from tests.pyg.judge import as_native, close, spread, took

R = rgat.R
LAYERS = {"RGATConv": lambda: rgat.build(), "RGCNConv": lambda: spread(RGCNConv(F, 8, R)),
          "FastRGCNConv": lambda: spread(FastRGCNConv(F, 8, R, num_bases=2))}
each_layer = pytest.mark.parametrize("name", LAYERS)


@pytest.fixture
def inputs(route):
    return rgat.inputs(route)


def warmed(route, name: str, inputs):
    layer = LAYERS[name]().to(route.device).eval()
    for _ in range(3):
        layer(*inputs)
    took(route, 3)
    gnnaccel.reset_stats()
    return layer


@each_layer
def test_a_repeated_call_is_stated_once(route, inputs, name, stated):
    with route.on():
        layer = warmed(route, name, inputs)
        assert len(stated) == 1
        as_native(lambda: layer(*inputs))
        as_native(lambda: layer(inputs[0] * 2, *inputs[1:]))
        out = layer(*inputs)
        out.sum().backward()
        assert len(stated) == 1 and gnnaccel.stats()[name]["routes"] == {"torch"
                                                                         if route.name == "torch"
                                                                         else "cuda": 3}
        with torch.no_grad():
            layer(*inputs)
        assert len(stated) == 2  # whether gradients are wanted is a part of the decision


@each_layer
def test_results_may_be_changed_in_place(route, inputs, name):
    with route.on():
        layer = warmed(route, name, inputs).train()
        layer(*inputs).relu_().pow(2).sum().backward()
        got = layer.bias.grad.clone()
        layer.zero_grad()
    with gnnaccel.disabled():
        layer(*inputs).relu().pow(2).sum().backward()
    assert close(got, layer.bias.grad)


@each_layer
def test_other_inputs(route, inputs, name):
    x, ei, et = inputs
    with route.on():
        layer = warmed(route, name, inputs)
        as_native(lambda: layer(torch.cat([x, x]), ei, et))
        as_native(lambda: layer(x, ei, et.flip(0).contiguous()))
        as_native(lambda: layer(x, ei.flip(1).contiguous(), et))
        as_native(lambda: layer(x, ei, edge_type=et))
        with torch.inference_mode():
            as_native(lambda: layer(x, ei, et))
        et[:9] = (et[:9] + 1) % R
        as_native(lambda: layer(x, ei, et))
        ei[0, :9] = (ei[0, :9] + 1) % N
        as_native(lambda: layer(x, ei, et))
        et.data = rgat.types().to(et.device)
        as_native(lambda: layer(x, ei, et))


@each_layer
def test_an_edge_index_class_changed_in_place(route, inputs, name):
    """The tensor behind it counts no versions."""
    x, ei, et = inputs
    layer, index = LAYERS[name]().to(route.device).eval(), EdgeIndex(ei.clone(), sparse_size=(N, N))
    with route.on():
        layer(x, index, et)
    index.copy_(index.flip(1))
    expected = layer(x, ei.flip(1), et)
    with route.on(on_fallback="native"):
        assert close(layer(x, index, et), expected)
    assert gnnaccel.stats()[name]["reasons"] == {"GA204": 1}


@each_layer
def test_parameters_replaced_and_changed(route, inputs, name):
    with route.on():
        layer = warmed(route, name, inputs)
        spread(layer)
        as_native(lambda: layer(*inputs))
        for key, value in list(layer.named_parameters(recurse=False)):
            setattr(layer, key, torch.nn.Parameter(torch.randn_like(value)))
        as_native(lambda: layer(*inputs))
        layer.bias = None
        as_native(lambda: layer(*inputs))
        twin = spread(copy.deepcopy(layer))
        as_native(lambda: twin(*inputs))


@each_layer
def test_dtypes_that_change(route, inputs, name):
    x, ei, et = inputs
    with route.on():
        layer = warmed(route, name, inputs)
        for dtype in (torch.bfloat16, torch.float32):
            layer.to(dtype)
            as_native(lambda dtype=dtype: layer(x.to(dtype), ei, et), 0.05)
        with torch.autocast(route.device.type, torch.bfloat16):
            as_native(lambda: layer(x, ei, et), 0.05)
            as_native(lambda: layer(x, ei, et), 0.05)
        as_native(lambda: layer(x, ei, et))


SETTINGS = [dict(concat=False, bias=None), dict(negative_slope=0.9), dict(mod="f-scaled"),
            dict(mod="scaled"), dict(attention_mode="multiplicative-self-attention"),
            dict(attention_mechanism="within-relation")]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_settings_of_the_layer(route, inputs, setting):
    with route.on():
        layer = warmed(route, "RGATConv", inputs)
        for key, value in setting.items():
            setattr(layer, key, value)
        for _ in range(2):
            as_native(lambda: layer(*inputs))


class Other(RGATConv):
    def update(self, aggr_out):
        return super().update(aggr_out) * 2


CAUSES = {
    "message hook": ("GA501",
                     lambda layer: layer.register_message_forward_hook(lambda m, i, o: o * 2)),
    "aggregation hook": ("GA501",
                         lambda layer: layer.aggr_module.register_forward_hook(lambda m, i,
                                                                               o: o * 2)),
    "aggregation": ("GA201", lambda layer: setattr(layer, "aggr_module", MaxAggregation())),
    "flow": ("GA202", lambda layer: setattr(layer, "flow", "target_to_source")),
    "method": ("GA205", lambda layer: setattr(layer, "update", lambda out: out * 3)),
    "rule": ("GA101", gnnaccel.exclude),
    "class": ("GA205", lambda layer: setattr(layer, "__class__", Other)),
}


@pytest.mark.parametrize("what", CAUSES)
def test_causes_that_come_later(route, inputs, what):
    code, change = CAUSES[what]
    with route.on():
        layer = warmed(route, "RGATConv", inputs)
        change(layer)
    with route.on(on_fallback="native"):
        layer(*inputs)
    assert gnnaccel.stats()[type(layer).__name__] == {"calls": 1, "routes": {"native": 1},
                                                      "reasons": {code: 1}}


def test_a_transform_that_comes_later(route, inputs):
    x, ei, et = inputs
    with route.on():
        layer = warmed(route, "RGATConv", inputs)
    with route.on(on_fallback="native"):
        torch.func.grad(lambda x: layer(x, ei, et).sum())(x)
    assert gnnaccel.stats()["RGATConv"]["reasons"] == {"GA405": 1}


def test_settings_of_the_host(route, inputs, monkeypatch, stated):
    with route.on():
        layer = warmed(route, "RGCNConv", inputs)
        monkeypatch.setattr(torch_geometric.backend, "use_segment_matmul", False)
        as_native(lambda: layer(*inputs))
        assert len(stated) == 2


def test_graphs_are_let_go_of(route):
    with route.on():
        x, ei, et = rgat.inputs(route)
        layer = warmed(route, "RGATConv", (x, ei, et))
        exact = next(filter(None, memories.get(layer).exact))
        kept = weakref.ref(ei), weakref.ref(et), weakref.ref(exact.graph())
        del exact
        del ei, et
        gc.collect()
    assert all(ref() is None for ref in kept)
