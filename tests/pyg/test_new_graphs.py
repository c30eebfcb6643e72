"""What is kept of calls by kernels where graphs are new each time, and where one comes again."""
from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GATConv, GINConv, RGCNConv, SGConv, TransformerConv

import gnnaccel
from gnnaccel.adapters.pyg.propagate import calls, new_graphs_taken
from gnnaccel.dispatch import router
from gnnaccel.dispatch.memory.layer_memory import memories
from tests.pyg import graphs
from tests.pyg.graphs import F
from tests.pyg.judge import close

LAYERS = {"GATConv": lambda: GATConv(F, 4, 2), "TransformerConv": lambda: TransformerConv(F, 4, 2),
          "RGCNConv": lambda: RGCNConv(F, 5, 3), "GINConv": lambda: GINConv(torch.nn.Identity())}


def inputs(name: str) -> tuple:
    """Of a call over a new graph."""
    edges = graphs.square()
    types = [torch.randint(3, edges.shape[1:])] if name == "RGCNConv" else []
    return graphs.features(), edges, *types


@pytest.fixture
def decided(emulated, monkeypatch):
    """One entry for each call by kernels that was like no kept one."""
    seen = []
    for module, name in (router, "_decide"), (calls, "_read"):
        native = getattr(module, name)
        monkeypatch.setattr(module, name,
                            lambda *args, native=native: (seen.append(1), native(*args))[1])
    run = new_graphs_taken.Taken.run

    def counted(*args):
        out = run(*args)
        if out is not None:
            seen.append(1)
        return out

    monkeypatch.setattr(new_graphs_taken.Taken, "run", counted)
    with emulated.on():
        yield seen


def kept(layer) -> list:
    """The calls that the layer's memory holds."""
    memory = memories.get(layer)
    return [*filter(None, memory.exact), *(one for over in memory.over for one in over.values())]


@pytest.mark.parametrize("name", LAYERS)
def test_few_calls_over_new_graphs_are_kept(decided, name):
    layer, seen = LAYERS[name](), {}
    for _ in range(28):
        args = inputs(name)
        out = layer(*args)
        seen.update({id(one): one for one in kept(layer)})
        with gnnaccel.disabled():
            assert close(out, layer(*args), 1e-5)
    assert len(decided) == 28 and 4 <= len(seen) <= 9


@pytest.mark.parametrize("new", [0, 1, 3, 11, 12, 13])
@pytest.mark.parametrize("name", LAYERS)
def test_a_graph_that_comes_again(decided, name, new):
    """From its third call on at the latest."""
    layer = LAYERS[name]()
    for _ in range(new):
        layer(*inputs(name))
    args = inputs(name)
    for _ in range(2):
        expected = layer(*args)
    decided.clear()
    for _ in range(3):
        assert torch.equal(layer(*args), expected)
    assert not decided


@pytest.mark.parametrize("name", LAYERS)
def test_each_graph_comes_twice(decided, name):
    """Of layers that repeat what they keep, each call is kept."""
    layer = LAYERS[name]()
    for _ in range(12):
        args = inputs(name)
        for _ in range(2):
            layer(*args)
    assert len(decided) == 12


@pytest.mark.long
@pytest.mark.parametrize("name", LAYERS)
def test_graphs_come_twice_after_many_that_did_not(decided, name):
    layer = LAYERS[name]()
    for _ in range(12):
        layer(*inputs(name))
    for times in range(24):
        if times == 12:
            decided.clear()
        args = inputs(name)
        for _ in range(2):
            layer(*args)
    assert len(decided) == 12


@pytest.mark.long
@pytest.mark.parametrize("name", LAYERS)
def test_calls_in_checkpoints_are_kept(decided, name):
    """What a checkpoint repeats in backward is like the call."""
    layer = LAYERS[name]()
    for _ in range(12):
        layer(*inputs(name))
    for _ in range(6):
        x, *more = inputs(name)
        x.requires_grad_()
        decided.clear()
        out = checkpoint(layer, x, *more, use_reentrant=False)
        out.square().sum().backward()
        assert len(decided) == 1
        with gnnaccel.disabled():
            expected = torch.autograd.grad(layer(x, *more).square().sum(), x)
        assert close(x.grad, *expected, 1e-4)


def test_hops_of_a_layer_are_alike_where_nothing_is_recorded(monkeypatch):
    """The features that come in may want a gradient, those of the second hop cannot then."""
    seen, native = [], calls._decide
    monkeypatch.setattr(calls, "_decide", lambda *args: (seen.append(1), native(*args))[1])
    monkeypatch.setattr(calls, "_FEW_AT_FIRST", 0)  # edges are read from the first call on
    layer, x = SGConv(F, 4, K=2), graphs.features().requires_grad_()
    with gnnaccel.enabled(), torch.no_grad():
        for _ in range(6):
            layer(x, graphs.square())
    assert len(seen) <= 2


@pytest.mark.long
@pytest.mark.parametrize("name", LAYERS)
def test_graphs_in_turn_of_which_one_changes(emulated, name):
    """Calls over several graphs are kept: none is repeated over other edges than its own."""
    layer, graphs = LAYERS[name](), [inputs(name) for _ in range(3)]

    def right() -> None:
        for args in graphs:
            with gnnaccel.disabled():
                expected = layer(*args)
            torch.testing.assert_close(layer(*args), expected, rtol=1e-4, atol=1e-5)

    with emulated.on():
        for _ in range(3):
            right()
        graphs[1][1][0].copy_(graphs[1][1][0].flip(0))
        right()
        with torch.no_grad():
            for weight in layer.parameters():
                weight.mul_(1.5)
        right()
        x, edge_index, *more = graphs[2]
        edge_index.data = edge_index.data.flip(1)  # other edges in the same tensor
        right()
        graphs[0] = (graphs[0][0][:, :], *graphs[2][1:])  # one graph twice
        for _ in range(2):
            right()
