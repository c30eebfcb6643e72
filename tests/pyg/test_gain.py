"""gnnaccel.gain(step): blocks of either way in one process."""
from __future__ import annotations

import json

import pytest
import torch
from torch_geometric.nn import GATConv

import gnnaccel
from gnnaccel.profile.gain import blocks
from tests.pyg import graphs
from tests.pyg.graphs import F


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = GATConv(F, 8), GATConv(8, 8, aggr="mean")

    def forward(self, x, edge_index):
        return self.last(self.first(x, edge_index), edge_index)


@pytest.fixture
def step():
    net, inputs = Net(), (graphs.features(), graphs.square())

    def step():
        step.on.append(gnnaccel.status()["enabled"])
        net(*inputs).sum().backward()

    step.on = []
    return step


@pytest.mark.long
@pytest.mark.parametrize("enabled", [True, False])
def test_both_ways_take_turns(step, enabled):
    if enabled:
        gnnaccel.enable(when="supported")
    patched = gnnaccel.status()["hosts"]
    found = gnnaccel.gain(step, seconds=0.05)
    assert gnnaccel.status()["hosts"] == patched and gnnaccel.status()["enabled"] is enabled
    assert len(found.native.runs_ms) == len(found.ours.runs_ms) == blocks._PAIRS
    count = found.ours.steps // blocks._PAIRS
    warm = blocks._WARM + 1
    blocked = step.on[2 * warm:-2 * blocks._LOOKED][::count]
    assert step.on[:2 * warm] == [False] * warm + [True] * warm
    assert blocked == [False, True, True, False, False, True, True, False, False, True]
    assert {one.name for one in found.layers} == {"first", "last"}
    assert all(one.native_ms > 0 and one.ours_ms > 0 for one in found.layers)
    if enabled:
        assert {one.name: one.kernel is None for one in found.layers} == {"first": False,
                                                                          "last": True}
        assert [(one.code, one.layers) for one in found.kept] == [("GA201", ["last"])]
        assert any("changes the model" in one for one in found.to_try)
    assert gnnaccel.stats() == {}
    json.dumps(found.as_dict())
    assert "gnnaccel makes" in str(found) and "first (GATConv)" in str(found)


def test_bad_input_is_refused(step, monkeypatch):
    with pytest.raises(TypeError, match="pass a function without arguments"):
        gnnaccel.gain(step())
    with pytest.raises(ValueError, match="seconds=0 is not above 0"):
        gnnaccel.gain(step, seconds=0)
    monkeypatch.setenv("GNNACCEL", "0")
    with pytest.raises(gnnaccel.errors.GnnaccelError, match="GNNACCEL says off"):
        gnnaccel.gain(step)


def test_what_the_step_raises_comes_through_and_nothing_stays_on(step):
    def fails():
        if gnnaccel.status()["enabled"]:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        gnnaccel.gain(fails, seconds=0.01)
    assert not gnnaccel.status()["enabled"]
    assert not gnnaccel.dispatch.observe.records.listening()
