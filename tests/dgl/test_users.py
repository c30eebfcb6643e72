"""Message and reduce functions that users write, against DGL's own way to run them."""
from __future__ import annotations

import dgl
import dgl.function as fn
import pytest
import torch
import torch.nn.functional as F

import gnnaccel
from tests.dgl import graphs, users
from tests.dgl.bridged import place  # noqa: F401  (a fixture)
from tests.dgl.judge import close, compare, on_routes
from tests.dgl.users import WIDTH, Layer


def with_bare(edges: int = graphs.E) -> dgl.DGLGraph:
    """A graph of which the last three nodes have no edges."""
    found = graphs.square(graphs.N - 3, edges)
    return dgl.graph(found.edges(), num_nodes=graphs.N)


def followed(**expected: str):
    """Whether the functions were taken over, by what they are counted as."""
    return lambda: all(set(gnnaccel.stats()[f"dgl.{name}"]["routes"]) == {route}
                       for name, route in expected.items())


@on_routes("layer", [*users.MESSAGES, *users.SUMS, *users.ATTENTION])
def test_values_and_gradients(route, layer):
    name = "message_udf" if layer in users.MESSAGES else "reduce_udf"
    compare(route, layer(), with_bare(), *users.arguments(layer),
            went=followed(**{name: route.backend}))


@on_routes("layer", [users.Summed, users.Beside, users.Maps, users.Attention])
@pytest.mark.parametrize("make", [graphs.bipartite, graphs.block])
def test_two_kinds_of_nodes(route, layer, make):
    graph = make()
    compare(route, layer(), graph, *users.arguments(layer, graph), went=lambda: True)


@pytest.mark.parametrize("route", ["torch", pytest.param("cuda", marks=pytest.mark.gpu)],
                         indirect=True)
@pytest.mark.parametrize("layer", users.EXTREMA)
def test_extrema(route, layer):
    compare(route, layer(), with_bare(), *users.arguments(layer), went=lambda: True)


@on_routes("reduce", [fn.max, fn.min])
def test_extrema_of_copies(route, reduce):
    """As DGL's own message would give them, with the gradient at the same edge."""
    class Extremum(Layer):
        def passed(self, graph):
            graph.update_all(lambda edges: {"m": edges.src["h"] * edges.data["w"]},
                             reduce("m", "y"))
            return graph.dstdata["y"]

    src, dst, edge = users.arguments(Layer)
    src[3] = src[4]
    compare(route, Extremum(), with_bare(), src.round(), dst, edge.sign(),
            went=followed(message_udf=route.backend))


@on_routes("layer", [users.Tutorial])
def test_the_attention_of_the_tutorial(route, layer):
    if route.name == "emulated":  # messages at the edges are torch's
        return
    compare(route, layer(), with_bare(), *users.arguments(layer),
            went=followed(message_udf="torch", reduce_udf=route.backend))


@on_routes("layer", [users.ScoresOfMaps, users.Predictor, users.Distances,
                    users.WritesAndReads])
def test_messages_that_torch_makes(route, layer):
    if route.name != "emulated":
        compare(route, layer(), with_bare(), *users.arguments(layer),
                went=followed(message_udf="torch"))


PAIRS = {"sum": lambda edges: {"e": edges.src["h"] + edges.dst["k"]},
         "difference": lambda edges: {"e": edges.dst["k"] - edges.src["h"]},
         "product": lambda edges: {"e": edges.data["w"] * edges.dst["k"]},
         "inner": lambda edges: {"e": (edges.dst["k"] * edges.src["h"]).sum(1, keepdim=True)},
         "copies": lambda edges: {"e": edges.src["h"], "f": edges.dst["k"] + edges.src["h"]}}


@on_routes("pair", list(PAIRS))
def test_messages_that_dgl_has_operations_for(route, pair):
    class Applied(Layer):
        def passed(self, graph):
            graph.apply_edges(PAIRS[pair])
            return tuple(graph.edata[name] for name in ("e", "f") if name in graph.edata)

    compare(route, Applied(), with_bare(), *users.arguments(Layer),
            went=followed(message_udf=route.backend))


