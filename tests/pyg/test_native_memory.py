"""Calls that go native are remembered; what follows them must not be taken for them."""
from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import GATConv

import gnnaccel
from gnnaccel.dispatch.memory import layer_memory
from gnnaccel.dispatch.plan import cost
from gnnaccel.dispatch.plan.request import EXPECTED
from tests.pyg import graphs


@pytest.fixture
def never_pays(monkeypatch):
    """An estimate by which every route but native loses."""
    from gnnaccel.dispatch.plan import planner
    monkeypatch.setattr(cost, "native", lambda request: 0.0)
    planner.forget()
    yield
    planner.forget()


def test_a_pair_after_remembered_plain_calls(never_pays):
    x, ei = graphs.features(), graphs.square()
    layer = GATConv(x.shape[1], 8, 2).eval()
    expected = layer(x, ei)
    with gnnaccel.enabled():
        gnnaccel.reset_stats()
        for given in (x, x, x, (x, x), [x, x], x):
            torch.testing.assert_close(layer(given, ei), expected)
        assert gnnaccel.stats()["GATConv"]["routes"] == {"native": 6}


@pytest.mark.parametrize("records", [0, 10])
def test_listening_does_not_change_the_route(monkeypatch, records):
    """Native for a new graph, the torch backend from its second call on, whether anybody listens or
    not."""
    from gnnaccel.dispatch.plan import planner
    x, ei = graphs.features(), graphs.square()
    layer = GATConv(x.shape[1], 8, 2).eval()
    monkeypatch.setattr(cost, "native", lambda request: 1.0)
    monkeypatch.setattr("gnnaccel.dispatch.plan.planner.ATTENTION",
                        _with_cost(lambda request: 2.0 if request.fresh else 0.5))
    planner.forget()
    with gnnaccel.enabled(records=records):
        gnnaccel.reset_stats()
        for _ in range(3):
            layer(x, ei)
        assert gnnaccel.stats()["GATConv"]["routes"] == {"native": 1, "torch": 2}
    planner.forget()


@pytest.mark.long
def test_how_many_calls_a_structure_serves(monkeypatch):
    """A new graph is expected to serve as many calls as the one before did, repeated ones and those
    of other layers too. One that comes more often is taken to come often."""
    from gnnaccel.dispatch.plan import planner
    asked, plan = [], planner.plan
    monkeypatch.setattr(planner, "plan", lambda request, config: (
        asked.append(request.fresh), plan(request, config))[1])
    x, first, second = graphs.features(), GATConv(5, 8, 2), GATConv(5, 8, 2)
    x = x[:, :5]

    def fresh(*layers, graph=None):
        del asked[:]
        graph = graphs.square().clone() if graph is None else graph
        with torch.no_grad(), gnnaccel.enabled(when="supported"):
            for layer in layers:
                layer(x, graph)
        return asked[0]

    assert fresh(first, second) == EXPECTED  # nothing is known yet
    assert fresh(first) == 2  # the graph before served both
    for _ in range(6):  # some of these calls are kept and repeated
        assert fresh(first, first, first) in (1, 3)
    assert fresh(first, first, second) == 3


def test_a_graph_that_serves_two_calls_is_no_known_one_at_the_second(monkeypatch):
    """Native calls too: at the second call over a graph one is left, at the third it is one that
    comes often."""
    memory = layer_memory.of(torch.nn.Identity())
    first, second, third = (torch.zeros(2, 3) for _ in range(3))
    assert memory.expects(first) == (False, EXPECTED)
    assert memory.expects(first) == (True, 0)  # the only graph so far
    assert memory.expects(second) == (False, 2)
    assert memory.expects(second) == (True, 1) and memory.expects(second) == (True, 0)
    for _ in range(2 * EXPECTED):
        memory.expects(second)
    assert memory.expects(third) == (False, EXPECTED)  # no more than at first


def test_native_calls_over_a_graph_that_serves_two(monkeypatch):
    """Both are as over a new graph; a third shows that it comes more often. They do not show how
    many there are, since most are not counted."""
    memory, state = layer_memory.of(torch.nn.Identity()), ("state",)
    first, second, third, fourth = (torch.zeros(2, 3, dtype=torch.long) for _ in range(4))
    memory.expects(first), memory.expects(first)
    assert memory.expects(second) == (False, 2)
    assert not memory.meets((second,), second)  # the call above was native
    assert not memory.meets((second,), second, state) and memory.meets((second,), second, state)
    assert not memory.meets((third,), third, state)
    assert memory.expects(third) == (True, 1) and memory.meets((third,), third, state)
    assert memory.expects(fourth) == (False, 2)


def _with_cost(seconds):
    import dataclasses

    from gnnaccel.dispatch.plan.planner import ATTENTION
    return tuple(dataclasses.replace(spec, seconds=seconds) if spec.route == "torch" else spec
                 for spec in ATTENTION)
