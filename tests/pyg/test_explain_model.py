"""explain(): what it finds in a model, and that the model does not notice."""
from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch_geometric.nn import (GATConv, GATv2Conv, GCNConv, GINConv, HeteroConv,
                                MessagePassing, PNAConv, RGCNConv, SAGEConv, SGConv, TAGConv)

import gnnaccel
from gnnaccel.dispatch.graph import ledger
from gnnaccel.dispatch.observe import watch
from tests.pyg import graphs
from tests.pyg.graphs import E, F, N
from tests.pyg.own_layers import Copying


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Tables that fold nothing, wherever the tests run."""
    monkeypatch.setenv("COLUMNS", "200")


class Own(MessagePassing):
    def forward(self, x, edge_index):  # no message passing that anybody could see
        return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])


class Changed(GATConv):
    def message(self, x_j, alpha):
        return 2 * super().message(x_j, alpha).floor()


class Net(torch.nn.Module):
    """A layer of each kind: taken over, excluded, unknown of the host's and of one's own, changed,
    relational, never called."""

    def __init__(self):
        super().__init__()
        self.gat = GATConv(F, 8, 2, dropout=0.5)
        self.norm = torch.nn.BatchNorm1d(16)
        self.left_out = GATv2Conv(16, 16)
        self.simple = SGConv(16, 16, cached=True)
        self.own = Own()
        self.changed = Changed(16, 16)
        self.rgcn = RGCNConv(16, 4, 3)
        self.idle = GATConv(4, 4)

    def forward(self, x, edge_index, edge_type):
        x = self.left_out(self.norm(self.gat(x, edge_index)), edge_index)
        return self.rgcn(self.changed(self.own(self.simple(x, edge_index), edge_index), edge_index),
                         edge_index, edge_type)


@pytest.fixture
def net():
    return Net()


@pytest.fixture
def inputs():
    return graphs.features(), graphs.square(), torch.randint(0, 3, (E,))


def explained(route, net, inputs, **options):
    net, inputs = net.to(route.device), [t.to(route.device) for t in inputs]
    with route.on(on_fallback="native"):
        return {one.name: one for one in gnnaccel.explain(net, *inputs, **options).layers}


def test_every_layer_is_named_with_what_would_become_of_it(route, net, inputs):
    gnnaccel.exclude(net.left_out)
    found = explained(route, net, inputs)
    assert {name: one.status for name, one in found.items()} == {
        "gat": "taken over", "left_out": "native", "changed": "native", "rgcn": "taken over",
        "simple": "taken over",
        "own": "not recognised", "idle": "not called"}
    assert {found["gat"].route, found["rgcn"].route} == {route.backend} and found["gat"].kernel
    assert found["gat"].graph["num_edges"] == E and found["gat"].calls == 1


def test_reasons_have_code_text_and_what_would_change_it(route, net, inputs):
    gnnaccel.exclude(net.left_out)
    found = explained(route, net, inputs)
    excluded, changed = found["left_out"].reasons[0], found["changed"].reasons[0]
    assert excluded["code"] == "GA101" and "include" in excluded[
        "hint"] and "GATv2Conv" in excluded["text"]
    assert changed["code"] == "GA211" and "message" in changed["text"] and changed["hint"]
    assert "did not propagate" in found["own"].note and found["own"].layer == "Own"


def test_the_table_says_it_all(net, inputs):
    text = str(gnnaccel.explain(net, *inputs))
    for words in ("gat (GATConv)", "not recognised", "not called", "GA205", "known are AGNNConv"):
        assert words in text
    assert [d["name"]
            for d in gnnaccel.explain(net, *inputs).as_dicts()][:3] == ["gat", "left_out", "simple"]


def test_names_are_not_taken_for_markup(inputs):
    net = torch.nn.Module()
    net.add_module("[bold]x[", GATConv(F, 4))
    net.forward = lambda x, edge_index, _: net._modules["[bold]x["](x, edge_index)
    assert "[bold]x[ (GATConv)" in str(gnnaccel.explain(net, *inputs))


@pytest.mark.long
def test_model_and_random_numbers_are_untouched(route, net, inputs):
    net.to(route.device)
    inputs = [t.to(route.device) for t in inputs]
    before = copy.deepcopy(net.state_dict())
    state = {k: (v, v._version) for k, v in (*net.named_buffers(), *net.named_parameters())}
    attributes = [(module, dict(module.__dict__)) for module in net.modules()]
    torch_state, python_state, numpy_state = (torch.get_rng_state(), random.getstate(),
                                              np.random.get_state()[1].copy())
    with route.on(on_fallback="native", records=100):
        gnnaccel.explain(net, *inputs, measure=True)
        assert gnnaccel.records() == []
    assert gnnaccel.stats() == {} and not watch._watchers
    assert torch.equal(torch.get_rng_state(), torch_state) and random.getstate() == python_state
    assert (np.random.get_state()[1] == numpy_state).all()
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    for k, v in (*net.named_buffers(), *net.named_parameters()):
        assert v is state[k][0] and v._version == state[k][1] and v.grad is None
    for module, own in attributes:
        assert module.__dict__.keys() == own.keys() and all(module.__dict__[k] is v
                                                            for k, v in own.items())
    assert net.training and net.simple._cached_x is None


def test_what_the_model_raises_comes_through_and_leaves_it_untouched(net, inputs):
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(IndexError):
        gnnaccel.explain(net, *inputs[:2], inputs[2][:-1])
    assert all(torch.equal(v, before[k])
               for k, v in net.state_dict().items()) and not watch._watchers


@pytest.mark.long
def test_measuring_gives_times_of_what_is_taken_over(route, net, inputs):
    found = explained(route, net, inputs, measure=True)
    assert found["gat"].measured_ms > 0 and found["gat"].measured_native_ms > 0
    assert found["changed"].measured_ms is None


class Floored(MessagePassing):
    """A message of no form that is recognised."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j.floor()


