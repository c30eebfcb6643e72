"""Calls of propagate that repeat, records and rules, and the classes whose propagate is
replaced."""
from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.nn import (GENConv, GINEConv, MaxAggregation, MessagePassing,
                                ResGatedGraphConv, SumAggregation)

import gnnaccel
from gnnaccel.dispatch.observe import records
from gnnaccel.dispatch.policy import rules
from tests.pyg import aggregating_layers, edge_layers, graphs
from tests.pyg.generated_calls import arguments
from tests.pyg.graphs import E, F, N
from tests.pyg.judge import close
from tests.pyg.own_layers import Copying, Inherited, Updating, Weighing, hooked


def follows(route, calls, **options) -> None:
    """``calls``: gives layers and arguments, each after a change. All in one block, since what is
    remembered in one is not asked in another."""
    with route.on(**options):
        for layer, *args in calls:
            with gnnaccel.disabled():
                expected = layer(*args)
            for _ in range(2):
                assert close(layer(*args), expected)


def test_repeated_calls_follow_changes(route):
    """The short way, with everything that may change between calls changed."""
    layer, x, ei = Weighing(), graphs.features().to(route.device), graphs.square().to(route.device)
    w = torch.randn(E).to(route.device)

    def calls():
        yield layer, x, ei, w
        yield layer, x, ei
        yield layer, x[:, :5], ei, w
        yield layer, x.clone(), ei, w.clone()
        ei[0, 0], ei[1, 0] = 1, 2
        yield layer, x, ei, w
        yield layer, torch.cat([x, x]), ei, w
        layer.aggr_module = Weighing(aggr="mean").aggr_module
        yield layer, x, ei, w
        layer.flow = "target_to_source"
        yield layer, x, ei, w

    follows(route, calls())


def test_repeated_calls_follow_what_has_no_other_name(route):
    """What stays the same object, of the same shape, and yet means something else."""
    layer, x, ei = Weighing(), graphs.features().to(route.device), graphs.square().to(route.device)
    w = torch.rand(E).to(route.device)

    def calls():
        yield layer, x, ei, w
        yield layer, torch._neg_view(x), ei, w
        yield layer, x, ei, w
        yield layer, x, ei, torch._neg_view(w)
        yield Weighing(), x, ei, torch._neg_view(w)
        layer.aggr_module.__class__ = MaxAggregation
        yield layer, x, ei, w
        layer.aggr_module.__class__ = SumAggregation
        yield layer, x, ei, w
        layer.__class__ = type("Doubling", (Weighing,), {"message": doubled})
        yield layer, x, ei, w

    follows(route, calls(), on_fallback="native")


def doubled(self, x_j, edge_weight):
    return 2 * edge_weight.view(-1, 1) * x_j


def test_what_a_stock_message_reads_of_its_layer_is_noticed(route):
    x, ei, e = route.put(graphs.features(), graphs.square(), torch.randn(E, F))
    narrow = e[:, :4].contiguous()

    def calls():
        layer = GINEConv(torch.nn.Identity(), edge_dim=None).to(route.device)
        yield layer, x, ei, e
        for _ in range(2):
            layer.lin = torch.nn.Linear(4, F).to(route.device)
            yield layer, x, ei, narrow
        layer = GENConv(F, F, aggr="add", norm="layer").to(route.device)
        yield layer, x, ei, e
        layer.eps = 2.0
        yield layer, x, ei, e
        yield layer, x, ei, None
        layer = ResGatedGraphConv(F, 5, edge_dim=4).to(route.device)
        yield layer, x, ei, narrow
        layer.lin_key.weight.data.mul_(2)
        yield layer, x, ei, narrow

    follows(route, calls())


def test_what_is_an_error_in_the_host_stays_its_own(route):
    x, ei = graphs.features().to(route.device), graphs.square().to(route.device)
    wide, narrow = torch.randn(E, 7).to(route.device), graphs.edge_features().to(route.device)
    for layer, e in ((GINEConv(torch.nn.Linear(F, F)), wide),
                     (GINEConv(torch.nn.Linear(F, F)), None),
                     (ResGatedGraphConv(F, 5, edge_dim=4), wide),
                     (ResGatedGraphConv(F, 5), narrow)):
        layer, said = layer.to(route.device), []
        for block in (contextlib.nullcontext, lambda: route.on(on_fallback="native")):
            with block(), pytest.raises(Exception) as problem:
                layer(x, ei, e)
            said.append((type(problem.value), str(problem.value)))
        assert said[0] == said[1]


def test_what_edges_bring_is_computed_once(route):
    """Also where the call stays native in the end."""
    calls = []
    layer = GINEConv(torch.nn.Linear(F, 3), edge_dim=4)
    layer.lin.register_forward_hook(lambda *_: calls.append(1))
    x, ei, e = torch.randn(500, F), torch.randint(0, 500, (2, 30000)), torch.randn(30000, 4)
    with gnnaccel.enabled():
        layer(x, ei, e)
    assert route.backend == "cuda" or gnnaccel.stats()["GINEConv"]["routes"] == {"native": 1}
    assert len(calls) == 1
    given = [t.to(route.device)
             for t in (graphs.features(), graphs.square(), graphs.edge_features())]
    layer.to(route.device)
    with route.on():
        for _ in range(2):
            layer(*given)
    assert len(calls) == 3


