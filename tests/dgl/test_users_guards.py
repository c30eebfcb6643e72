"""What functions of users read is looked at again in each call, and what cannot be followed runs as
DGL runs it."""
from __future__ import annotations

import gc
import math
import subprocess
import sys
import weakref

import dgl
import dgl.function as fn
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric
from torch import nn

import gnnaccel
from tests.dgl import graphs
from tests.dgl.judge import close
from tests.dgl.test_users import with_bare
from tests.dgl.users import WIDTH

NUMBER = 1.0


def filled(graph: dgl.DGLGraph | None = None) -> dgl.DGLGraph:
    graph = with_bare() if graph is None else graph
    graph.ndata["h"] = torch.randn(graph.num_nodes(), WIDTH)
    graph.edata["w"] = torch.randn(graph.num_edges(), 1)
    return graph


def agrees(route, call, taken: bool | None = True) -> torch.Tensor:
    """``call()`` as with DGL alone; on the ``route`` if it is ``taken``, natively if it is not."""
    expected = call()
    gnnaccel.reset_stats()
    with route.on(on_fallback="native"):
        got = call()
    assert close(got, expected)
    found = {route for name, one in gnnaccel.stats().items() if name.endswith("_udf")
             for route in one["routes"]}
    assert taken is None or found == {route.backend if taken else "native"}, gnnaccel.stats()
    return got


def sums(graph, message, reduce=None):
    """What `update_all` gives, for `agrees`."""
    def call():
        with graph.local_scope():
            graph.update_all(message, reduce or fn.sum("m", "y"))
            return graph.ndata["y"]

    return call


# --- what is read ---------------------------------------------------------------------------------

class Reads:
    """No module."""

    def __init__(self):
        self.scale, self.row, self.map = 2.0, torch.randn(WIDTH), nn.Linear(WIDTH, 4)

    def scaled(self, x):
        return x * self.scale

    def message(self, edges):
        return {"m": F.silu(self.map(self.scaled(edges.src["h"]) + self.row)) * NUMBER}


@pytest.mark.long
def test_attributes_methods_and_numbers(emulated, monkeypatch):
    graph, layer = filled(), Reads()
    call = sums(graph, layer.message)
    seen = [agrees(emulated, call)]

    def changed():
        seen.append(agrees(emulated, call))
        assert not close(seen[-1], seen[-2])

    layer.scale = 3.0
    changed()
    layer.row = torch.randn(WIDTH)
    changed()
    layer.row.mul_(2)
    changed()
    with torch.no_grad():
        layer.map.weight.mul_(0.5)
    changed()
    layer.map = nn.Linear(WIDTH, 4)
    changed()
    layer.map.bias = None
    changed()
    monkeypatch.setitem(globals(), "NUMBER", 0.5)
    changed()
    monkeypatch.setattr(Reads, "scaled", lambda self, x: x + self.scale)
    changed()
    graph.ndata["h"] = torch.randn(graph.num_nodes(), WIDTH)
    changed()
    graph.edata["w"] = graph.edata["w"].repeat(1, 2)
    agrees(emulated, call)


def test_features_of_another_form(emulated):
    graph = filled()
    call = sums(graph, lambda edges: {"m": F.relu(edges.src["h"]) * edges.data["w"]})
    agrees(emulated, call)
    graph.ndata["h"] = torch.randn(graph.num_nodes(), 3, 5)
    graph.edata["w"] = torch.randn(graph.num_edges(), 3, 1)
    agrees(emulated, call)
    graph.ndata["h"], graph.edata["w"] = graph.ndata["h"].double(), graph.edata["w"].double()
    agrees(emulated, call, taken=False)  # kernels are written for fp32


@pytest.mark.long
def test_variables_around_it(emulated):
    graph = filled()

    def call(number, row, module):
        return sums(graph, lambda edges: {"m": module(edges.src["h"] * row) * number})

    row, module = torch.randn(WIDTH), nn.ReLU()
    first = agrees(emulated, call(1.0, row, module))
    assert close(agrees(emulated, call(2.0, row, module)), 2 * first)
    assert close(agrees(emulated, call(1.0, 3 * row, module)), 3 * first)
    assert not close(agrees(emulated, call(1.0, row, nn.Tanh())), first)
    agrees(emulated, call(1.0, torch.randn(1), module))
    agrees(emulated, call(1.0, torch.randn(graph.num_edges(), 1), module), taken=False)


@pytest.mark.long
def test_another_graph(emulated):
    layer = Reads()
    for graph in (filled(), filled(), filled(graphs.square(9, 30)), filled(graphs.square(9, 30))):
        agrees(emulated, sums(graph, layer.message))
    graph.add_edges([0, 0], [1, 1])
    agrees(emulated, sums(graph, layer.message))


def test_modules_that_are_watched(emulated):
    graph, layer = filled(), Reads()
    calls = []
    agrees(emulated, sums(graph, layer.message))
    handle = layer.map.register_forward_hook(lambda *args: calls.append(1))
    agrees(emulated, sums(graph, layer.message), taken=False)
    assert len(calls) == 2
    handle.remove()
    agrees(emulated, sums(graph, layer.message))


