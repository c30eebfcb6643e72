"""Reduce functions that read how many edges a node has off their mailbox, against DGL's own way,
which runs them once for each degree."""
from __future__ import annotations

import math

import dgl
import dgl.function as fn
import pytest
import torch
import torch.nn.functional as F

import gnnaccel
from tests.dgl import graphs, users
from tests.dgl.bridged import place  # noqa: F401  (a fixture)
from tests.dgl.degree_users import LAYERS, PNA, Deviation, InMailbox
from tests.dgl.judge import compare, on_routes
from tests.dgl.test_users import with_bare
from tests.dgl.test_users_guards import agrees, filled, sums
from tests.dgl.users import WIDTH


def by_no_function_of_the_users() -> bool:
    """Whether the reduce function ran for no mailbox."""
    return "native" not in gnnaccel.stats()["dgl.reduce_udf"]["routes"]


def of_few_edges() -> dgl.DGLGraph:
    """Nodes with none, one, two and many edges, some of them alike."""
    src = torch.tensor([0, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1])
    dst = torch.tensor([3, 4, 5, 5, 6, 6, 7, 7, 7, 8, 8, 8, 8, 8])
    return dgl.graph((src, dst), num_nodes=graphs.N)


@on_routes("layer", list(LAYERS))
@pytest.mark.parametrize("make", [with_bare, of_few_edges, graphs.block])
def test_values_and_gradients(route, layer, make):
    graph = make()
    compare(route, layer(), graph, *users.arguments(layer, graph), went=by_no_function_of_the_users)


@pytest.mark.parametrize("layer", [PNA, InMailbox])
def test_on_a_dgl_without_cuda(place, layer):
    made, graph, args = layer(), with_bare(), users.arguments(layer)
    expected = made(graph, *args).detach()
    got = made.to(place)(graph.to(place), *(t.to(place) for t in args)).detach()
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_one_edge_has_no_deviation(route):
    """To the last bit, so that no gradient is rounding."""
    ring = torch.arange(80)
    layer, graph = Deviation(1e-5), dgl.graph((ring, ring.roll(1)))
    x, k, w = [t.requires_grad_() for t in users.arguments(Deviation, graph)]
    with route.on():
        out = layer(graph, x, k, w)
        out.sum().backward()
    assert out.equal(torch.full_like(out, 1e-5).sqrt())
    assert not any(t.grad.any() for t in (x, k, *layer.parameters()))


# --- degrees are those of the graph of the call ---------------------------------------------------

def scaled(nodes):
    m = nodes.mailbox["m"]
    return {"y": m.sum(1) * math.log(m.shape[1] + 1) + nodes.data["h"] / m.size(1)}


def weighed(edges):
    return {"m": torch.tanh(edges.src["h"]) * edges.data["w"]}


@pytest.mark.long
def test_graphs_of_equal_sizes(route):
    """What was found out over one graph is used over the others."""
    seen = [agrees(route, sums(filled(make()), weighed, scaled))
            for make in (with_bare, with_bare, of_few_edges, of_few_edges)]
    assert len({tuple(one.flatten().tolist()) for one in seen}) == 4


def test_degrees_over_equal_features(route):
    """Only the edges differ between the calls, not the numbers of nodes or edges."""
    x, found = torch.rand(6, WIDTH), []
    for dst in ([0, 0, 0, 1, 2], [0, 1, 2, 3, 4], [5, 5, 5, 5, 5]):
        graph = filled(dgl.graph(([0, 1, 2, 3, 4], dst), num_nodes=6))
        graph.ndata["h"], graph.edata["w"] = x, torch.ones(5, 1)
        found.append(agrees(route, sums(graph, weighed, scaled)))
        assert not found[-1][graph.in_degrees() == 0].any()
    assert not torch.equal(found[0], found[1])


@pytest.mark.long
def test_an_edited_graph(route):
    graph = filled()
    agrees(route, sums(graph, weighed, scaled))
    graph.add_edges([0, 0, 1], [1, 1, graphs.N - 1])
    agrees(route, sums(graph, weighed, scaled))
    graph.remove_edges([0, 5, 7])
    agrees(route, sums(graph, weighed, scaled))
    graph.add_nodes(2)
    agrees(route, sums(graph, weighed, scaled))
    graph.ndata["h"].mul_(-2.0)
    graph.edata["w"].add_(1.0)
    agrees(route, sums(graph, weighed, scaled))
    with torch.no_grad():
        agrees(route, sums(graph, weighed, scaled))


