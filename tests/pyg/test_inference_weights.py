"""Layers whose lazy weights were made by a call in inference mode. Autograd cannot save such weights,
and gives them no gradients; what else a layer has is trained."""
from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import GATConv, GATv2Conv, HeteroConv, HGTConv, TransformerConv

import gnnaccel
from tests.pyg import graphs
from tests.pyg.judge import close, took

KINDS = [("a", "to", "b"), ("b", "to", "a")]


def plain(layer, x, edge_index):
    return layer(x, edge_index)


def pair(layer, x, edge_index):
    return layer((x, x), edge_index)


def related(layer, x, edge_index):
    return layer({"a": x, "b": x}, dict.fromkeys(KINDS, edge_index))["a"]


LAYERS = {
    "GATConv": (lambda: GATConv(-1, 8, 2), plain),
    "GATConv of pairs": (lambda: GATConv((-1, -1), 8, add_self_loops=False), pair),
    "GATv2Conv": (lambda: GATv2Conv(-1, 8, 2), plain),
    "TransformerConv": (lambda: TransformerConv(-1, 8, 2), plain),
    "HGTConv": (lambda: HGTConv(-1, 8, (["a", "b"], KINDS), 2), related),
    "HeteroConv": (lambda: HeteroConv({kind: TransformerConv((-1, -1), 8) for kind in KINDS}),
                   related),
}


def trained(layer, call, x, edge_index) -> dict:
    """Results and gradients; what raises, its text."""
    inputs = dict(layer.named_parameters())
    try:
        out = call(layer, x, edge_index)
        grads = torch.autograd.grad(out.sin().sum(), list(inputs.values()), allow_unused=True)
    except RuntimeError as error:
        return {"raises": str(error)}
    return {"out": out.detach(), **dict(zip(inputs, grads))}


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("name", list(LAYERS))
def test_training(route, name, wanted):
    """Before and after calls without gradients, which run by kernels."""
    make, call = LAYERS[name]
    layer, x = make().to(route.device), graphs.features().to(route.device)
    edge_index, given = graphs.square().to(route.device), x.clone().requires_grad_(wanted)
    with torch.inference_mode():
        call(layer, x, edge_index)
    assert any(p.is_inference() for p in layer.parameters())
    expected = trained(layer, call, given, edge_index)
    with route.on(on_fallback="native"):
        for _ in range(2):
            for _ in range(3):
                got = trained(layer, call, given, edge_index)
                assert got.keys() == expected.keys()
                for key, value in got.items():
                    if key.endswith("lin_key.bias"):  # nothing but rounding, another on a GPU
                        assert value is None or torch.allclose(value, expected[key], atol=1e-4), key
                        continue
                    assert (value == expected[key] if value is None or key == "raises"
                            else close(value, expected[key])), key
            with torch.no_grad():
                call(layer, x, edge_index)


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "TransformerConv"])
def test_the_reason(route, name):
    make, call = LAYERS[name]
    layer, x = make().to(route.device), graphs.features().to(route.device)
    edge_index = graphs.square().to(route.device)
    with torch.inference_mode():
        call(layer, x, edge_index)
    with route.on(), pytest.raises(gnnaccel.errors.FallbackError,
                                   match="GA209.*a weight was made in inference mode"):
        call(layer, x, edge_index)
    gnnaccel.reset_stats()
    with route.on(), torch.no_grad():
        call(layer, x, edge_index)
    took(route, 1)
