"""What a report advises: from what it measured of a model, and from entries made by hand."""
from __future__ import annotations

import html

import pytest
import torch
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

import gnnaccel
from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.policy.reasons import KINDS
from gnnaccel.profile import advice
from gnnaccel.profile.advice import CHANGING, Advice, changes_model, marked
from gnnaccel.profile.entries import Entry
from gnnaccel.profile.page import page
from gnnaccel.profile.report import Report
from gnnaccel.profile.shadow import Shadow
from tests.pyg import graphs
from tests.pyg.graphs import F


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = GCNConv(F, 8)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


def measured(edges) -> Report:
    net, x = Net(), graphs.features()
    with gnnaccel.enabled(), gnnaccel.report() as found:
        for edge_index in edges:
            net(x, edge_index).sum().backward()
    return found


def does(report: Report) -> str:
    return "\n".join(map(str, report.advice()))


def test_edges_that_are_new_each_step_are_named():
    edges = graphs.square()
    found = measured([edges.clone() for _ in range(6)])
    assert "edge_index is new each step in conv (6 of 6 calls" in does(found)
    assert "make edge_index once" in str(found) and "graphs come once" not in str(found)
    assert "edge_index is new" not in does(measured([edges] * 6))


def test_writing_into_the_edges_makes_them_new():
    edges = graphs.square()

    def written():
        for _ in range(6):
            edges.copy_(edges.clone())
            yield edges

    assert "edge_index is new each step" in does(measured(written()))


def test_graphs_that_come_once_are_named_and_marked():
    edges = graphs.square()
    found = measured([edges[:, i:].clone() for i in range(6)])
    assert "graphs come once in conv (6 of 6 calls)" in does(found)
    assert "edge_index is new" not in does(found)
    assert next(one for one in found.advice() if "come once" in one.seen).changes


def test_hints_that_change_the_model_are_marked():
    net, inputs = GATConv(F, 8, aggr="mean"), (graphs.features(), graphs.square())
    with gnnaccel.enabled(), gnnaccel.report() as found:
        net(*inputs).sum().backward()
    said = "use aggr='add' if the model allows it (changes the model)"
    assert said in str(found)
    text = html.unescape(page(found))
    assert said in text
    assert "changes the model" in text.partition("Time in layers")[0]
    sage = SAGEConv(F, 8)
    gnnaccel.exclude(sage)
    with gnnaccel.enabled(), gnnaccel.report() as found:
        sage(*inputs)
    assert "GA101" in does(found) and "changes the model" not in str(found)


def test_codes_that_change_the_model_are_registered():
    assert set(KINDS) >= CHANGING
    assert changes_model("GA208", "use concat=True") and not changes_model("GA208", "see docs/x")
    assert marked("GA401", "run on a GPU") == "run on a GPU"


def report_of(*entries: Entry, seconds: float = 0.01) -> Report:
    report = Report()
    report._entries = {(i,): one for i, one in enumerate(entries)}
    report.wall_s = seconds
    return report


def entry(name="a", **fields) -> Entry:
    return Entry("GATConv", name, **{**dict(route="cuda", kernel="k", calls=10, timed=10,
                                            forward_ms=5.0), **fields})


def test_layers_slower_than_native_by_estimate_or_by_measurement():
    found = report_of(entry(cost_us=300.0, native_us=100.0), entry("b", cost_us=1.0, native_us=2.0),
                      entry("c", route="native", kernel=None, cost_us=3.0, native_us=2.0))
    assert [one.ms for one in found.advice()] == [pytest.approx(2.0)]
    assert "leave a native" in does(found) and "300 µs a call, the host's own code at 100 µs" in does(
        found)
    found = report_of(entry())
    found.comparison.layers = [Shadow("GATConv", "d", "cuda", "k", "same", native_ms=1.0,
                                      ours_ms=2.0),
                               Shadow("GATConv", "e", "cuda", "k", "same", native_ms=2.0,
                                      ours_ms=1.0)]
    assert "d (GATConv) took 2 ms by k" in does(found) and "e (GATConv)" not in does(found)


def test_estimates_of_the_hosts_own_code_are_in_records():
    net = GATConv(F, 8)
    with gnnaccel.enabled(when="supported", records=10), gnnaccel.report() as found:
        for _ in range(2):
            net(graphs.features(), graphs.square())
    taken = [one for one in gnnaccel.records() if one["route"] != "native"]
    assert taken and all(one["native_us"] > 0 for one in taken)
    assert found.entries[0].native_us == taken[-1]["native_us"]


def test_compiling_at_first_use(monkeypatch):
    monkeypatch.setattr(driver, "compile_seconds", lambda: (0.0, 0))
    found = report_of(entry(), seconds=10.0)
    found._compiled = (3.0, 7)
    assert "7 kernels were compiled or loaded at first use, which took 3.0 of 10.0 s" in does(found)
    found._compiled = (0.3, 7)
    assert "7 kernels" not in does(found)


def test_time_outside_of_layers_is_said_last():
    found = report_of(entry(forward_ms=100.0), seconds=1.0)
    assert "layers take 10% of the time" in found.advice()[-1].seen
    assert not report_of(entry(forward_ms=900.0), seconds=1.0).advice()


def test_the_first_three_are_shown_worst_first(monkeypatch):
    found = report_of(entry())
    many = [Advice(f"do {i}", "seen", ms=float(i)) for i in range(5)]
    monkeypatch.setattr(advice, "_native", lambda fallbacks: many)
    text, shown = str(found), page(found)
    assert " 1. do 4: seen\n 2. do 3: seen\n 3. do 2: seen\n" in text and "do 1" not in text
    assert shown.index("do 4") < shown.index("do 2") < shown.index("Time in layers")
    assert "do 1" not in shown and len(found.advice()) == 5
    assert many[4].as_dict() == dict(do="do 4", seen="seen", changes=False, ms=4.0)