class Plain(torch.nn.Module):
    """Layers without an adapter of their own, next to one that has one."""

    def __init__(self):
        super().__init__()
        self.gcn, self.sage, self.gin = GCNConv(F,
                                                8), SAGEConv(8, 8,
                                                             "mean"), GINConv(torch.nn.Linear(8, 8))
        self.pna = PNAConv(8, 8, ["mean", "std"], ["identity"], torch.tensor([1, 3, 5]))
        self.hops, self.own, self.lonely = TAGConv(8, 8, 3), Copying(), Floored()
        self.idle = GCNConv(4, 4)

    def forward(self, x, edge_index, _):
        for layer in (self.gcn, self.sage, self.gin, self.pna, self.hops, self.own, self.lonely):
            x = layer(x, edge_index)
        return x


def test_message_passing_without_an_adapter_is_a_layer_like_others(route, inputs):
    net = Plain()
    gnnaccel.exclude(net.sage)
    found = explained(route, net, inputs, measure=True)
    assert {name: (one.status, one.route, one.calls) for name, one in found.items()} == {
        **dict.fromkeys(("gcn", "gin", "pna", "own"), ("taken over", route.backend, 1)),
        "hops": ("taken over", route.backend, 3), "sage": ("native", "native", 1),
        "lonely": ("native", "native", 1),
        "idle": ("not called", "native", 0)}
    assert found["sage"].reasons[0]["code"] == "GA101" and found["lonely"].reasons[0][
        "code"] == "GA211"
    taken = [one for one in found.values() if one.route != "native"]
    assert all(one.kernel and one.measured_ms > 0 and one.graph["num_edges"] >= E for one in taken)


def test_estimates_and_the_first_call_over_a_new_graph():
    net, inputs = Plain(), (torch.randn(20000, F), torch.randint(0, 20000, (2, 100_000)), None)
    with gnnaccel.enabled():
        found = {one.name: one for one in gnnaccel.explain(net, *inputs).layers}
        again = {one.name: one for one in gnnaccel.explain(net, *inputs).layers}
    for one in (found["gcn"], found["own"]):
        assert one.status == "taken over" and 0 < one.estimated_ms < one.estimated_native_ms
        assert "first call over a new graph goes to native" in one.note
    assert {name: one.route
            for name, one in found.items()} == {name: one.route for name, one in again.items()}
    assert gnnaccel.stats() == {}
    assert not any(one.seconds or one.sightings for one in ledger.ledgers.values())


def test_a_layer_called_twice_counts_twice(inputs):
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = GATConv(F, F)

        def forward(self, x, edge_index, _):
            return self.conv(self.conv(x, edge_index), edge_index)

    with gnnaccel.enabled(when="supported"):
        found = gnnaccel.explain(Twice(), *inputs).layers
    assert [(one.name, one.calls) for one in found] == [("conv", 2)]


def test_layers_inside_one_that_is_taken_over(route):
    edges = {("a", "to", "b"): graphs.bipartite(N, 20), ("b", "back", "a"): graphs.bipartite(20, N)}
    net = HeteroConv({key: SAGEConv((-1, -1), 8) for key in edges})
    x = {"a": graphs.features(), "b": graphs.features(20)}
    with pytest.raises(ValueError, match="not initialised yet.*Call the model once"):
        gnnaccel.explain(net, x, edges)
    net(x, edges)
    net.to(route.device)
    x, edges = ({k: v.to(route.device) for k, v in d.items()} for d in (x, edges))
    with route.on(on_fallback="native"):
        found = gnnaccel.explain(net, x, edges).layers
    assert [(one.layer, one.status) for one in found] == [("HeteroConv", "taken over")]
    with gnnaccel.enabled(exclude=["HeteroConv"]):
        found = gnnaccel.explain(net, x, edges).layers
    assert [(one.layer, one.status) for one in found][0] == ("HeteroConv", "native")
    assert [one.layer for one in found].count("SAGEConv") == 2


def test_switched_off_by_the_environment(net, inputs, monkeypatch):
    monkeypatch.setenv("GNNACCEL", "0")
    assert "switched off by the environment" in str(gnnaccel.explain(net, *inputs))


@pytest.mark.parametrize("ask", [gnnaccel.explain, gnnaccel.compare])
def test_what_is_no_model_is_refused(ask):
    with pytest.raises(TypeError, match="model is 3 of type int; pass the torch.nn.Module"):
        ask(3)