def test_dropout_draws_as_the_host(emulated):
    graph, drop = filled(), nn.Dropout(0.5)
    call = sums(graph, lambda edges: {"m": drop(edges.src["h"])})

    def seeded():
        torch.manual_seed(3)
        return call()

    agrees(emulated, seeded)
    drop.eval()
    agrees(emulated, seeded)


def test_nothing_outlives_the_object(emulated):
    graph, layer = filled(), Reads()
    agrees(emulated, sums(graph, layer.message))

    def held(module):
        return lambda edges: {"m": module(edges.src["h"])}

    agrees(emulated, sums(graph, held(layer.map)))
    gone = [weakref.ref(layer), weakref.ref(layer.map)]
    del layer
    gc.collect()
    assert [one() for one in gone] == [None, None]


# --- what is not followed -------------------------------------------------------------------------

def printed(edges):
    print("seen")
    return {"m": edges.src["h"]}


def branching(edges):
    return {"m": edges.src["h"] if edges.src["h"].sum() > 0 else -edges.src["h"]}


def of_ids(edges):
    return {"m": edges.src["h"] * edges.edges()[0].unsqueeze(1)}


def caught(edges):
    try:
        return {"m": edges.src["h"] * len(edges)}
    except TypeError:
        return {"m": edges.src["h"]}


def in_place(edges):
    edges.data["w"] *= 2
    return {"m": edges.src["h"] * edges.data["w"]}


def inner(edges):
    return {"m": torch.stack([edges.src["h"][:, k] for k in range(2)], 1)}


def helped(edges):
    return {"m": printed(edges)["m"]}


@pytest.mark.parametrize("message", [printed, branching, of_ids, caught, inner, helped])
def test_messages_that_are_the_hosts(emulated, message, capsys):
    graph = filled()
    agrees(emulated, sums(graph, message), taken=False)
    agrees(emulated, sums(graph, message), taken=False)
    assert gnnaccel.stats()["dgl.message_udf"]["reasons"] == {"GA211": 1}
    assert capsys.readouterr().out.count("seen") == (4 if message in (printed, helped) else 0)


def test_effects_happen_once_a_call(emulated):
    graph, log, count = filled(), [], 0

    def logs(edges):
        log.append(1)
        return {"m": edges.src["h"]}

    def counts(edges):
        nonlocal count
        count += 1
        return {"m": edges.src["h"]}

    agrees(emulated, sums(graph, logs), taken=False)
    agrees(emulated, sums(graph, counts), taken=False)
    assert len(log) == count == 2
    before = graph.edata["w"].clone()
    with emulated.on(on_fallback="native"):
        sums(graph, in_place)()
    assert torch.equal(graph.edata["w"], before * 2)


REDUCES = [lambda nodes: {"y": nodes.mailbox["m"].sum(1) * (nodes.mailbox["m"].shape[1] % 3)},
           lambda nodes: {"y": nodes.mailbox["m"].sum((1, 2), keepdim=True).squeeze(-1)},
           lambda nodes: {"y": nodes.mailbox["m"][:, 0]},
           lambda nodes: {"y": torch.std(nodes.mailbox["m"], 1, unbiased=False)},
           lambda nodes: {"y": nodes.mailbox["m"].sum(0)[:1].repeat(nodes.batch_size(), 1)},
           lambda nodes: {"y": torch.median(nodes.mailbox["m"], 1)[0]},
           lambda nodes: {"y": nodes.mailbox["m"].sort(1)[0].sum(1)},
           lambda nodes: {"y": F.normalize(nodes.mailbox["m"].sum(1), dim=0)},
           lambda nodes: {"y": (nodes.mailbox["m"] * nodes.data["h"]).sum(1)},
           lambda nodes: {"y": nodes.mailbox["m"].sum(1, True).sum(1)},
           lambda nodes: {"y": nodes.mailbox["m"][:, -1:].sum(1)},
           lambda nodes: {"y": F.dropout(nodes.mailbox["m"].sum(1, True), 0.0).squeeze(1)}]


@pytest.mark.parametrize("which", range(len(REDUCES)))
def test_reductions_that_are_the_hosts(emulated, which):
    ring = torch.arange(12)  # of one degree, so that one call has all nodes
    graph = filled(dgl.graph((ring, ring.roll(1))) if which > 7 else graphs.square(12, 40))
    agrees(emulated, sums(graph, fn.copy_u("h", "m"), REDUCES[which]), taken=False)


def test_a_message_that_is_the_hosts_with_a_reduction_that_is_not(emulated):
    graph = filled()
    agrees(emulated, sums(graph, of_ids, lambda nodes: {"y": nodes.mailbox["m"].mean(1)}), None)
    routes = {name: one["routes"] for name, one in gnnaccel.stats().items() if "udf" in name}
    assert routes == {"dgl.message_udf": {"native": 1}, "dgl.reduce_udf": {emulated.backend: 1}}


