"""What functions of users do besides computing, and which rows reach gradients, is as with DGL
alone."""
from __future__ import annotations

import dgl
import dgl.function as fn
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gnnaccel
from tests.dgl.judge import close
from tests.dgl.test_users_guards import agrees, sums
from tests.dgl.users import WIDTH


def apart() -> dgl.DGLGraph:
    """No edge leaves the last node, or enters it."""
    graph = dgl.graph((torch.randint(0, 11, (60,)), torch.randint(0, 11, (60,))), num_nodes=12)
    graph.ndata["h"] = torch.rand(12, WIDTH) + 0.5
    graph.edata["w"] = torch.randn(60, WIDTH)
    return graph


def test_dropout_in_the_order_of_the_message(emulated):
    def message(edges):
        first, second = F.dropout(edges.src["h"], 0.5), F.dropout(edges.dst["h"], 0.3)
        F.dropout(edges.src["h"], 0.2)
        return {"m": second * 2 + first}

    call = sums(apart(), message)

    def seeded():
        torch.manual_seed(3)
        return torch.cat([call().flatten(), torch.get_rng_state().float()])

    agrees(emulated, seeded)


class Dropped(nn.Module):
    """Attention with dropout of its weights in the mailbox, by a function or a module."""

    def __init__(self, p: float, module: bool):
        super().__init__()
        self.p, self.drop, self.module = p, nn.Dropout(p), module

    def reduce(self, nodes):
        alpha = F.softmax(nodes.mailbox["e"], dim=1)
        alpha = self.drop(alpha) if self.module else F.dropout(alpha, self.p, self.training)
        return {"o": torch.sum(alpha * nodes.mailbox["m"], dim=1)}

    def forward(self, graph, x):
        with graph.local_scope():
            graph.ndata["x"] = x
            graph.update_all(lambda edges: {"m": edges.src["x"], "e": edges.data["w"]}, self.reduce)
            return graph.ndata["o"]


@pytest.mark.parametrize("module", [True, False])
@pytest.mark.parametrize("p, train", [(0.0, True), (0.6, False)])
def test_dropout_in_a_mailbox_that_drops_nothing(emulated, p, train, module):
    graph, layer = apart(), Dropped(p, module).train(train)
    x = graph.ndata["h"].clone().requires_grad_()

    def call():
        out = layer(graph, x)
        return torch.cat([out, torch.autograd.grad(out.sin().sum(), x)[0]])

    agrees(emulated, call)


@pytest.mark.long
@pytest.mark.parametrize("module", [True, False])
def test_dropout_in_a_mailbox(emulated, module):
    """Each edge's weight is dropped or kept, the same forward and backward, anew in each call."""
    graph, layer = apart(), Dropped(0.4, module)
    x, ones = graph.ndata["h"].clone().requires_grad_(), torch.ones(12, WIDTH)
    expected, total, draws = layer.eval()(graph, ones)[:11], 0.0, []
    layer.train()
    with emulated.on():
        for _ in range(400):
            total = total + layer(graph, ones)[:11]
        for _ in range(2):
            out = layer(graph, x)
            grad, = torch.autograd.grad(out.sum(), x)
            torch.testing.assert_close((grad * x).sum(), out.sum())
            draws.append(out)
    assert not torch.equal(*draws)
    torch.testing.assert_close(total / 400, expected, rtol=0, atol=0.25)


@pytest.mark.parametrize("row", [0.0, float("nan"), float("inf")])
def test_rows_that_no_edge_reads_reach_no_gradient(route, row):
    graph, lin = apart(), nn.Linear(WIDTH, WIDTH)
    graph.ndata["h"][-1] = row

    def call():
        graph.ndata["x"] = graph.ndata["h"].clone().requires_grad_()
        out = sums(graph, lambda edges: {
            "m": torch.tanh(lin(edges.src["x"].log())) * edges.dst["x"]})()
        grads = torch.autograd.grad(out.square().sum(), [graph.ndata["x"], *lin.parameters()])
        return torch.cat([out.flatten(), *(g.flatten() for g in grads)])

    assert call()[-lin.weight.numel():].isfinite().all()
    agrees(route, call)


@pytest.mark.parametrize("formats", ["coo", ["coo", "csr"]])
def test_without_a_csc_nodes_get_their_own_messages(route, formats):
    """DGL takes a node's messages from edges of others there, so the numbers are torch's."""
    graph = apart()
    src, dst = graph.edges()
    x, w = graph.ndata["h"], graph.edata["w"]
    expected = torch.zeros(12, WIDTH).index_add(0, dst, x[src].tanh() * w)
    restricted = graph.formats(formats)
    with route.on():
        restricted.update_all(lambda edges: {"m": torch.tanh(edges.src["h"]) * edges.data["w"]},
                              lambda nodes: {"o": nodes.mailbox["m"].sum(1)})
    assert restricted.formats()["created"] == ["coo"]
    torch.testing.assert_close(restricted.ndata["o"], expected)


