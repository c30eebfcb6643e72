"""Every layer as a module that is replayed, on a GPU: values and gradients, step by step."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch_geometric import nn as pyg

import gnnaccel
from gnnaccel.adapters.captured import modules
from tests.pyg import graphs
from tests.pyg.every import CALLS, leaves, made, moved
from tests.pyg.judge import close

pytestmark = pytest.mark.gpu
#: PyG takes any of the weights of repeated self loops; its Laplacian waits for the device
NOT = ("GCNConv, weights", "ChebConv")


def summed(layer, inputs) -> torch.Tensor:
    return torch.cat([t.flatten() for t in leaves(layer(*inputs))])


def step(layer, inputs) -> torch.Tensor:
    layer.zero_grad()
    out = summed(layer, inputs)
    out.pow(2).sum().backward()
    return torch.cat([out.detach(), *[p.grad.flatten() for p in layer.parameters()
                                      if p.grad is not None]])


@pytest.mark.parametrize("name", CALLS)
def test_steps(gpu, name):
    """Weights move between the steps; what cannot be captured says why."""
    layer, inputs = made(name)
    layer, inputs = layer.to(gpu.device), tuple(moved(value, gpu.device) for value in inputs)
    optimizer = torch.optim.SGD(layer.parameters(), 1e-3) if list(layer.parameters()) else None
    if optimizer is None:
        pytest.skip("no weights")
    modules.reset()
    with gpu.on(on_fallback="native", capture=True):
        for number in range(10):
            torch.manual_seed(number)
            found = step(layer, inputs)
            torch.manual_seed(number)
            with gnnaccel.disabled():
                assert close(found, step(layer, inputs), 1e-4), number
            optimizer.step()
        captured = gnnaccel.status()["captured"]
    assert captured["replays"] and not captured["refused"] or name in NOT, captured


class Stack(torch.nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x, edge_index):
        for layer in self.layers:
            x = layer(x, edge_index).relu()
        return x


def test_what_the_capture_decides_is_made_before(gpu):
    """A layer that stayed native is captured by kernels once others have built the structure; and a
    refused capture says why, also where torch ended it."""
    torch.manual_seed(0)
    model = Stack(pyg.SAGEConv(24, 16), pyg.SAGEConv(16, 5)).to(gpu.device)
    x, edge_index = torch.randn(2700, 24), torch.randint(2700, (2, 10800))
    x, edge_index = x.to(gpu.device), edge_index.to(gpu.device)
    modules.reset()
    with gnnaccel.enabled(capture=True):
        for number in range(16):
            if number == 6:
                torch.nn.utils.parametrizations.weight_norm(model.layers[0].lin_l)
            found = step(model, (x, edge_index))
            with gnnaccel.disabled():
                assert close(found, step(model, (x, edge_index)), 1e-4), number
        captured = gnnaccel.status()["captured"]
    assert captured["replays"] and not captured["refused"], captured


def test_masks_are_new_in_each_replay_and_those_of_its_backward(gpu):
    """Without attention weights the result is linear in x, so x . dx is the result again."""
    layer = pyg.GATConv(8, 4, heads=2, dropout=0.5, bias=False).to(gpu.device)
    with torch.no_grad():
        layer.att_src.zero_()
        layer.att_dst.zero_()
    x = torch.rand(graphs.N, 8, device=gpu.device).requires_grad_()
    edge_index = graphs.square().to(gpu.device)
    outs = []
    modules.reset()
    with gpu.on(capture=True):
        for _ in range(9):
            out = layer(x, edge_index)
            dx, = torch.autograd.grad(out.sum(), x)
            assert torch.allclose((dx * x).sum(), out.sum(), rtol=1e-4)
            outs.append(out.detach())
        captured = gnnaccel.status()["captured"]
    assert captured == {"replays": {"GATConv": 5}, "refused": {}}
    assert len({float(out.sum()) for out in outs}) == 9


class Synchronising(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.GATConv(8, 4, dropout=0.5)

    def forward(self, x, edge_index):
        if torch.cuda.is_current_stream_capturing():  # which no call before tells of
            torch.cuda.current_stream().synchronize()
        return torch.nn.functional.dropout(self.conv(x, edge_index), 0.5, self.training)


def test_a_capture_that_fails_leaves_nothing_behind(gpu):
    """Random numbers, memory, and the captures of others are as ever. In a process of its own:
    what is left behind would fail other tests."""
    code = f"from {__name__} import fail; fail()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          cwd=Path(__file__).parents[2], timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def fail() -> None:
    """A capture that fails, and what has to work afterwards."""
    device = torch.device("cuda")
    model = Synchronising().to(device)
    x = torch.rand(graphs.N, 8, device=device)
    edge_index = graphs.square().to(device)
    with gnnaccel.enabled(when="supported", capture=True):
        for _ in range(8):
            model.zero_grad()
            model(x, edge_index).sum().backward()
        refused = gnnaccel.status()["captured"]["refused"]["Synchronising"]
        assert "cannot be captured" in next(iter(refused)), refused
        assert len({float(torch.rand(1, device=device)) for _ in range(4)}) == 4
        torch.manual_seed(3)
        first = torch.rand(4, device=device)
        torch.manual_seed(3)
        assert torch.equal(torch.rand(4, device=device), first)
        other = pyg.GATConv(8, 4, dropout=0.5).to(device)
        found = {float(other(x, edge_index).sum()) for _ in range(8)}
        captured = gnnaccel.status()["captured"]
        assert len(found) == 8 and captured["replays"]["GATConv"] == 4, captured
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        for _ in range(4):
            torch.empty(1 << 24, device=device)
        assert torch.cuda.memory_allocated() <= before


def test_results_that_are_kept(gpu):
    """They keep nodes of autograd of their parameters, which a capture may not wait for."""
    layer = pyg.GATConv(8, 4).to(gpu.device)
    x = torch.rand(graphs.N, 8, device=gpu.device)
    edge_index = graphs.square().to(gpu.device)
    modules.reset()
    kept = []
    with gpu.on(capture=True):
        for _ in range(8):
            kept.append(layer(x, edge_index))
            kept[-1].sum().backward()
        captured = gnnaccel.status()["captured"]
    assert captured == {"replays": {"GATConv": 4}, "refused": {}}


def test_a_capture_by_hand_draws_new_masks(gpu):
    layer = pyg.GATConv(8, 4, heads=2, dropout=0.5).to(gpu.device)
    x = torch.rand(graphs.N, 8, device=gpu.device)
    edge_index = graphs.square().to(gpu.device)
    side = torch.cuda.Stream()
    with gpu.on(), torch.no_grad():
        with torch.cuda.stream(side):
            layer(x, edge_index)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x, edge_index)
        found = set()
        for _ in range(5):
            graph.replay()
            found.add(float(out.sum()))
    assert len(found) == 5


def test_another_graph_in_between(gpu):
    """What the capture holds is not what an eager call over another graph lets go of."""
    torch.manual_seed(2)
    layer = pyg.GATConv(8, 4).to(gpu.device).eval()
    edges = [graphs.square().to(gpu.device) for _ in range(2)]
    modules.reset()
    x = torch.rand(graphs.N, 8, device=gpu.device)
    with gpu.on(capture=True), torch.no_grad():
        for _ in range(6):
            expected = layer(x, edges[0])
        for _ in range(20):
            other = torch.randint(0, graphs.N, (2, 4000), device=gpu.device)
            layer(x, other)
            gnnaccel.dispatch.graph.cache.clear()
            torch.cuda.empty_cache()
            torch.full((1 << 20,), 7, device=gpu.device)
            assert torch.equal(layer(x, edges[0]), expected)
        assert gnnaccel.status()["captured"]["replays"]["GATConv"] >= 20
