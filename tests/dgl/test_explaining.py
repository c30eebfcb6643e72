"""explain(), compare() and report() on DGL's layers and single operations."""
from __future__ import annotations

import dgl
import pytest
import torch
from dgl.nn import (GATConv, GatedGCNConv, GINConv, GraphConv, HGTConv, RelGraphConv, SAGEConv,
                    TAGConv)

import gnnaccel
from gnnaccel.dispatch.run import attention
from gnnaccel.profile.compare import Comparer
from tests.dgl import graphs
from tests.dgl.graphs import F


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gat, self.plain = GATConv(F, 8, 2, feat_drop=0.2, attn_drop=0.5), TAGConv(16, 16)
        self.typed, self.hgt = RelGraphConv(16, 8, 3, "basis", 2), HGTConv(8, 4, 2, 1, 3)

    def forward(self, graph, x, types):
        x = self.plain(graph, self.gat(graph, x).flatten(1))
        x = self.typed(graph, x, types)
        return self.hgt(graph, x, torch.zeros(x.shape[0], dtype=torch.long, device=x.device), types)


@pytest.fixture
def inputs(route):
    graph = dgl.add_self_loop(graphs.square())
    types = torch.randint(0, 3, (graph.num_edges(),))
    return graph.to(route.device), graphs.features().to(route.device), types.to(route.device)


@pytest.fixture
def net(route):
    return Net().to(route.device)


@pytest.mark.long
def test_layers_and_operations_are_explained(route, net, inputs):
    with route.on(on_fallback="native"):
        found = gnnaccel.explain(net, *inputs)
    by_name = {one.name or one.layer: one for one in found.layers}
    assert {name: by_name[name].status for name in ("gat", "typed", "hgt", "plain")} == {
        "gat": "taken over", "typed": "taken over", "hgt": "taken over", "plain": "not recognised"}
    assert "operation by operation" in by_name["plain"].note and "dgl.gspmm" in by_name
    typed = {one.name: one.status for one in found.layers if one.layer == "TypedLinear"}
    assert typed.pop("typed.linear_r") == "inside another" and set(typed.values()) <= {"taken over", "inside another"}


def test_layers_agree_with_the_host(route, net, inputs):
    with route.on(on_fallback="native"):
        found = gnnaccel.compare(net, *inputs)
    assert {one.name for one in found.layers} >= {"gat", "typed", "hgt"}
    assert {one.verdict for one in found.layers} == {"same"}, str(found)
    assert {"out", "grad input [0][1]", "grad attn_l"} <= {e.name for e in found.layers[0].errors}
    assert "dropout is off" in found.layers[0].notes[0]


@pytest.mark.long
def test_comparing_counts_and_records_nothing(route, net, inputs):
    with route.on(on_fallback="native", records=1000):
        net(*inputs)
        counts, records = gnnaccel.stats(), len(gnnaccel.records())
        gnnaccel.reset_stats()
        gnnaccel.clear_records()
        with Comparer():
            net(*inputs)
        assert gnnaccel.stats() == counts and len(gnnaccel.records()) == records


@pytest.mark.long
def test_a_wrong_backend_is_caught(net, inputs, monkeypatch):
    native = attention.run_torch
    monkeypatch.setattr(attention, "run_torch", lambda call, tensors: native(call, tensors) * 1.001)
    with gnnaccel.enabled(backend="torch", when="supported"):
        found = gnnaccel.compare(net, *inputs)
        assert found.layers[0].verdict == "mismatch"
        gnnaccel.reset_stats()
        net(*inputs)
        assert gnnaccel.stats()["GATConv"]["reasons"] == {"GA101": 1}


def test_operations_are_measured_by_themselves(route, net, inputs):
    with route.on(on_fallback="native"), gnnaccel.report() as found:
        net(*inputs).sum().backward()
    entries = {entry.layer: entry for entry in found.entries}
    assert entries["dgl.gspmm"].calls >= 1 and entries["dgl.gspmm"].backwards >= 1
    assert entries["GATConv"].route == route.backend and entries["GATConv"].backward_ms > 0


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.graph, self.sage = GraphConv(F, 8), SAGEConv(8, 8, "mean")
        self.gin, self.gated = GINConv(torch.nn.Linear(8, 8),
                                       "max"), GatedGCNConv(8, 8, 8, 0.0, batch_norm=False)

    def forward(self, graph, x, edges):
        for layer in (self.graph, self.sage, self.gin):
            x = layer(graph, x)
        return self.gated(graph, x, edges)[0]


def test_plain_layers(route):
    graph = dgl.add_self_loop(graphs.square()).to(route.device)
    inputs = graph, graphs.features().to(route.device), torch.randn(graph.num_edges(), 8,
                                                                    device=route.device)
    net = Plain().to(route.device)
    names = ["graph", "sage", "gin", "gated"]
    with route.on(on_fallback="native", records=100):
        explained = gnnaccel.explain(net, *inputs)
        assert not gnnaccel.stats() and not gnnaccel.records()
        compared = gnnaccel.compare(net, *inputs)
        with gnnaccel.report() as measured:
            net(*inputs).sum().backward()
        programs = [str(gnnaccel.explain_program(layer, *inputs[:2]))
                    for layer in (net.graph, net.sage, net.gin)]
    assert [one.name for one in explained.layers] == names
    assert all((one.status, one.route) == ("taken over", route.backend) for one in explained.layers)
    assert [(one.name, one.verdict)
            for one in compared.layers] == [(name, "same") for name in names], str(compared)
    assert all("out" in {e.name.partition("[")[0] for e in one.errors} for one in compared.layers)
    found = {entry.name: entry for entry in measured.entries}
    assert sorted(found) == sorted(names)
    assert all(e.route == route.backend and e.calls == e.backwards == 1 and e.forward_ms > 0
               for e in found.values())
    assert found["graph"].moved > 0
    for text, words in zip(programs, ("sum of", "sum of", "max")):
        assert words in text and "as stated" in text, text
