"""Plain calls of GATConv are bound to weights and kernels; the general way must give the same, bit
for bit."""
from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GATConv

import gnnaccel
from gnnaccel.dispatch.graph import cache
from gnnaccel.dispatch.memory.layer_memory import memories
from gnnaccel.dispatch.run import attention_bound
from tests.pyg import graphs
from tests.pyg.judge import close
from tests.pyg.layers import build
from tests.routes import opened


@pytest.fixture
def bound_calls(monkeypatch):
    """How many calls were bound ones."""
    calls = []
    native = attention_bound.Bound.__call__

    def counted(self, x, graph):
        calls.append(x)
        return native(self, x, graph)

    monkeypatch.setattr(attention_bound.Bound, "__call__", counted)
    return calls


def step(layer, x, edge_index, up):
    """Output and all gradients of one training step."""
    x.grad = None
    layer.zero_grad(set_to_none=True)
    out = layer(x, edge_index)
    if up is not None:
        out.backward(up)
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]


@contextmanager
def unbound():
    """A block in which no call is bound, and none kept for later ones."""
    with mock.patch.object(attention_bound, "bind", lambda *args: None):
        yield
    memories.clear()


def both_ways(route, layer, x, edge_index, up):
    """(the general way, bound if it can be)."""
    torch.use_deterministic_algorithms(True)  # so that both graphs are in the same order
    try:
        with route.on():
            with unbound():
                general = step(layer, x, edge_index, up)
            return general, step(layer, x, edge_index, up)
    finally:
        torch.use_deterministic_algorithms(False)


def same(a, b) -> bool:
    return (a is None) is (b is None) and (a is None or torch.equal(a, b))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("options",
                         [{}, dict(bias=False), dict(add_self_loops=False),
                          dict(negative_slope=0.7), dict(heads=3, width=5), dict(heads=1, width=1),
                          dict(heads=1, width=65)], ids=str)
def test_the_same_bit_for_bit(kernels, bound_calls, options, train):
    layer = build("GATConv", device=kernels.device, **options)
    x = graphs.features().to(kernels.device).requires_grad_(train)
    layer.requires_grad_(train)
    edge_index = graphs.square().to(kernels.device)
    up = (torch.randn(x.shape[0], layer.heads * layer.out_channels, device=kernels.device)
          if train else None)
    general, bound = both_ways(kernels, layer, x, edge_index, up)
    assert len(bound_calls) == 1 and all(same(a, b) for a, b in zip(general, bound))


@pytest.mark.parametrize("name", ["x", "att_src", "att_dst", "bias", "lin.weight"])
def test_each_gradient_alone(kernels, bound_calls, name):
    layer = build("GATConv", device=kernels.device).requires_grad_(False)
    x = graphs.features().to(kernels.device)
    {"x": x, **dict(layer.named_parameters())}[name].requires_grad_()
    edge_index = graphs.square().to(kernels.device)
    up = torch.randn(x.shape[0], layer.heads * layer.out_channels, device=kernels.device)
    general, bound = both_ways(kernels, layer, x, edge_index, up)
    assert len(bound_calls) == 1 and sum(g is not None for g in bound) == 2
    assert all(same(a, b) for a, b in zip(general, bound))


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(nodes=st.integers(1, 40), edges=st.integers(1, 400), hub=st.booleans(), loops=st.booleans(),
       seed=st.integers(0, 999))
