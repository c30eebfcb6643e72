"""Layers over another batch each time, whose edges are summed as they come."""
from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import GCNConv, GENConv, GraphConv, LEConv, SAGEConv

import gnnaccel
from gnnaccel.adapters.pyg.propagate import calls
from gnnaccel.adapters.pyg.propagate.new_graphs_native import READ_SMALL_AT
from gnnaccel.dispatch.ops import aggregation_cost
from gnnaccel.dispatch.ops.aggregation_cost import Estimate
from tests.pyg import graphs
from tests.pyg.generated_calls import routes
from tests.pyg.graphs import F
from tests.pyg.judge import close
from tests.pyg.own_layers import Copying, hooked

LAYERS = {"gcn": lambda: GCNConv(F, 5), "sage": lambda: SAGEConv(F, 5),
          "graph": lambda: GraphConv(F, 5), "own": Copying}


@pytest.fixture
def fresh(emulated, monkeypatch):
    """Numbers of calls decided at length, with kernels that pay from the first edge on."""
    estimate = Estimate(gain=9.0, structure=10.0, ours=1.0, native=10.0, once=2.0)
    decided = []
    native = calls.decide
    monkeypatch.setattr(aggregation_cost, "estimate", lambda *args: estimate)
    monkeypatch.setattr(calls, "_FEW_AT_FIRST", 0)
    monkeypatch.setattr(calls, "decide", lambda *args: (decided.append(1), native(*args))[1])
    with gnnaccel.enabled(backend="cuda"):
        yield decided


def step(layer, x, ei):
    x = x.clone().requires_grad_()
    out = layer(x, ei)
    out.square().sum().backward()
    return out.detach(), x.grad


@pytest.mark.parametrize("name", LAYERS)
def test_batches(fresh, name):
    layer = LAYERS[name]()
    for nodes, edges in ((30, 100), (25, 120), (40, 90)):
        x, ei = graphs.features(nodes), graphs.square(nodes, edges)
        got = step(layer, x, ei)
        with gnnaccel.disabled():
            assert all(map(close, got, step(layer, x, ei)))
    assert len(fresh) == 1 and routes(layer) == {"cuda": 3}


def test_training_and_evaluation_in_turns(fresh):
    """What was decided of one mode's calls holds for its next ones."""
    layer = Copying()
    for _ in range(4):
        step(layer, graphs.features(), graphs.square())
        with torch.no_grad():
            layer(graphs.features(), graphs.square())
    assert len(fresh) == 2 and routes(layer) == {"cuda": 8}


def test_small_graphs_are_read_once(fresh, monkeypatch):
    """A layer that comes first over each graph: one of its calls is read, those after it are like
    that one."""
    monkeypatch.setattr(calls, "_FEW_AT_FIRST", 1000)
    layer = Copying()
    for number in range(1, 13):
        step(layer, graphs.features(), graphs.square())
        assert len(fresh) == (number >= READ_SMALL_AT)
    assert routes(layer) == {"native": READ_SMALL_AT - 1, "cuda": 13 - READ_SMALL_AT}


def test_rows_that_are_made_first(fresh):
    """Of a layer's own number, which may be another at the next batch."""
    layer = GENConv(F, F, aggr="add", norm="layer")
    for eps, seen in ((1e-7, 1), (1e-7, 1), (0.5, 2), (0.5, 2)):
        layer.eps = eps
        x, ei = graphs.features(), graphs.square()
        got = step(layer, x, ei)
        with gnnaccel.disabled():
            assert all(map(close, got, step(layer, x, ei)))
        assert len(fresh) == seen
    assert routes(layer) == {"cuda": 4}


def test_messages_of_both_ends_wait_for_a_structure(fresh):
    layer, x, ei = LEConv(F, 5), graphs.features(), graphs.square()
    expected = layer(x, ei)
    for _ in range(4):
        got = layer(x, ei)
    assert close(got, expected) and routes(layer) == {"native": 2, "cuda": 3}


def test_what_changes_between_batches(fresh):
    layer, x = Copying(), graphs.features()

    def check(*args, at_length=True, like=1):
        seen = len(fresh)
        got = layer(*args)
        assert (len(fresh) > seen) is at_length
        with gnnaccel.disabled():
            assert close(got, layer(*args))

    check(x, graphs.square())
    check(x, graphs.square(), at_length=False)
    check(x, graphs.square(edges=5000))  # more than 16 times as many
    check(x[:, :5], graphs.square(edges=300))
    check(x[:, :5].clone().requires_grad_(), graphs.square(edges=300))
    check(x, graphs.square(edges=300).int())
    layer.flow = "target_to_source"
    check(x, graphs.square(edges=300))
    check(x, graphs.square(edges=300), at_length=False)
    layer.aggr_module = SAGEConv(F, F).aggr_module
    check(x, graphs.square(edges=300))
    assert routes(layer) == {"cuda": 9}
    hooked(layer)
    check(x, graphs.square(edges=300))
    assert routes(layer) == {"cuda": 9, "native": 1}


def test_a_graph_that_comes_again_gets_a_structure(fresh):
    layer, x, ei = Copying(), graphs.features(), graphs.square()
    layer(x, graphs.square())
    for _ in range(25):
        layer(x, ei)
    # the first, and where the structure was built; not the 4 calls after that
    assert len(fresh) == 2
    with gnnaccel.disabled():
        expected = layer(x, ei)
    assert close(layer(x, ei), expected) and gnnaccel.cache.info()["hits"] == 0