@pytest.mark.long
@on_routes("edges", [[], [(3, 3)], [(3, 5), (3, 5), (3, 5), (5, 3)]])
def test_degenerate_graphs(route, edges):
    """No edges, a loop alone, duplicates; nodes without edges in each."""
    src, dst = torch.tensor(edges, dtype=torch.long).view(-1, 2).unbind(1)
    graph = dgl.graph((src, dst), num_nodes=graphs.N)
    for layer in (users.BothEnds, users.Summed, users.Beside, users.Attention):
        args = users.arguments(layer, graph)
        if edges:
            compare(route, layer(), graph, *args, went=lambda: True)
            continue
        graph.ndata["y"] = args[0]  # what a reduce function leaves as it is
        made = layer()
        expected = made(graph, *args)
        with route.on(on_fallback="native"):
            assert torch.equal(made(graph, *args), expected)


def test_nodes_without_edges(route):
    """They get zeros, also in place of what was there, or what an initializer gives."""
    graph, layer = with_bare().to(route.device), users.Beside().to(route.device)
    args = [t.to(route.device) for t in users.arguments(users.Beside)]
    graph.ndata["y"] = torch.ones(graphs.N, 4, device=route.device)
    with route.on():
        got = layer(graph, *args)
    assert not got[-3:].any() and close(got, layer(graph, *args))
    graph.set_n_initializer(lambda shape, dtype, ctx, ids: torch.full(
        shape, 7.0, dtype=dtype, device=ctx))
    with route.on(on_fallback="native"):
        got = layer(graph, *args)
    assert bool((got[-3:] == 7).all()) and close(got, layer(graph, *args))


def test_gradients_of_nodes_without_edges(route):
    """What would be made of their zeros, such as 0 / 0, does not reach parameters."""
    graph = with_bare().to(route.device)
    for result in ("host", "ours"):
        layer = users.Beside().to(route.device)
        with torch.no_grad():
            for p in layer.parameters():
                p.fill_(0.1)
        torch.manual_seed(0)
        args = [t.to(route.device) for t in users.arguments(users.Beside)]
        if result == "host":
            layer(graph, *args).sum().backward()
            expected = layer.map.weight.grad
        else:
            with route.on():
                layer(graph, *args).sum().backward()
    assert bool(expected.isfinite().all()) and close(layer.map.weight.grad, expected)


class ComparedMaps(Layer):
    """A map that is only compared, and one of the same features that is used."""

    EDGE = (WIDTH,)

    def __init__(self):
        super().__init__()
        self.bound, self.map = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def message(self, edges):
        k = edges.dst["k"]
        return {"m": torch.where(self.bound(k) < edges.data["w"], self.map(k), edges.src["h"])}

    def passed(self, graph):
        graph.update_all(self.message, fn.sum("m", "y"))
        return graph.dstdata["y"]


@on_routes("layer", [ComparedMaps])
def test_what_is_compared_and_used(route, layer):
    compare(route, layer(), with_bare(), *users.arguments(layer),
            went=followed(message_udf=route.backend))


class TruthBeside(Layer):
    """Truth values beside features."""

    EDGE = (WIDTH,)

    def __init__(self):
        super().__init__()
        self.map = torch.nn.Linear(2 * WIDTH, WIDTH)

    def passed(self, graph):
        graph.update_all(lambda edges: {"m": self.map(torch.cat(
            [edges.src["h"], edges.data["w"] > edges.dst["k"]], 1))}, fn.sum("m", "y"))
        return graph.dstdata["y"]


@on_routes("layer", [TruthBeside])
def test_truth_values_beside_features(route, layer):
    compare(route, layer(), with_bare(), *users.arguments(layer),
            went=followed(message_udf=route.backend))


def test_a_map_of_rows_of_several_dtypes():
    """Numbers that `torch.where` chooses are of the default dtype; DGL's own code maps them beside
    wider ones."""
    graph, layer = with_bare(), torch.nn.Linear(2 * WIDTH, 3).double()
    graph.ndata["h"] = torch.randn(graphs.N, WIDTH, dtype=torch.float64)

    def call():
        graph.update_all(lambda edges: {"m": layer(torch.cat(
            [edges.src["h"], torch.where(edges.dst["h"] > 0, 1.5, -0.5)], 1))}, fn.sum("m", "y"))
        return graph.ndata.pop("y")

    expected = call()
    with gnnaccel.enabled(when="supported"):
        assert close(call(), expected, 1e-10)


@pytest.mark.parametrize("message", [
    lambda edges: {"m": torch.cat([edges.src["a"], edges.dst["a"]], dim=-1)},
    lambda edges: {"m": torch.cat([edges.src["a"], edges.dst["a"] + len(edges)], dim=-1)}])