def test_softmax_without_a_csc(route):
    """DGL's own softmax on a CPU cannot run there, but its mailboxes can."""
    graph = apart()

    def call(graph):
        x = graph.ndata["h"].clone().requires_grad_()
        graph.ndata["x"] = x
        out = sums(graph, lambda edges: {"m": edges.src["x"] * edges.data["w"]},
                   lambda nodes: {"y": (F.softmax(nodes.mailbox["m"], 1)
                                        * nodes.mailbox["m"]).sum(1)})()
        return [out, *torch.autograd.grad(out.square().sum(), [x])]

    expected, restricted = call(graph), graph.formats("coo")
    with route.on():
        got = call(restricted)
    assert restricted.formats()["created"] == ["coo"]
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("form", ["csc", "csr"])
def test_a_graph_without_ids_of_edges(form):
    """DGL's own sums on a CPU raise an error there, or their gradients; its mailboxes do not."""
    graph = dgl.graph(dgl.rand_graph(40, 1500).edges())
    graph = dgl.graph((form, (*graph.adj_tensors(form)[:2], [])))
    graph.ndata["h"] = torch.randn(40, WIDTH, requires_grad=True)
    graph.edata["w"] = torch.randn(1500, WIDTH)

    def call():
        out = sums(graph, lambda edges: {"m": edges.src["h"] * edges.data["w"]},
                   lambda nodes: {"y": nodes.mailbox["m"].sum(1)})()
        return torch.cat([out, *torch.autograd.grad(out.square().sum(), [graph.ndata["h"]])])

    expected = call()
    with gnnaccel.enabled():
        assert close(call(), expected)


def test_one_message_of_two_names(route):
    """It is one tensor: what is changed in place is seen by both names."""
    def call():
        graph.apply_edges(lambda edges: {"a": edges.src["h"], "b": edges.src["h"]})
        graph.apply_edges(lambda edges: dict.fromkeys("cd", edges.src["h"] * edges.dst["h"]))
        graph.edata["a"].add_(1)
        graph.edata["d"].add_(1)
        return torch.cat([graph.edata[name] for name in "abcd"])

    graph = apart()
    agrees(route, call, None)


class Counts:
    def __init__(self):
        self.reads, self.number = 0, 2.0

    @property
    def scale(self):
        self.reads += 1
        return self.number


def test_properties_run_as_often_as_with_dgl(emulated):
    held = Counts()
    agrees(emulated, sums(apart(), lambda edges: {
        "m": torch.tanh(edges.src["h"] - edges.dst["h"]) * held.scale}), taken=False)
    assert held.reads == 2  # by the two calls


def test_modules_that_change_their_input(emulated):
    act = nn.ReLU(inplace=True)

    def message(edges):
        h = edges.src["h"] - edges.dst["h"]
        return {"m": act(h) + h}

    agrees(emulated, sums(apart(), message))
    agrees(emulated, sums(apart(), lambda edges: {"m": act(edges.src["h"] - edges.dst["h"])}))
    def again(edges):
        edges.src["h"].mul_(2.0)
        return {"m": torch.tanh(edges.src["h"] - edges.dst["h"])}

    agrees(emulated, sums(apart(), again), taken=None)
    graph = apart()
    with emulated.on(on_fallback="native"):
        sums(graph, lambda edges: {"m": act(edges.data["w"]) * edges.src["h"]})()
    assert (graph.edata["w"] >= 0).all()


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("message", [
    lambda edges: {"m": edges.src["x"]},
    lambda edges: {"m": torch.tanh(edges.src["x"] - edges.dst["x"])}])
def test_no_number_wins_in_a_mailbox(route, message, largest):
    graph = apart()
    graph.ndata["h"][3, 1], graph.ndata["h"][5, 2:4] = float("nan"), float("inf")
    graph.ndata["h"][6, 2] = -float("inf")

    def most(nodes):
        return {"y": nodes.mailbox["m"].max(1)[0]}

    def least(nodes):
        return {"y": nodes.mailbox["m"].min(dim=1).values}

    def call():
        graph.ndata["x"] = graph.ndata["h"].clone().requires_grad_()
        out = sums(graph, message, most if largest else least)()
        (grad,) = torch.autograd.grad(out[:, 4:].square().sum(), [graph.ndata["x"]])
        return torch.cat([out, grad]).nan_to_num(77.0, 88.0, 99.0)

    assert (call() == 77.0).any()
    agrees(route, call, None)