def test_a_replaced_message_is_noticed(route, monkeypatch):
    layer, x, ei = Copying(), graphs.features().to(route.device), graphs.square().to(route.device)
    with route.on(on_fallback="native"):
        for _ in range(2):
            layer(x, ei)
        monkeypatch.setattr(Copying, "message", lambda self, x_j: 2 * x_j)
        assert close(layer(x, ei), 2 * Inherited()(x, ei))


def test_hooks_registered_later(route):
    layer, x, ei = Copying(), graphs.features().to(route.device), graphs.square().to(route.device)
    with route.on(on_fallback="native"):
        for _ in range(3):
            before = layer(x, ei)
        hooked(layer)
        assert close(layer(x, ei), 2 * before)


def test_the_structure_may_go(route):
    from gnnaccel.dispatch.graph import cache

    layer, x, ei = Copying(), graphs.features().to(route.device), graphs.square().to(route.device)
    expected = layer(x, ei)
    with route.on():
        for _ in range(3):
            assert close(layer(x, ei), expected)
            cache.clear()


def test_graphs_are_not_kept_alive(route):
    import gc
    import weakref

    layer, x = Copying(), graphs.features().to(route.device)
    ei = graphs.square().to(route.device)
    gone = weakref.ref(ei)
    with route.on():
        for _ in range(3):
            layer(x, ei)
    del ei
    gc.collect()
    assert gone() is None


def test_records(route):
    layer, x, ei = Weighing(), graphs.features().to(route.device), graphs.square().to(route.device)
    with route.on(records=8):
        for _ in range(2):
            layer(x.clone().requires_grad_(), ei).sum().backward()
    first, backward, again, _ = gnnaccel.records()
    for record in gnnaccel.records():
        records.validate(record)
    assert (first["layer"], first["host"], first["route"],
            first["dtype"]) == ("Weighing", "pyg", route.backend, "float32")
    assert first["graph"] == dict(num_src=N, num_dst=N, num_edges=E)
    assert (first["cache"], again["cache"]) == ("miss", "hit")
    assert (backward["direction"], backward["forward_call"]) == ("backward", first["call"])


def test_small_calls_go_native_without_a_look():
    layer, x, ei = Weighing(), graphs.features(), graphs.square()
    expected = layer(x, ei)
    with gnnaccel.enabled():
        assert torch.equal(layer(x, ei), expected)
    assert gnnaccel.stats() == {"Weighing": dict(calls=1, routes={"native": 1},
                                                 reasons={"GA301": 1})}


def test_a_graph_that_comes_again_is_taken_over_in_time():
    """Natively at first, then on our way, and at once where one call pays for all."""
    ei = torch.randint(0, 3000, (2, 15000))
    layer, x = Weighing(), torch.randn(3000, 16)
    expected = layer(x, ei)
    with gnnaccel.enabled():
        for _ in range(60):
            assert close(layer(x, ei), expected)
    routes = gnnaccel.stats()["Weighing"]["routes"]
    assert 5 < routes["native"] < 55 and routes["torch"] == 60 - routes["native"]
    gnnaccel.reset_stats()
    with gnnaccel.enabled():
        for _ in range(3):
            layer(x, ei.clone())
    assert gnnaccel.stats()["Weighing"]["routes"] == {"native": 3}


def test_checkpoints_find_the_same_route(route):
    from torch.utils.checkpoint import checkpoint

    layer, ei = Weighing(), graphs.square().to(route.device)
    for options in ({}, {"when": "profitable", "on_fallback": "native"}):
        x = graphs.features().to(route.device).requires_grad_()
        layer(x, ei).pow(2).sum().backward()
        expected, x.grad = x.grad, None
        with route.on(**options):
            for _ in range(3):
                x.grad = None
                checkpoint(layer, x, ei, use_reentrant=False).pow(2).sum().backward()
                assert close(x.grad, expected)


# ---- classes, copies, rules ----

def test_layers_are_as_before(route):
    layer, x, ei = route.put(Updating(), graphs.features(), graphs.square())
    expected = layer(x, ei)
    with route.on():
        clones = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
        assert all(close(clone(x, ei), expected) for clone in clones)
        assert "propagate" not in layer.__dict__


def test_classes_are_restored():
    Weighing(), Inherited()
    before = {cls: dict(vars(cls)) for cls in (MessagePassing, Weighing, Inherited)}
    with gnnaccel.enabled():
        assert vars(Weighing)["propagate"].__wrapped__ is before[Weighing]["propagate"]
        assert Weighing.propagate.__module__ == before[Weighing]["propagate"].__module__

        class Later(Weighing):
            pass

        native = MessagePassing.propagate
        Later()
        kept = vars(Later)["_orig_propagate"], vars(Later)["_jinja_propagate"]
        assert Later.propagate.routed and not any(getattr(function, "routed", False)
                                                  for function in kept)
        assert MessagePassing.propagate is native
    assert before == {cls: dict(vars(cls)) for cls in before}
    assert not hasattr(Later.propagate,
                       "routed") and vars(Later)["propagate"] is vars(Later)["_jinja_propagate"]
    with gnnaccel.enabled():
        assert Later.propagate.routed
    Later()(graphs.features(), graphs.square())