def test_messages_that_are_not_one_for_each_edge(message):
    """Of one dimension the last is that of the edges: DGL takes the first of so many."""
    graph = with_bare()
    graph.ndata["a"] = torch.randn(graphs.N)

    def call():
        graph.update_all(message, lambda nodes: {"y": nodes.mailbox["m"].sum(1)})
        return graph.ndata.pop("y")

    expected = call()
    with gnnaccel.enabled(when="supported"):
        assert close(call(), expected)


@pytest.mark.parametrize("layer", [users.Attention, users.Scored])
@pytest.mark.parametrize("when", ["profitable", "supported"])
def test_second_derivatives_of_attention(layer, when):
    """As torch's softmax of a mailbox has them; DGL's own softmax on a CPU has none."""
    graph, made = with_bare(), layer().double()
    inputs = [t.double().requires_grad_() for t in users.arguments(layer)]

    def seconds():
        firsts = torch.autograd.grad(made(graph, *inputs).square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(t.square().sum() for t in firsts), inputs)

    expected = seconds()
    with gnnaccel.enabled(when=when):
        got = seconds()
    assert set(gnnaccel.stats()["dgl.reduce_udf"]["routes"]) == {"torch"}
    assert all(close(a, b, 1e-9) for a, b in zip(got, expected))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_mailboxes_of_other_dtypes(dtype):
    graph, layer = with_bare(), users.Summed().to(dtype)
    args = [t.to(dtype) for t in users.arguments(users.Summed)]
    expected = layer(graph, *args)
    with gnnaccel.enabled():
        got = layer(graph, *args)
    assert gnnaccel.stats()["dgl.reduce_udf"]["routes"] == {"torch": 1}
    assert close(got, expected, 1e-10 if dtype == torch.float64 else 1e-2)


@pytest.mark.parametrize("layer", [users.Summed, users.Attention])
def test_mailboxes_of_float16_on_a_cpu(layer):
    """DGL's own code makes and reduces them by torch; its operations have no float16 there."""
    graph, made = with_bare(), layer().half()
    args = [t.half().requires_grad_() for t in users.arguments(layer)]
    expected = made(graph, *args)
    wanted = torch.autograd.grad(expected.sum(), args, allow_unused=True)
    with gnnaccel.enabled():
        got = made(graph, *args)
    assert set(gnnaccel.stats()["dgl.reduce_udf"]["reasons"]) == {"GA203"}
    assert torch.equal(got, expected)
    gradients = torch.autograd.grad(got.sum(), args, allow_unused=True)
    assert all(a is b or torch.equal(a, b) for a, b in zip(gradients, wanted))


# --- the ways to pass messages --------------------------------------------------------------------

def message(edges):
    return {"m": F.relu(edges.src["h"]) * edges.data["w"]}


def reduced(nodes):
    return {"y": nodes.mailbox["m"].sum(1)}


def applied(nodes):
    return {"y": nodes.data["y"] + nodes.data["k"], "z": nodes.data["y"] * 2}


WAYS = {"apply": lambda g, r: g.update_all(message, r, applied),
        "some edges": lambda g, r: g.send_and_recv([1, 5, 7, 5 + 7], message, r),
        "pull": lambda g, r: g.pull([3, 5], message, r),
        "push": lambda g, r: g.push([3, 5], message, r),
        "edges of a kind": lambda g, r: g.apply_edges(message, edges=[2, 3])}


@pytest.mark.parametrize("reduce", [fn.sum("m", "y"), reduced], ids=["sum", "function"])
@pytest.mark.parametrize("way", WAYS)
def test_ways(emulated, way, reduce):
    def results():
        graph = with_bare()
        torch.manual_seed(1)
        src, dst, edge = users.arguments(Layer)
        graph.ndata["h"], graph.ndata["k"], graph.edata["w"] = src, dst, edge
        WAYS[way](graph, reduce)
        return {**graph.ndata, **graph.edata}

    graph_seed = torch.get_rng_state()
    expected = results()
    torch.set_rng_state(graph_seed)
    with emulated.on(on_fallback="native"):
        got = results()
    assert got.keys() == expected.keys()
    assert all(close(got[name], expected[name]) for name in expected)
    if way == "apply":
        assert "cuda" in gnnaccel.stats()[f"dgl.{'reduce' if reduce is reduced else 'message'}_udf"
                                          ]["routes"]


