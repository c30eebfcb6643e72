"""Features that were made in inference mode, in calls with gradients on. Autograd cannot save such
tensors; what the host gathered from them it can."""
from __future__ import annotations

import pytest
import torch
from torch.nn import Linear, Sequential
from torch_geometric.nn import (AGNNConv, APPNP, CGConv, EdgeConv, GINEConv, HeteroLinear, NNConv,
                                PNAConv, RGATConv, SGConv)

import gnnaccel
from tests.pyg import graphs
from tests.pyg.judge import close

WIDTH = 12


def plain(layer, x, edge_index):
    return layer(x, edge_index)


def weighted(layer, x, edge_index):
    weight = torch.linspace(0.5, 1.5, edge_index.shape[1], device=x.device).requires_grad_()
    return layer(x, edge_index, weight)


def typed_edges(layer, x, edge_index):
    return layer(x, edge_index, torch.arange(edge_index.shape[1], device=x.device) % 3)


def typed_rows(layer, x, edge_index):
    return layer(x, torch.arange(x.shape[0], device=x.device) % 3)


def with_edges(layer, x, edge_index):
    return layer(x, edge_index, x.new_ones(edge_index.shape[1], WIDTH).requires_grad_())


def pna() -> PNAConv:
    return PNAConv(WIDTH, 8, ["mean", "max"], ["identity"], torch.ones(9, dtype=torch.long))


LAYERS = {
    "AGNNConv": (AGNNConv, plain),
    "RGATConv": (lambda: RGATConv(WIDTH, 8, 3), typed_edges),
    "HeteroLinear": (lambda: HeteroLinear(WIDTH, 8, 3), typed_rows),
    "EdgeConv": (lambda: EdgeConv(Linear(2 * WIDTH, 8)), plain),
    "PNAConv": (pna, plain),
    "CGConv": (lambda: CGConv(WIDTH), plain),
    "NNConv": (lambda: NNConv(WIDTH, 8, Sequential(Linear(WIDTH, 8 * WIDTH)), root_weight=False),
               with_edges),
    "GINEConv": (lambda: GINEConv(Linear(WIDTH, 8)), with_edges),
    "SGConv": (lambda: SGConv(WIDTH, 8), weighted),
    "APPNP": (lambda: APPNP(2, 0.1), weighted),
}


def trained(layer, call, x, edge_index) -> dict:
    """Results and gradients; what raises, its text."""
    inputs = dict(layer.named_parameters())
    try:
        out = call(layer, x, edge_index)
        # the sine of a large number says nothing of its last digits
        loss = (out / out.detach().abs().max()).sin().sum()
        if not inputs:
            loss.backward()
            return {"out": out.detach()}
        grads = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    except RuntimeError as error:
        return {"raises": str(error)}
    return {"out": out.detach(), **dict(zip(inputs, grads))}


@pytest.mark.parametrize("name", list(LAYERS))
def test_training(route, name):
    """Over the same graph and over new ones, before and after calls that kernels run."""
    torch.manual_seed(0)
    make, call = LAYERS[name]
    layer, x = make().to(route.device), graphs.features().to(route.device)
    edge_index = graphs.square().to(route.device)
    with torch.inference_mode():
        made = x.clone()
    expected, whole = (trained(layer, call, one, edge_index) for one in (made, x))
    assert "raises" not in expected
    with route.on(on_fallback="native"):
        for given in (made, made, x, x, x, made, x):
            for edges in (edge_index, edge_index.clone()):
                got = trained(layer, call, given, edges)
                for key, value in (whole if given is x else expected).items():
                    assert (got[key] is None if value is None else close(got[key], value)), key


@pytest.mark.long
@pytest.mark.parametrize("name", ["AGNNConv", "EdgeConv", "RGATConv"])
def test_gradients_turned_on_in_inference_mode(route, name):
    """Nothing is recorded there."""
    torch.manual_seed(0)
    make, call = LAYERS[name]
    layer, x = make().to(route.device), graphs.features().to(route.device)
    edge_index = graphs.square().to(route.device)
    with torch.inference_mode(), torch.enable_grad():
        expected = call(layer, x, edge_index)
        with route.on(on_fallback="native"):
            got = [call(layer, x, edge_index) for _ in range(3)]
    assert all(close(one, expected) and not one.requires_grad for one in got)


@pytest.mark.parametrize("name", ["AGNNConv", "PNAConv"])
def test_the_reason(route, name):
    make, call = LAYERS[name]
    layer, x = make().to(route.device), graphs.features().to(route.device)
    edge_index = graphs.square().to(route.device)
    with torch.inference_mode():
        x = x.clone()
    with route.on(), pytest.raises(gnnaccel.errors.FallbackError, match="GA212"):
        call(layer, x, edge_index)