def test_a_reversed_graph(route):
    graph = filled()
    agrees(route, sums(graph, weighed, scaled))
    agrees(route, sums(graph.reverse(copy_edata=True), weighed, scaled))
    agrees(route, sums(graph, weighed, scaled))


def test_nodes_that_no_edge_enters(route):
    """They get zeros."""
    graph = filled(dgl.graph((torch.arange(4), torch.ones(4).long()), num_nodes=7))
    got = agrees(route, sums(graph, weighed, scaled))
    assert got[1].all() and not got[torch.arange(7) != 1].any()


def test_a_graph_without_edges(route):
    """DGL leaves the features of the nodes as they were."""
    graph = filled(dgl.graph(([], []), num_nodes=7))
    graph.ndata["y"] = torch.randn(7, 3)
    got = agrees(route, sums(graph, weighed, scaled), taken=False)
    assert torch.equal(got, graph.ndata["y"])


def test_an_initializer(route):
    graph = filled()
    graph.set_n_initializer(lambda shape, dtype, ctx, ids: torch.ones(shape, dtype=dtype))
    assert (agrees(route, sums(graph, weighed, scaled), taken=None)[-1] == 1).all()


def test_several_relations(route):
    graph = dgl.heterograph({
        ("u", "likes", "i"): (torch.tensor([0, 1, 2, 2]), torch.tensor([0, 0, 1, 3])),
        ("u", "sees", "i"): (torch.tensor([3, 1, 0]), torch.tensor([1, 1, 1])),
        ("i", "of", "u"): (torch.tensor([0, 1]), torch.tensor([0, 0]))},
        num_nodes_dict={"u": 4, "i": 5})
    for kind in graph.ntypes:
        graph.nodes[kind].data["h"] = torch.randn(graph.num_nodes(kind), WIDTH)
    for kind in graph.etypes:
        graph.edges[kind].data["w"] = torch.randn(graph.num_edges(kind), 1)

    def call():
        with graph.local_scope():
            graph.multi_update_all(dict.fromkeys(("likes", "sees"), (weighed, scaled)), "sum")
            graph.update_all(weighed, scaled, etype="of")
            return torch.cat([graph.nodes["i"].data["y"], graph.nodes["u"].data["y"]])

    agrees(route, call)


def test_double_precision(route):
    graph = filled()
    graph.ndata["h"], graph.edata["w"] = graph.ndata["h"].double(), graph.edata["w"].double()
    call = sums(graph, weighed, scaled)
    expected = call()
    with route.on(on_fallback="native"):
        got = call()
    torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-14)


def largest(nodes):
    return {"y": nodes.mailbox["m"].max(1)[0]}


@pytest.mark.long
def test_mailboxes_of_one_degree_are_the_hosts_on_a_cpu():
    """DGL calls the function once, where five reductions over all edges take longer; of one or two
    this is not so, but of a maximum with its gradient, which takes as long as three."""
    ring = torch.arange(50)
    regular = dgl.graph((ring.repeat(3), torch.cat([ring.roll(k) for k in (1, 2, 5)])))
    layer = PNA().requires_grad_(False)
    for graph, function, goes in ((with_bare(), layer.reduce_func, "torch"),
                                  (regular, layer.reduce_func, "native"),
                                  (regular, scaled, "torch"), (with_bare(), largest, "torch"),
                                  (regular, largest, "native")):
        graph = filled(graph)
        graph.edata["e"], graph.ndata["k"] = torch.randn(graph.num_edges(), 4), graph.ndata["h"]
        call = sums(graph, layer.message_func if function == layer.reduce_func else weighed,
                    function)
        expected = call()
        for _ in range(3):
            gnnaccel.reset_stats()
            with gnnaccel.enabled(), torch.set_grad_enabled(function is largest):
                got = call()
            torch.testing.assert_close(got, expected)
            assert set(gnnaccel.stats()["dgl.reduce_udf"]["routes"]) == {goes}


# --- what is read is compared ---------------------------------------------------------------------

