"""Relational layers of every kind: repeated bit for bit, over no edges, and, on a GPU, without
waiting for it."""
from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import FiLMConv, HEATConv, RGATConv

import gnnaccel
from gnnaccel.dispatch.graph import cache
from tests.pyg import graphs
from tests.pyg.graphs import F, N
from tests.pyg.hetero_graphs import on
from tests.pyg.judge import close
from tests.pyg.test_gpu import no_waiting
from tests.pyg.test_relational_gradients import MADE, R

pytestmark = pytest.mark.filterwarnings("ignore:There exist node types")


def made(route, name: str):
    layer, args = MADE[name]()
    return layer.to(route.device), [on(route.device, a)[0]
                                    if isinstance(a, dict) else a.to(route.device) for a in args]


def results(layer: torch.nn.Module, args: list) -> list:
    """The outputs and the gradients of all parameters."""
    layer.zero_grad()
    out = layer(*args)
    outs = [t for t in (out.values() if isinstance(out, dict) else [out]) if t is not None]
    sum(t.sin().sum() for t in outs).backward()
    return [*(t.detach() for t in outs),
            *(p.grad for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_runs_repeat_bit_for_bit(route, name, deterministic, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    layer, args = made(route, name)
    torch.use_deterministic_algorithms(deterministic)
    try:
        expected = results(layer, args)
        with route.on(on_fallback="native"):
            first = results(layer, args)
            cache.clear()
            second = results(layer, args)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(first) == len(expected) and all(torch.equal(a, b) for a, b in zip(first, second))
    for a, b in zip(first, expected):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("layer, name",
                         [(lambda: RGATConv(F, 8, R), "RGATConv"),
                          (lambda: FiLMConv(F, 8, R), "FiLMConv"),
                          (lambda: HEATConv(F, 8, 2, R, 4, 3, 4), "HEATConv")],
                         ids=["rgat", "film", "heat"])
def test_no_edges(route, layer, name):
    layer, x, ei = layer().to(route.device), graphs.features().to(route.device), graphs.square().to(
        route.device)[:, :0]
    types, kinds = ei[0], torch.arange(N, device=route.device) % 2
    args = (kinds, types, x.new_empty(0, 3)) if name == "HEATConv" else (types,)
    expected = layer(x, ei, *args)
    with route.on(on_fallback="native"):
        assert close(layer(x, ei, *args), expected)  # HEAT's maps by node type run by kernels
    assert gnnaccel.stats()[name]["reasons"] == {"GA303": 1}


@pytest.mark.gpu
@pytest.mark.parametrize("name", MADE)
def test_no_waiting_over_one_graph(gpu, name):
    layer, args = made(gpu, name)

    def step() -> None:
        out = layer(*args)
        sum(t.sum() for t in (out.values() if isinstance(out, dict) else [out])
            if t is not None).backward()

    with gpu.on(on_fallback="native"):
        for _ in range(3):
            step()
        with no_waiting():
            for _ in range(3):
                step()
