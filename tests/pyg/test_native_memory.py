"""Calls that go native are remembered; what follows them must not be taken for them."""
from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import GATConv

import gnnaccel
from gnnaccel.dispatch.plan import cost
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
    monkeypatch.setattr("gnnaccel.dispatch.plan.candidates.ATTENTION",
                        _with_cost(lambda request: 2.0 if request.fresh else 0.5))
    planner.forget()
    with gnnaccel.enabled(records=records):
        gnnaccel.reset_stats()
        for _ in range(3):
            layer(x, ei)
        assert gnnaccel.stats()["GATConv"]["routes"] == {"native": 1, "torch": 2}
    planner.forget()


def _with_cost(seconds):
    import dataclasses

    from gnnaccel.dispatch.plan.candidates import ATTENTION
    return tuple(dataclasses.replace(spec, seconds=seconds) if spec.route == "torch" else spec
                 for spec in ATTENTION)