def twice(m, d):
    return m.sum(1) * (2.0 / d)


def by_function(nodes):
    return {"y": twice(nodes.mailbox["m"], nodes.mailbox["m"].shape[1])}


def test_functions_that_are_replaced_between_calls(route, monkeypatch):
    graph = filled()
    call = sums(graph, weighed, by_function)
    first = agrees(route, call)
    monkeypatch.setitem(globals(), "twice", lambda m, d: m.sum(1) * d)
    second = agrees(route, call)
    assert not torch.equal(first, second)
    call = sums(graph, weighed, scaled)
    first = agrees(route, call)
    monkeypatch.setattr(math, "log", lambda number: math.sqrt(number))
    assert not torch.equal(agrees(route, call, taken=None), first)


@pytest.mark.long
def test_averages_and_functions_of_the_layer(route):
    graph, layer = filled(), PNA().requires_grad_(False)
    graph.edata["e"], graph.ndata["k"] = torch.randn(graph.num_edges(), 4), graph.ndata["h"]
    call = sums(graph, layer.message_func, layer.reduce_func)
    seen = [agrees(route, call)]
    layer.avg_d["log"] = 0.4
    seen.append(agrees(route, call))
    layer.avg_d["log"] = torch.tensor(0.9)
    seen.append(agrees(route, call))
    layer.avg_d["log"].mul_(2.0)
    seen.append(agrees(route, call))
    layer.aggregators[1] = layer.aggregators[0]
    seen.append(agrees(route, call))
    layer.scalers.pop()
    seen.append(agrees(route, call))
    assert all(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(seen, seen[1:]))


# --- what is not followed -------------------------------------------------------------------------

def _only(function):
    return lambda nodes: {"y": function(nodes.mailbox["m"], nodes.mailbox["m"].shape[1])}


@pytest.mark.parametrize("function", [
    lambda m, d: m.sum(1) if d > 2 else m.mean(1),
    lambda m, d: m.sum(1) * max(d, 2),
    lambda m, d: m.sum(1) * float(d),
    lambda m, d: m.sum(1) * (d % 2),
    lambda m, d: m.sum(1) * (d // 2),
    lambda m, d: m.sum(1) + sum(1.0 for _ in range(d)),
    lambda m, d: m.reshape(m.shape[0], d * m.shape[2])[:, :1],
    lambda m, d: m.sum(1) / m.shape[0],
    lambda m, d: m.sum(1) * len(m[0]),
    lambda m, d: F.leaky_relu(m.sum(1), d),
    lambda m, d: m.sum(1).clamp(max=d),
    lambda m, d: torch.add(m.sum(1), m.sum(1), alpha=d)])
def test_sizes_that_are_the_hosts(emulated, function):
    agrees(emulated, sums(filled(), fn.copy_u("h", "m"), _only(function)), taken=False)


@pytest.mark.parametrize("function, error", [
    (lambda m, d: m.sum(1) / (1 / (d - 1)), ZeroDivisionError),
    (lambda m, d: m.sum(1) * math.log(d - 1), ValueError),
    (lambda m, d: m.sum(1) * (d - 1) ** -1, ZeroDivisionError),
    (lambda m, d: m.sum(1) * math.sqrt(1 - d), ValueError)])
def test_errors_of_numbers_are_pythons(emulated, function, error):
    graph = filled(of_few_edges())
    with emulated.on(on_fallback="native"), pytest.raises(error):
        sums(graph, fn.copy_u("h", "m"), _only(function))()


@pytest.mark.parametrize("function", [
    lambda m, d: m.sum(1) * (d - 1),
    lambda m, d: m.sum(1) / (d + 0.5) ** 2,
    lambda m, d: m.sum(1) * math.log1p(math.log(d)) - d,
    lambda m, d: (3 - d) * m.mean(1) * (-d / 2) + d,
    lambda m, d: d / (m.sum(1) ** 2 + d),
    lambda m, d: torch.mul(m.sum(1), 1 / (d * d)),
    lambda m, d: (m * d).sum(1)])
def test_numbers_that_raise_no_error(emulated, function):
    graph = filled(of_few_edges())
    agrees(emulated, sums(graph, fn.copy_u("h", "m"), _only(function)))
