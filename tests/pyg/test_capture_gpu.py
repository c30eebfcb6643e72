"""CUDA graphs that are replayed over other edges, weights and features than were captured."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gnnaccel
from tests.pyg import graphs
from tests.pyg.edge_layers import Attended, ByHeads, DeepBent, HeadGates, Keeps, Normed
from tests.pyg.every import CALLS, leaves, made, moved
from tests.pyg.generated_calls import arguments
from tests.pyg.graphs import N
from tests.pyg.judge import close
from tests.pyg.test_capture import NAMES, OF_RELATIONS

pytestmark = pytest.mark.gpu


def warmed(step) -> None:
    """What torch asks for before a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


@torch.no_grad()
def refill(inputs, edges: bool) -> None:
    for value in inputs:
        for t in value.values() if isinstance(value, dict) else [value]:
            if t.is_floating_point():
                t.copy_(torch.rand_like(t))
            elif edges and t.dim() == 2:
                t.copy_(_once_each(graphs.square()))


def _once_each(edge_index: Tensor) -> Tensor:
    """Without repeated self loops, of whose weights the host takes any."""
    loops = (edge_index[0] == edge_index[1]).nonzero().view(-1)
    edge_index[0, loops] = (edge_index[1, loops] + 1) % N
    edge_index[:, 0] = 4
    return edge_index


def summed(layer, inputs) -> Tensor:
    return torch.cat([t.flatten() for t in leaves(layer(*inputs))])


@torch.no_grad()
def replayed(gpu, layer, inputs, result, edges: bool) -> None:
    """Replays of a captured ``result(layer, inputs)`` are the host's, of other inputs each time,
    of other ``edges`` too; and so is a call after the capture."""
    with gpu.on(on_fallback="native"):
        warmed(lambda: layer(*inputs))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = result(layer, inputs)
    for _ in range(3):
        refill(inputs, edges=edges)
        graph.replay()
        with gnnaccel.disabled():
            assert close(out, result(layer, inputs), 1e-4)
    with gpu.on(on_fallback="native"):
        assert close(result(layer, inputs), out, 1e-4), "a call after the capture"


@pytest.mark.parametrize("name", NAMES + [name for name in OF_RELATIONS if name in CALLS])
def test_forward(gpu, name):
    """Edges are others at each replay; those of layers of relations stay, as they must."""
    layer, inputs = made(name)
    layer, inputs = layer.to(gpu.device), tuple(moved(value, gpu.device) for value in inputs)
    replayed(gpu, layer, inputs, summed, edges=name not in OF_RELATIONS)


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "TransformerConv", "SAGEConv",
                                  "GraphConv", "GCNConv", "GCNConv, weights",
                                  "RGCNConv", "HGTConv"])
def test_training(gpu, name):
    layer, inputs = made(name)
    layer, inputs = layer.to(gpu.device), tuple(moved(value, gpu.device) for value in inputs)
    wanted = list(layer.parameters())

    def step() -> None:
        for p in wanted:
            p.grad = None
        summed(layer, inputs).pow(2).sum().backward()

    with gpu.on():
        warmed(step)
        for p in wanted:
            p.grad = None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            summed(layer, inputs).pow(2).sum().backward()
    for _ in range(2):
        refill(inputs, edges=name not in OF_RELATIONS)
        graph.replay()
        with gnnaccel.disabled():
            expected = torch.autograd.grad(summed(layer, inputs).pow(2).sum(), wanted,
                                           allow_unused=True)
        got = torch.cat([p.grad.flatten() for p, e in zip(wanted, expected) if e is not None])
        assert close(got, torch.cat([e.flatten() for e in expected if e is not None]), 1e-4)


def test_two_captures_do_not_share(gpu):
    """The second is replayed alone: what the first built is none of its business."""
    layer, (x, ei) = made("GATConv")
    layer, x, ei = layer.to(gpu.device), x.to(gpu.device), ei.to(gpu.device)
    captured = [torch.cuda.CUDAGraph() for _ in range(2)]
    with gpu.on(), torch.no_grad():
        warmed(lambda: layer(x, ei))
        outs = []
        for graph in captured:
            with torch.cuda.graph(graph):
                outs.append(layer(x, ei))
        ei.copy_(graphs.square())
        captured[1].replay()
        with gnnaccel.disabled():
            assert close(outs[1], layer(x, ei))


@pytest.mark.parametrize("form", [Attended, ByHeads, HeadGates, DeepBent, Normed, Keeps])
def test_messages_with_something_for_each_edge(gpu, form):
    """Nothing that a message writes for each edge is of the capture's edges."""
    layer, inputs = form().to(gpu.device), tuple(t.to(gpu.device) for t in arguments(form))
    replayed(gpu, layer, inputs, result, edges=True)


def result(layer, inputs) -> Tensor:
    """All that a message's layer gives, in a row."""
    found = layer(*inputs)
    return torch.cat([t.flatten() for t in (found if type(found) is tuple else (found,))])
