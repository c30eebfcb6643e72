"""Records and reports call layers as the model that runs does, though nobody named them."""
from __future__ import annotations

import functools
import gc
import json

import pytest
import torch
from torch_geometric.nn import GATConv, GCNConv

import gnnaccel
from gnnaccel.dispatch.policy import names
from tests.pyg import graphs
from tests.pyg.graphs import F


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList([GCNConv(F, 8), GATConv(8, 8)])
        self.last = GATConv(8, 8)

    def encode(self, x, edge_index):
        for conv in self.convs:
            x = conv(x, edge_index)
        return self.last(x, edge_index)


class Around(torch.nn.Module):
    """Calls a method of its part, as PyG's GAE does."""

    def __init__(self):
        super().__init__()
        self.encoder = Net()

    def forward(self, x, edge_index):
        return self.encoder.encode(x, edge_index)


@pytest.fixture
def inputs():
    return graphs.features(), graphs.square()


def recorded(call) -> list:
    gnnaccel.clear_records()
    with gnnaccel.enabled(records=100):
        call()
        return [record["name"] for record in gnnaccel.records() if record["direction"] == "forward"]


@pytest.mark.long
def test_layers_go_by_the_names_of_the_outermost_module_that_runs(inputs):
    assert recorded(lambda: Net().encode(*inputs)) == ["convs.0", "convs.1", "last"]
    model = Around()
    assert recorded(lambda: model(*inputs)) == ["encoder.convs.0", "encoder.convs.1",
                                                "encoder.last"]
    # once found they stay, whoever calls
    assert recorded(lambda: model.encoder.encode(*inputs))[-1] == "encoder.last"


def test_names_given_win_and_a_layer_alone_has_none(inputs):
    model = Net()
    gnnaccel.name_layers(model, "net")
    assert recorded(lambda: model.encode(*inputs)) == ["net.convs.0", "net.convs.1", "net.last"]
    assert recorded(lambda: GATConv(F, 8)(*inputs)) == [None]


def test_the_file_of_a_log_has_the_names(inputs, tmp_path):
    with gnnaccel.enabled(log=str(tmp_path / "run.jsonl")):
        Net().encode(*inputs)
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines if line["direction"] == "forward"] == [
        "convs.0", "convs.1", "last"]


def test_rules_do_not_match_names_that_were_found(inputs):
    model = Net()
    recorded(lambda: model.encode(*inputs))
    assert "convs.1" not in names.known_names() and names.qualified_name(model.convs[1]) is None


def test_a_layer_held_twice_says_so_and_models_are_told_apart(inputs):
    model, other = Net(), Net()
    model.last = model.convs[1]
    with gnnaccel.enabled(), gnnaccel.report() as found:
        model.encode(*inputs)
        other.encode(*inputs)
    assert {entry.name for entry in found.entries} == {
        "convs.0", "convs.1 = last", "convs.0 #2", "convs.1", "last"}


def test_wrappers_are_left_out_of_names(inputs):
    model = Around()
    wrapped = torch.nn.DataParallel(model)
    assert recorded(lambda: wrapped(*inputs))[0] == "encoder.convs.0"


def several(model, inputs):
    for _ in range(3):
        model.encode(*inputs)


@pytest.mark.long
def test_nothing_is_looked_up_while_nobody_listens_and_nothing_is_kept_alive(inputs, monkeypatch):
    asked = []
    looked = names._derived
    monkeypatch.setattr(names, "_derived", lambda layer: asked.append(1) or looked(layer))
    model = Net()
    with gnnaccel.enabled():
        model.encode(*inputs)
    assert not asked
    before = len(names._found)
    recorded(functools.partial(several, model, inputs))
    assert len(asked) == 3 and len(names._found) == before + 3
    del model
    gc.collect()
    assert len(names._found) == before
