"""One graph in many calls: the structure cache as layers see it, and nothing that grows."""
from __future__ import annotations

import gc

import pytest
import torch

import gnnaccel
from gnnaccel.dispatch.graph import cache
from gnnaccel.dispatch.plan import planner
from tests import probes
from tests.pyg import graphs
from tests.pyg.graphs import N
from tests.pyg.judge import close, took
from tests.pyg.layers import NAMES, build

STEPS = 1000


def counts() -> tuple[int, int]:
    found = cache.info()
    return found["hits"], found["misses"]


@pytest.mark.long
def test_layers_share_a_graph(route, inputs):
    layers = [build(name, device=route.device) for name in ("GATConv", "GATv2Conv", "AGNNConv")]
    x, ei = inputs
    with route.on():
        for layer in layers:
            layer(x, ei)
        assert counts() == (2, 1) and cache.info()["entries"] == 1
        build("TransformerConv", device=route.device)(x, ei)  # adds no loops: another structure
        assert counts() == (2, 2)
    assert cache.info()["bytes"] > 0
    del ei, inputs
    gc.collect()


def test_an_entry_goes_with_its_tensor(route):
    layer, x = build("GATConv", device=route.device), graphs.features().to(route.device)
    ei = graphs.square().to(route.device)
    with route.on():
        out = layer(x.requires_grad_(), ei)
        del ei
        assert cache.info()["entries"] == 0
        out.sum().backward()  # what the backward needs lives on
    assert torch.isfinite(x.grad).all() and x.grad.abs().sum() > 0


@pytest.mark.parametrize("name", NAMES)
def test_edges_edited_in_place(route, inputs, name):
    layer, (x, ei) = build(name, device=route.device).eval(), inputs
    with route.on():
        layer(x, ei)
        for _ in range(3):
            ei[:, :40] = torch.randint(0, N, (2, 40), device=ei.device)
            got = layer(x, ei)
            with gnnaccel.disabled():
                assert close(got, layer(x, ei))
        assert counts()[1] == 4 and cache.info()["entries"] == 1


def test_edits_between_forward_and_backward(route, inputs):
    layer, (x, ei) = build("GATConv", dropout=0.0, edge_dim=None, device=route.device), inputs
    expected, = torch.autograd.grad(layer(x.requires_grad_(), ei.clone()).pow(2).sum(), x)
    with route.on():
        out = layer(x, ei)
        ei.zero_()
    assert close(torch.autograd.grad(out.pow(2).sum(), x)[0], expected)


def test_views_of_one_tensor(route):
    layer, x = build("GATConv", device=route.device), graphs.features().to(route.device)
    whole = torch.cat([graphs.square(), graphs.square()], dim=1).to(route.device)
    with route.on():
        for view in (whole[:, :graphs.E], whole[:, graphs.E:], whole, whole.flip(0), whole[:, ::2],
                     whole[:, 1::2]):
            got = layer(x, view)
            with gnnaccel.disabled():
                assert close(got, layer(x, view))
        layer(x, whole[:, :graphs.E])
    assert counts()[0] == 1


def test_aliases_of_one_tensor(route, inputs):
    """Checkpoints hand detached aliases to the layer; a structure of another order would give them
    another dropout."""
    layer, (x, ei) = build("GATConv", device=route.device), inputs
    with route.on():
        expected = layer(x, ei)
        assert torch.equal(layer(x, ei.detach()),
                           expected) and torch.equal(layer(x, ei.view(2, -1)), expected)
        assert counts() == (2, 1)
        ei.detach()[0, 0] += 1
        layer(x, ei)
    assert counts() == (2, 2), "an edit through an alias is seen"


def test_a_graph_of_more_nodes(route, inputs):
    """The same edges over other numbers of nodes, and with other loops, are other structures."""
    _, ei = inputs
    with route.on():
        for nodes in (N, N + 5, N + 1):
            for loops in (True, False):
                layer = build("GATConv", add_self_loops=loops, device=route.device)
                x = graphs.features(nodes).to(route.device)
                got = layer(x, ei)
                with gnnaccel.disabled():
                    assert close(got, layer(x, ei))
    assert counts() == (0, 6)


def test_a_small_limit_only_costs_time(route):
    layer, x = build("GATv2Conv", device=route.device), graphs.features().to(route.device)
    batches = [graphs.square().to(route.device) for _ in range(4)]
    cache.set_limit(1)
    try:
        with route.on():
            for _ in range(2):
                for ei in batches:
                    got = layer(x, ei)
                    with gnnaccel.disabled():
                        assert close(got, layer(x, ei))
        assert cache.info()["evictions"] >= 3 and cache.info()["entries"] <= 2
    finally:
        cache.set_limit(None)


# ---- nothing grows ----

def population() -> dict[str, int]:
    gc.collect()
    found: dict[str, int] = {}
    for thing in gc.get_objects():
        kind = type(thing)  # not isinstance, which runs the code of lazy modules
        if str(kind.__module__).startswith("gnnaccel") or issubclass(kind, torch.Tensor):
            found[kind.__name__] = found.get(kind.__name__, 0) + 1
    return found


def held() -> dict[str, int]:
    """Everything that could grow: our objects and tensors, the tables we keep, bytes on the GPU."""
    memory = (torch.cuda.memory_allocated() if torch.cuda.is_available()
              and torch.cuda.is_initialized() else 0)
    return {**population(), **probes.kept(), "objects": len(gc.get_objects()) // 200,
            "gpu": memory // 4096}


def grown(before: dict, after: dict, slack: int = 8) -> dict:
    """What grew by more than a few; both runs below take forty steps or more between the two."""
    return {key: (before.get(key, 0), n) for key, n in after.items()
            if n > before.get(key, 0) + slack}


@pytest.mark.parametrize("listening", [False, True])
@pytest.mark.long
def test_a_long_run_of_fresh_graphs(route, listening):
    """Mini-batches: sizes vary, every edge_index is new."""
    layer = build("GATConv", dropout=0.3, device=route.device)
    steps = STEPS // 4 if listening or route.name == "emulated" else STEPS

    def step(i: int) -> None:
        nodes = 10 + i % 7
        x = torch.randn(nodes, graphs.F, device=route.device, requires_grad=True)
        layer.zero_grad()
        layer(x, torch.randint(0, nodes, (2, 30 + i % 11), device=route.device)).sum().backward()

    with route.on(**(dict(records=10) if listening else {})):
        for i in range(120):
            step(i)
        before = held()
        for i in range(steps):
            step(i)
        after = held()
    took(route, 120 + steps)
    assert not grown(before, after), grown(before, after)
    assert cache.info()["entries"] == 0 == cache.info()["bytes"]


@pytest.mark.long
def test_layers_that_come_and_go_leave_nothing(route, inputs):
    x, ei = inputs
    with route.on():
        for i in range(60):
            # naming changes what rules may say, so plans are made anew; the memo has a limit of its
            # own
            planner.forget()
            if i == 20:
                before = held()
            layer = build("GATConv", device=route.device)
            gnnaccel.name_layers(torch.nn.ModuleDict({"conv": layer}))
            layer(x, ei).sum().backward()
            del layer
        after = held()
    assert not grown(before, after), grown(before, after)