def test_classes_whose_propagate_pyg_cannot_write(route):
    """Without source text PyG falls back to the general one."""
    space = {"MessagePassing": MessagePassing}
    exec("class Typed(MessagePassing):\n"
         "    def forward(self, x, edge_index):\n        return self.propagate(edge_index, x=x)\n"
         "    def message(self, x_j):\n        return x_j\n", space)
    x, ei = graphs.features().to(route.device), graphs.square().to(route.device)
    with route.on():
        layer = space["Typed"]()
        assert close(layer(x, ei), Inherited()(x, ei))
    assert space["Typed"].propagate is MessagePassing.propagate and "propagate" not in vars(
        space["Typed"])


def test_a_propagate_of_the_users_is_left_alone():
    class Own(Weighing):
        def propagate(self, edge_index, size=None, **kwargs):
            return kwargs["x"] * 5

    with gnnaccel.enabled(when="supported"):
        x = graphs.features()
        assert torch.equal(Own()(x, graphs.square()), x * 5)
    assert not gnnaccel.stats() and not hasattr(Own.propagate, "routed")


@pytest.mark.long
def test_rules(route):
    layer, x, ei = Weighing(), graphs.features().to(route.device), graphs.square().to(route.device)
    for target in (Weighing, layer, "inner"):
        gnnaccel.reset_stats()
        rules.reset_rules()
        if target == "inner":
            gnnaccel.name_layers(torch.nn.ModuleDict({"inner": layer}))
        with route.on():
            layer(x, ei)
            gnnaccel.exclude(target)
            layer(x, ei)
            gnnaccel.include(target)
            layer(x, ei)
        assert gnnaccel.stats()["Weighing"] == dict(calls=3, routes={route.backend: 2, "native": 1},
                                                    reasons={"GA101": 1})
    gnnaccel.reset_stats()
    with route.on(include=["GATConv"]):
        Weighing()(x, ei)
    assert gnnaccel.stats()["Weighing"]["routes"] == {"native": 1}
    with gnnaccel.disabled(), route.on():
        layer(x, ei)
    with route.on(exclude=["GCNConv"]):  # a known name
        layer(x, ei)
    gnnaccel.reset_stats()
    with route.on(), gnnaccel.disabled():
        layer(x, ei)
    assert not gnnaccel.stats()


@pytest.mark.gpu
def test_captured_graphs(gpu):
    layer, x, ei = Weighing(), torch.randn(N, F, device=gpu.device), graphs.square().to(gpu.device)
    expected = layer(x, ei)
    with gpu.on():
        for _ in range(3):
            layer(x, ei)
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = layer(x, ei)
    out.zero_()
    captured.replay()
    assert close(out, expected)


def test_a_propagate_that_its_user_puts_back_is_no_error():
    """PyG writes the class's ``propagate`` anew at the next instantiation, and ours goes around
    that one."""
    class Own(MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

    with gnnaccel.enabled():
        layer = Own()
        assert Own.propagate.routed
        for _ in range(2):
            Own.propagate = Own._orig_propagate
            assert not getattr(Own.propagate, "routed", False)
            Own()
            assert Own.propagate.routed
        x, ei = graphs.features(), graphs.square()
        assert torch.equal(layer(x, ei), Own()(x, ei))
    assert vars(Own)["propagate"] is Own._jinja_propagate


def test_classes_are_left_alone_when_a_session_is_over():
    with gnnaccel.enabled():
        kept = MessagePassing._set_jittable_templates

    class Own(Copying):
        _set_jittable_templates = kept

    Own()
    assert not hasattr(Own.propagate, "routed")


class Operations(TorchDispatchMode):
    """Notes the operations that run, as those who count them do."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", [edge_layers.Keeps, edge_layers.Deep, aggregating_layers.Quotient])
def test_whoever_looks_at_operations_sees_the_hosts(route, form):
    """Not what a message does on stand-ins, while it is found out what it computes; the next call
    does not suffer from it."""
    args = [one.to(route.device) for one in arguments(form)]
    layer = form().to(route.device)
    found = []
    for block in (gnnaccel.disabled(), route.on(on_fallback="native")):
        with block, Operations() as operations:
            layer(*args)
        found.append(operations.seen)
    assert found[0] == found[1]
    if route.backend == "cuda":
        assert set(gnnaccel.stats()[form.__name__]["reasons"]) == {"GA405"}
    with route.on(on_fallback="native"):
        traced = torch.jit.trace(layer, tuple(args), check_trace=False)
        assert len(list(traced(*args))) == len(list(layer(*args)))
    if route.backend == "cuda":
        assert gnnaccel.stats()[form.__name__]["routes"]["cuda"] == 1