@pytest.mark.parametrize("first", ["no_grad", "reentrant"])
def test_a_function_first_seen_without_gradients(route, first):
    graph = apart()

    def call(weight):
        graph.edata["s"] = weight
        graph.apply_edges(lambda edges: {"t": edges.src["h"][:, 0] * edges.dst["h"][:, 1]
                                         * edges.data["s"]})
        return graph.edata["t"]

    def with_gradients():
        weight = torch.ones(60, requires_grad=True)
        return torch.autograd.grad(call(weight).sum(), [weight])[0]

    def of_route():
        if first == "no_grad":
            with torch.no_grad():
                call(torch.ones(60))
        else:
            torch.utils.checkpoint.checkpoint(
                call, torch.ones(60, requires_grad=True), use_reentrant=True)
        return with_gradients()

    agrees(route, of_route, taken=None)  # no kernel makes such messages


def test_a_network_of_the_edges_in_double_precision(route):
    """No kernel writes its input then."""
    graph, net = apart(), torch.nn.Sequential(torch.nn.Linear(2 * WIDTH, 5), torch.nn.ReLU(),
                                              torch.nn.Linear(5, 3)).double()
    graph.ndata["h"] = graph.ndata["h"].double()

    def call():
        graph.apply_edges(lambda edges: {"t": net(torch.cat([edges.src["h"], edges.dst["h"]], 1))})
        return graph.edata["t"]

    agrees(route, call, taken=None)


def seeding(h):
    torch.manual_seed(5)
    return torch.relu(h)


class Helped(nn.Module):
    """Calls a function that does more than compute, or names one in a branch that is not taken."""

    def __init__(self, does: bool):
        super().__init__()
        self.does = does

    def changed(self, h):
        if self.does:
            torch.manual_seed(5)
        return torch.relu(h)

    def method(self, edges):
        return {"m": self.changed(edges.src["h"]) * edges.data["w"]}

    def function(self, edges):
        return {"m": (seeding if self.does else torch.relu)(edges.src["h"]) * edges.data["w"]}


@pytest.mark.parametrize("by", ["method", "function"])
@pytest.mark.parametrize("does", [True, False])
def test_functions_that_draw_or_seed(emulated, does, by):
    call = sums(apart(), getattr(Helped(does), by))

    def after():
        torch.manual_seed(3)
        torch.rand(2)
        return torch.cat([call().flatten(), torch.rand(2)])

    for _ in range(2):
        agrees(emulated, after, taken=not does)


def _squared(nodes):
    total = nodes.mailbox["m"].sum(1)
    return {"y": total, "z": total * total}


def _twice(nodes):
    total = nodes.mailbox["m"].sum(1)
    return {"y": total, "z": total}


def _kept(nodes):
    changed = torch.tanh(nodes.mailbox["m"].mean(1))
    return {"y": changed, "z": changed.view(-1, WIDTH)}


@pytest.mark.parametrize("reduce", [
    lambda nodes: {"y": torch.relu(nodes.data["h"] + nodes.mailbox["m"].sum(1)),
                   "z": nodes.mailbox["m"].mean(1)},
    lambda nodes: {"y": nodes.mailbox["m"].mean(1).exp()}, _squared, _twice, _kept])
def test_results_of_a_mailbox_may_be_changed_in_place(route, reduce):
    graph = dgl.graph((torch.randint(0, 12, (60,)), torch.arange(60) % 12), num_nodes=12)
    x = torch.randn(12, WIDTH)

    def call():
        h = x.clone().requires_grad_()
        with graph.local_scope():
            graph.ndata["h"] = h * 1.5
            graph.update_all(lambda edges: {"m": edges.src["h"] * 0.5}, reduce)
            results = [graph.ndata[name] for name in "yz" if name in graph.ndata]
        results[0].mul_(2.0)
        torch.cat(results).square().sum().backward()
        return torch.cat([*results, h.grad]).detach()

    agrees(route, call)


def test_operations_of_dgl_whose_result_is_repeated(route):
    """A sum or product of narrow features becomes as wide as the function says."""
    graph = apart()
    graph.edata["v"] = graph.edata["w"][:, :1].clone()

    def call():
        graph.apply_edges(lambda edges: {
            "s": (edges.src["h"][:, :1] * edges.data["v"]).expand_as(edges.dst["h"]),
            "t": (edges.src["h"][:, :1] + edges.dst["h"][:, 1:2]).expand(-1, WIDTH)})
        graph.update_all(lambda edges: {"m": (edges.src["h"][:, :1] * edges.data["v"]).expand(
            -1, WIDTH)}, fn.sum("m", "y"))
        return torch.cat([graph.edata["s"], graph.edata["t"], graph.ndata["y"]])

    agrees(route, call, None)
