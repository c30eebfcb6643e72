"""report(lines=True): time by the line that calls a layer."""
from __future__ import annotations

import sys

import pytest
import torch
from torch_geometric.nn import GATConv, HeteroConv

import gnnaccel
from gnnaccel import __main__ as front
from gnnaccel.profile.report import Report
from tests.pyg import graphs
from tests.pyg.graphs import F


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = GATConv(F, 8), GATConv(8, 8, aggr="mean")

    def forward(self, x, edge_index):
        x = self.first(x, edge_index)
        return self.last(x, edge_index)  # the last


def test_time_is_added_up_by_the_line_that_calls():
    net, inputs = Net(), (graphs.features(), graphs.square())
    with gnnaccel.enabled(when="supported"), gnnaccel.report(lines=True) as found:
        for _ in range(3):
            net(*inputs).sum().backward()
    text = str(found)
    lines = {one["source"]: one for one in found.lines.as_dicts()}
    assert set(lines) == {"x = self.first(x, edge_index)",
                          "return self.last(x, edge_index)  # the last"}
    first = lines["x = self.first(x, edge_index)"]
    assert (first["calls"], first["routes"], first["layers"]) == (3, {"torch": 3}, {"first": 3})
    assert first["file"] == __file__ and f"test_lines.py:{first['line']}" in text
    entries = {entry.name: entry for entry in found.entries}
    assert first["ms"] == pytest.approx(entries["first"].total_ms)
    assert "test_lines.py" not in str(gnnaccel.report())


def test_layers_inside_others_count_with_them():
    edges = {("a", "to", "a"): graphs.square(), ("a", "too", "a"): graphs.square()}
    net = HeteroConv({key: GATConv(F, 8) for key in edges})
    with gnnaccel.enabled(exclude=["HeteroConv"]), gnnaccel.report(lines=True) as found:
        net({"a": graphs.features()}, edges)
    (line,) = found.lines.as_dicts()
    assert (line["calls"], line["layers"]) == (1, {"HeteroConv #1": 1})


def test_without_being_asked_nothing_is_looked_up():
    assert Report().lines is None


def test_lines_alone_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    assert front.main(["--lines", "x.py"]) == 2
    assert "add --profile" in capsys.readouterr().err