def test_errors_are_the_hosts(emulated):
    graph = filled()
    for message, error in ((lambda edges: {"m": edges.src["nothing"]}, KeyError),
                           (lambda edges: {"m": edges.src["h"] @ edges.src["h"]}, RuntimeError),
                           (lambda edges: {"other": edges.src["h"]}, KeyError)):
        with emulated.on(on_fallback="native"), pytest.raises(error):
            graph.update_all(message, fn.sum("m", "y"))


# --- the session ----------------------------------------------------------------------------------

def test_where_it_is_off(emulated):
    graph = filled()
    call = sums(graph, lambda edges: {"m": F.relu(edges.src["h"])})
    with emulated.on():
        call()
        gnnaccel.reset_stats()
        with gnnaccel.disabled():
            call()
        assert not gnnaccel.stats()
    from dgl import core
    assert not hasattr(core.message_passing, "__wrapped__")


@pytest.mark.long
def test_without_pyg():
    """What DGL shares with PyG's adapter asks for no PyG."""
    script = """
import sys
sys.modules["torch_geometric"] = None
import gnnaccel, torch, dgl, dgl.function as fn
graph = dgl.rand_graph(9, 30)
graph.ndata["h"] = torch.randn(9, 4)
def message(module):
    return lambda edges: {"m": module(edges.src["h"])}
with gnnaccel.enabled(backend="torch", when="supported", on_fallback="raise"):
    graph.update_all(message(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())),
                     lambda nodes: {"y": nodes.mailbox["m"].sum(1)})
print(gnnaccel.stats()["dgl.reduce_udf"]["routes"])
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "{'torch': 1}", ran.stderr


def test_a_softmax_is_made_once(emulated):
    graph = filled()

    def reduce(nodes):
        alpha = F.softmax(nodes.mailbox["w"], dim=1)
        return {"y": (alpha * nodes.mailbox["h"]).sum(1) + (alpha * alpha).sum(1)}

    agrees(emulated, sums(graph, lambda edges: {"h": edges.src["h"], "w": edges.data["w"]}, reduce))
    assert gnnaccel.stats()["dgl.edge_softmax"]["calls"] == 1


def test_on_a_cpu_mailboxes_alone_gain():
    graph = filled()
    with gnnaccel.enabled(records=9):
        got = sums(graph, lambda edges: {"m": F.relu(edges.src["h"])},
                   lambda nodes: {"y": nodes.mailbox["m"].sum(1)})()
        assert {k: v["routes"] for k, v in gnnaccel.stats().items()} == {
            "dgl.reduce_udf": {"torch": 1}, "dgl.gspmm": {"native": 1}}
        gnnaccel.reset_stats()
        sums(graph, lambda edges: {"m": F.relu(edges.src["h"])})()
        assert gnnaccel.stats()["dgl.message_udf"] == dict(calls=1, routes={"native": 1},
                                                           reasons={"GA301": 1})
    assert close(got, sums(graph, lambda edges: {"m": F.relu(edges.src["h"])})())


def test_maps_of_nodes_gain_on_a_cpu():
    """Where there are many more edges than nodes."""
    graph = filled(graphs.square(50, 5000))
    graph.ndata["h"], lin = torch.randn(50, 64), nn.Linear(128, 64)

    def call():
        graph.apply_edges(lambda edges: {"e": F.relu(lin(torch.cat([edges.src["h"],
                                                                    edges.dst["h"]], 1)))})
        return graph.edata["e"]

    expected = call()
    with gnnaccel.enabled():
        got = call()
    assert close(got, expected)
    assert gnnaccel.stats()["dgl.message_udf"]["routes"] == {"torch": 1}


def test_a_function_of_math_that_is_replaced_between_calls(route, monkeypatch):
    graph = filled()

    def call():
        graph.update_all(lambda edges: {"m": edges.src["h"] * math.sqrt(2.0)}, fn.sum("m", "y"))
        return graph.ndata["y"]

    before = agrees(route, call, taken=None)
    monkeypatch.setattr(math, "sqrt", lambda number: number)
    assert not close(agrees(route, call, taken=None), before)


@pytest.mark.parametrize("linear", [nn.Linear, torch_geometric.nn.Linear])
def test_a_weight_that_is_no_parameter(route, linear):
    """As a network gives it that makes the weights of another one."""
    graph, net = filled(), nn.Sequential(linear(2 * WIDTH, 5), nn.ReLU(), nn.Linear(5, 3))
    weight = net[0].weight.detach()
    del net[0].weight

    def call():
        graph.apply_edges(lambda edges: {"t": net(torch.cat([edges.src["h"], edges.dst["h"]], 1))})
        return graph.edata["t"]

    for factor in (1.0, 2.0, 1.0):
        net[0].weight = weight * factor
        agrees(route, call, taken=None)


def test_numbers_of_numpy(emulated):
    """What `np.sqrt` gives, in variables around functions, as public graph transformers have it."""
    def scaled(by):
        return lambda edges: {"m": by * edges.src["h"] * edges.data["w"] / by - edges.dst["h"]}

    graph = filled()
    for by in (np.sqrt(12.0), np.sqrt(3.0)):
        agrees(emulated, sums(graph, scaled(by)))