def test_relations_of_a_heterograph(emulated):
    def results():
        torch.manual_seed(2)
        ends = [torch.randint(0, 9, (2, 30)) for _ in range(2)]
        graph = dgl.heterograph({("a", "x", "b"): tuple(ends[0]), ("b", "y", "b"): tuple(ends[1])},
                                num_nodes_dict={"a": 9, "b": 9})
        for kind in "ab":
            graph.nodes[kind].data["h"] = torch.randn(9, WIDTH)
        for kind in "xy":
            graph.edges[kind].data["w"] = torch.randn(30, 1)
        graph.update_all(message, reduced, etype="x")
        first = graph.nodes["b"].data["y"]
        graph.multi_update_all({"x": (message, fn.sum("m", "y")), "y": (message, reduced)}, "sum")
        return first, graph.nodes["b"].data["y"]

    expected = results()
    with emulated.on():
        got = results()
    assert all(map(close, got, expected))
    assert {name: one["routes"] for name, one in gnnaccel.stats().items() if "udf" in name} == {
        "dgl.message_udf": {"cuda": 1}, "dgl.reduce_udf": {"cuda": 2}}


def test_second_derivatives(route):
    """A backward that is itself recorded."""
    graph, layer = with_bare().to(route.device), users.Attention().to(route.device)
    args = [t.to(route.device).requires_grad_() for t in users.arguments(users.Attention)]

    def second():
        (grad,) = torch.autograd.grad(layer(graph, *args).pow(2).sum(), args[:1], create_graph=True)
        return torch.autograd.grad(grad.pow(2).sum(), args[0])[0]

    expected = second()
    with route.on():
        got = second()
    assert close(got, expected, 1e-4)


@pytest.mark.parametrize("layer", [users.Maps, users.Beside, users.Tutorial])
def test_on_a_dgl_without_cuda(place, layer):
    """Features on a GPU, the graph's structure on the CPU."""
    made, graph, args = layer(), with_bare(), users.arguments(layer)
    expected = made(graph, *args).detach()
    made, graph = made.to(place), graph.to(place)
    gnnaccel.reset_stats()
    got = made(graph, *(t.to(place) for t in args)).detach()
    assert close(got.cpu(), expected, 1e-4)


@pytest.mark.parametrize("reduce", [lambda nodes: {"y": nodes.mailbox["m"].max(1)[0]},
                                    lambda nodes: {"y": nodes.mailbox["m"].min(1)[0]}])
def test_equal_messages_of_a_mailbox(reduce):
    """On a CPU, by default: the first has the gradient, as with torch's functions."""
    graph = graphs.square()

    def gradient():
        w = torch.ones(graph.num_edges(), 2, requires_grad=True)
        graph.edata["w"] = w
        graph.update_all(fn.copy_e("w", "m"), reduce)
        return torch.autograd.grad(graph.ndata["y"].sum(), w)[0]

    expected = gradient()
    gnnaccel.enable()
    assert torch.equal(gradient(), expected)
    assert followed(reduce_udf="torch")()


class Asking(torch.nn.Module):
    """Goes another way by what a stand-in has otherwise than the module."""

    def __init__(self):
        super().__init__()
        self.sizes, self.factor = [3, 4], 2.0

    def message(self, edges):
        rows = torch.relu(edges.src["h"]) * edges.dst["h"]
        rows = rows * 3.0 if "factor" in self.__dict__ else rows
        return {"m": rows}

    def listed(self, edges):
        rows = torch.relu(edges.src["h"]) * edges.dst["h"]
        return {"m": rows * 3.0 if self.sizes == [3, 4] else rows}

    def forward(self, graph, x, way):
        with graph.local_scope():
            graph.ndata["h"] = x
            graph.update_all(getattr(self, way), fn.sum("m", "o"))
            return graph.ndata["o"]


@pytest.mark.parametrize("way", ["message", "listed"])
def test_functions_that_ask_their_module(emulated, way):
    layer, graph, x = Asking(), graphs.square(), graphs.features()
    for _ in range(2):
        expected = layer(graph, x, way)
        with emulated.on(on_fallback="native"):
            for _ in range(2):
                torch.testing.assert_close(layer(graph, x, way), expected)
        layer.sizes.append(5)
