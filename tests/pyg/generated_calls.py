"""Calls of layers whose messages kernels are written for."""
from __future__ import annotations

import torch

import gnnaccel
from tests.pyg import graphs
from tests.pyg.graphs import E, N
from tests.pyg.judge import close


def arguments(cls, edges: int = E) -> list[torch.Tensor]:
    """Features of nodes, edges, and their features."""
    edge = graphs.edge_features(edges, cls.edge)
    return [graphs.features(), graphs.square(edges=edges), edge]


def hub() -> torch.Tensor:
    """5,000 edges into one node, as many out of another, and a few others."""
    ei = torch.randint(0, N, (2, 10100))
    ei[1, :5000], ei[0, 5000:10000] = 4, 7
    return ei[:, torch.randperm(10100)]


def to(device: torch.device, *args):
    return [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]


def both(route, layer, *args, **options) -> None:
    """The layer's own result, and that of an accelerated call, are the same."""
    layer, args = layer.to(route.device), to(route.device, *args)
    expected = layer(*args)
    gnnaccel.reset_stats()
    with route.on(**options):
        got = layer(*args)
    assert close(got, expected)


def routes(layer) -> dict[str, int]:
    return gnnaccel.stats()[type(layer).__name__]["routes"]


def stays_native(route, layer) -> None:
    """The layer runs natively, and its result is its own."""
    x, ei, _ = arguments(type(layer))
    both(route, layer, x, ei, on_fallback="native")
    assert routes(layer) == {"native": 1}


def repeats(kernels, layer, edge_width: int) -> None:
    """Results and all gradients are the same bits in two calls, over rows that are split."""
    layer, ei = layer.to(kernels.device), hub().to(kernels.device)
    x, edge = to(kernels.device, graphs.features(), graphs.edge_features(ei.shape[1], edge_width))
    found = []
    for _ in range(2):
        given = [x.clone().requires_grad_(), edge.clone().requires_grad_()]
        layer.zero_grad()
        with kernels.on():
            out = layer(given[0], ei, given[1])
            out.sin().sum().backward()
        grads = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
        found.append([out, *(t.grad for t in given if t.grad is not None), *grads])
    assert len(found[0]) > 2 and all(torch.equal(a, b) for a, b in zip(*found))


def compare_second(kernels, layer, x, edge_index, edge) -> None:
    """Second derivatives for each input and parameter, by kernels and natively."""

    def second() -> list[torch.Tensor]:
        given = [x.clone().requires_grad_(), edge.clone().requires_grad_(), *layer.parameters()]
        out = layer(given[0], edge_index, given[1])
        firsts = torch.autograd.grad(out.square().sum(), given, create_graph=True,
                                     allow_unused=True)
        total = sum(g.square().sum() for g in firsts if g is not None)
        return [g for g in torch.autograd.grad(total, given, allow_unused=True) if g is not None]

    expected = second()
    with kernels.on():
        got = second()
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        assert close(a, b, 1e-3)
