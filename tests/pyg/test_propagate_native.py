"""Layers over another batch each time that stay native: one is read, those no larger are not."""
from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import GCNConv, GraphConv, SAGEConv

import gnnaccel
from gnnaccel.adapters.pyg.propagate import calls
from gnnaccel.dispatch.ops import aggregation_cost
from gnnaccel.dispatch.ops.aggregation_cost import Estimate
from tests.pyg import graphs
from tests.pyg.generated_calls import routes
from tests.pyg.graphs import F

LAYERS = {"gcn": lambda: GCNConv(F, 5), "sage": lambda: SAGEConv(F, 5),
          "graph": lambda: GraphConv(F, 5)}
GAIN, STRUCTURE = 1.0, 10.0


@pytest.fixture
def read(emulated, monkeypatch):
    """Numbers of calls decided at length, where structures do not pay at once."""
    decided = []
    native = calls.decide
    monkeypatch.setattr(aggregation_cost, "estimate",
                        lambda
                        *args: Estimate(gain=GAIN, structure=STRUCTURE, ours=1.0, native=2.0))
    monkeypatch.setattr(calls, "_FEW_AT_FIRST", 0)
    monkeypatch.setattr(calls, "decide", lambda *args: (decided.append(1), native(*args))[1])
    with gnnaccel.enabled(backend="cuda"):
        yield decided


@pytest.mark.parametrize("name", LAYERS)
def test_batches(read, name):
    layer = LAYERS[name]()
    for nodes, edges in ((30, 100), (25, 120), (40, 90)):
        layer(graphs.features(nodes), graphs.square(nodes, edges))
    assert len(read) == 1 and gnnaccel.stats()[type(layer).__name__] == {
        "calls": 3, "routes": {"native": 3}, "reasons": {"GA301": 3}}


def test_what_changes_between_batches(read):
    layer, x = SAGEConv(F, F), graphs.features()

    def check(*args, at_length=True):
        seen = len(read)
        layer(*args)
        assert (len(read) > seen) is at_length

    check(x, graphs.square(edges=100))
    check(x, graphs.square(edges=100), at_length=False)
    check(x, graphs.square(edges=200))
    check(x, graphs.square(edges=100), at_length=False)
    check(x.clone().requires_grad_(), graphs.square(edges=100))
    check(x.clone().requires_grad_(), graphs.square(edges=100), at_length=False)
    with torch.no_grad():
        check(x, graphs.square(edges=100))
    with gnnaccel.enabled(backend="cuda", on_fallback="warn"):
        check(x, graphs.square(edges=100))


def test_a_graph_that_comes_again_gets_a_structure(read):
    """After as many calls as its layer would have been given it without what the other graph
    showed, those of other layers counted."""
    x, ei, known = graphs.features(), graphs.square(), []
    for warm in (False, True):
        layers = [SAGEConv(F, F), SAGEConv(F, F)]
        if warm:
            for layer in layers:
                layer(x, graphs.square())
        for turn in range(40):
            layers[turn % 2](x, ei)
            if "cuda" in routes(layers[0]):
                break
        known.append(turn)
        gnnaccel.reset_stats()
        ei = graphs.square()
    assert known[0] == known[1] < 39


def test_what_keeps_a_layer_native_otherwise_is_asked_each_time(read):
    layer, x = SAGEConv(F, F), graphs.features()
    handle = layer.register_message_forward_hook(lambda *args: None)
    for _ in range(3):
        layer(x, graphs.square())
    assert len(read) == 3
    handle.remove()
    with gnnaccel.enabled(backend="cuda", when="supported"):
        layer(x, graphs.square())
    assert routes(layer) == {"native": 3, "cuda": 1}


@torch.no_grad()
def test_deep_models_over_new_graphs_on_a_cpu(monkeypatch):
    """Of several layers over one batch the later ones are asked, as it is no longer a new one."""
    layers, decided, native = [SAGEConv(F, F) for _ in range(6)], [], calls.decide
    monkeypatch.setattr(calls, "decide", lambda *args: (decided.append(1), native(*args))[1])
    with gnnaccel.enabled():
        for step in range(6):
            x, ei = graphs.features(500), graphs.square(500, 2000 + step)
            for layer in layers:
                layer(x, ei)
            assert bool(decided) is (step == 0)
            decided.clear()
    assert gnnaccel.stats()["SAGEConv"]["routes"] == {"native": 36}