def test_ugly_graphs(nodes, edges, hub, loops, seed):
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(0, nodes, (2, edges), generator=generator)
    if hub:
        edge_index[1, : edges // 2] = 0
    x = torch.randn(nodes, 12, generator=generator).requires_grad_()
    up = torch.randn(nodes, 16, generator=generator)
    with opened("emulated") as route:
        cache.clear()
        layer = GATConv(12, 8, heads=2, add_self_loops=loops)
        general, bound = both_ways(route, layer, x, edge_index, up)
    assert all(same(a, b) for a, b in zip(general, bound))


@pytest.mark.long
def test_calls_over_new_graphs_are_bound(kernels, bound_calls):
    layer = build("GATConv", device=kernels.device)
    for count in range(1, 13):
        x = graphs.features(20 + count).to(kernels.device).requires_grad_()
        edge_index = graphs.square(20 + count, 90).to(kernels.device)
        with gnnaccel.disabled():
            expected = step(layer, x, edge_index, None)
        with kernels.on():
            got = step(layer, x, edge_index, None)
        assert len(bound_calls) == count and close(got[0], expected[0], 1e-5)


def test_rows_of_any_layout(kernels, bound_calls):
    layer = build("GATConv", device=kernels.device)
    edge_index = graphs.square().to(kernels.device)
    wide = graphs.features(width=25).to(kernels.device)
    for x in (wide[:, 1::2].contiguous(), wide[:, 1::2], wide.t().contiguous().t()[:, :12]):
        general, bound = both_ways(kernels, layer, x.detach().requires_grad_(), edge_index, None)
        assert close(general[0], bound[0], 1e-6)
    assert len(bound_calls) >= 3


def test_second_derivatives(kernels, bound_calls):
    layer, x = build("GATConv",
                     device=kernels.device), graphs.features().to(kernels.device).requires_grad_()
    edge_index = graphs.square().to(kernels.device)

    def second():
        inputs = [x, *layer.parameters()]
        first = torch.autograd.grad(layer(x, edge_index).square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

    with kernels.on():
        second()
        got = second()
    assert len(bound_calls) == 2
    for a, b in zip(got, second()):
        assert close(a, b, 1e-4)


@pytest.mark.long
@pytest.mark.parametrize("graph", ["one", "new", "two"])
def test_checkpoints(kernels, bound_calls, graph):
    """The repetition saves what the call saved: also of a first call, over a graph that is new each
    time, and of a layer that was called over another graph meanwhile."""
    layer = build("GATConv", device=kernels.device)
    first, second = (graphs.square().to(kernels.device) for _ in range(2))
    x = graphs.features().to(kernels.device).requires_grad_()

    def gradients(edges):
        x.grad = None
        layer.zero_grad(set_to_none=True)
        sum(checkpoint(layer, x, each, use_reentrant=False).square().sum()
            for each in edges).backward()
        return [x.grad, *(p.grad for p in layer.parameters())]

    for _ in range(3):
        edges = {"one": [first], "new": [graphs.square().to(kernels.device)],
                 "two": [first, second]}[graph]
        expected = gradients(edges)
        with kernels.on():
            got = gradients(edges)
        assert all(close(a, b, 1e-4) for a, b in zip(got, expected))
    assert bound_calls


@pytest.mark.parametrize("change", ["weight", "data", "hook", "listening", "frozen", "autocast"])
def test_changes_are_seen(kernels, bound_calls, change):
    layer, x = build("GATConv", device=kernels.device), graphs.features().to(kernels.device)
    edge_index = graphs.square().to(kernels.device)
    with kernels.on():
        for _ in range(2):
            layer(x, edge_index)
        assert len(bound_calls) == 2
        if change == "weight":
            layer.lin.weight = torch.nn.Parameter(torch.randn_like(layer.lin.weight))
        elif change == "data":
            layer.att_src.data = torch.randn_like(layer.att_src)
        elif change == "hook":
            layer.lin.register_forward_hook(lambda module, args, out: out * 2)
        elif change == "frozen":
            layer.requires_grad_(False)
        with gnnaccel.enabled(records=4) if change == "listening" else torch.autocast(
                kernels.device.type, torch.bfloat16, enabled=change == "autocast"):
            out = layer(x, edge_index)
            with gnnaccel.disabled():
                assert close(out, layer(x, edge_index), 2e-2 if change == "autocast" else 1e-5)
        assert out.requires_grad is (change != "frozen")
        assert len(bound_calls) == (3 if change in ("weight", "frozen") else 2)


def test_autocast_from_the_first_call_on(kernels, bound_calls):
    """The map's rows are then of two bytes a number, which a bound call's kernels would read as
    four."""
    layer, x = build("GATConv",
                     device=kernels.device), graphs.features().to(kernels.device).requires_grad_()
    edge_index = graphs.square().to(kernels.device)
    up = torch.randn(x.shape[0], layer.heads * layer.out_channels, device=kernels.device)

    def stepped():
        with torch.autocast(kernels.device.type, torch.bfloat16):
            out = layer(x, edge_index)
        return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], up.to(out.dtype))]

    with gnnaccel.disabled():
        expected = stepped()
    with kernels.on():
        for _ in range(4):
            assert all(close(a, b, 3e-2) for a, b in zip(stepped(), expected))
    assert not bound_calls
    with kernels.on():
        for _ in range(3):
            layer(x, edge_index)
    assert bound_calls


@pytest.mark.parametrize("name", ["att_src", "att_dst", "lin.weight"])
def test_memory_that_is_exchanged_before_backward(kernels, bound_calls, name):
    """As sharded training does it: the values are the same, the memory is another and the old one
    is gone."""
    layer, x = build("GATConv",
                     device=kernels.device), graphs.features().to(kernels.device).requires_grad_()
    edge_index, parameter = graphs.square().to(kernels.device), dict(layer.named_parameters())[name]
    with kernels.on():
        expected = step(layer, x, edge_index,
                        torch.ones(x.shape[0], layer.heads * layer.out_channels,
                                   device=kernels.device))
        layer.zero_grad(set_to_none=True)
        out, old = layer(x, edge_index), parameter.data
        parameter.data = old.clone()
        old.fill_(float("nan"))
        [got] = torch.autograd.grad(out, x, torch.ones_like(out))
    assert len(bound_calls) == 2 and close(got, expected[1], 1e-5)


@pytest.mark.parametrize("name", ["att_src", "att_dst"])
def test_vectors_in_another_order(kernels, bound_calls, name):
    """Over the same memory, which is read as the host reads it."""
    layer = build("GATConv", device=kernels.device, heads=4, width=4)
    x, edge_index = graphs.features().to(kernels.device), graphs.square().to(kernels.device)
    parameter = getattr(layer, name)
    with kernels.on():
        for _ in range(3):
            layer(x, edge_index)
        parameter.data = parameter.data.transpose(1, 2)
        with gnnaccel.disabled():
            expected = layer(x, edge_index)
        assert close(layer(x, edge_index), expected, 1e-5) and len(bound_calls) == 3


def test_it_keeps_no_graph_alive(kernels):
    layer, x, edge_index = build("GATConv",
                                 device=kernels.device), graphs.features().to(
                                     kernels.device), graphs.square()
    edge_index = edge_index.to(kernels.device)
    with kernels.on(), torch.no_grad():
        for _ in range(3):
            layer(x, edge_index)
        last = next(filter(None, memories.get(layer).exact))
        assert last.bound is not None and last.graph() is not None
        cache.clear()
        assert last.graph() is None
