"""What lies in one memory with DGL alone does so, and nothing else: changes in place tell."""
from __future__ import annotations

import dgl
import dgl.function as fn
import pytest
import torch

from tests.dgl.test_users_effects import apart
from tests.dgl.test_users_guards import agrees
from tests.dgl.users import WIDTH


def written(edges):
    x = torch.tanh(edges.src["h"] * edges.data["w"])
    edges.data["a"] = x
    edges.data["b"] = x
    return {"m": x, "n": edges.data["a"], "o": x * 2}


MESSAGES = {
    "a feature": lambda edges: {"m": edges.data["w"]},
    "a copy": lambda edges: {"m": edges.data["w"].clone()},
    "both": lambda edges: {"m": edges.data["w"].clone(), "n": edges.data["w"],
                           "o": edges.src["h"] * 2},
    "a shape": lambda edges: {"m": edges.data["w"].view(-1, 2, WIDTH // 2)},
    "a part": lambda edges: {"m": edges.data["w"][:, :1], "n": edges.src["h"] * 2},
    "a copied part": lambda edges: {"m": edges.data["w"][:, 1:].clone()},
    "written": written,
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_and_features_of_edges(route, name):
    graph, kept = apart(), apart().edata["w"]

    def call():
        graph.edata["w"] = kept * 1.0
        graph.apply_edges(MESSAGES[name])
        for key in sorted(graph.edata):
            graph.edata[key].mul_(3.0)
        return torch.cat([graph.edata[key].flatten() for key in sorted(graph.edata)])

    agrees(route, call, None)


@pytest.mark.parametrize("reduce", [fn.sum("m", "y"), lambda nodes: {
    "y": nodes.mailbox["m"].sum(1) * nodes.data["x"]}])
def test_rows_of_another_graph_are_read_anew_in_each_call(route, reduce):
    """DGL takes the rows of a subgraph's nodes when they are read, for users' functions each time:
    after a call without gradients, after a change in place, and after a backward."""
    graph = apart()

    def call():
        x = graph.ndata["x"] = (graph.ndata["h"] * 1.0).requires_grad_()
        part = dgl.node_subgraph(graph, torch.arange(9))

        def passed():
            part.update_all(lambda edges: {"m": torch.tanh(edges.src["x"] * edges.dst["x"])},
                            reduce)
            return part.ndata["y"]

        with torch.no_grad():
            out = [passed()]
            x.mul_(2.0)
        for _ in range(2):
            out.append(passed())
            out += torch.autograd.grad(out[-1].sum(), [x])
        return torch.cat(out)

    agrees(route, call)


@pytest.mark.parametrize("message, reduce", [
    (lambda edges: {"m": torch.tanh(edges.data["w"]) * edges.src["h"]}, fn.sum("m", "y")),
    (fn.copy_e("w", "m"), lambda nodes: {"y": nodes.mailbox["m"].sum(1)})])
def test_features_that_are_first_read_without_gradients(route, message, reduce):
    """DGL keeps the rows of a subgraph's edges once they are read, here without gradients."""
    graph = apart()
    graph.edata["w"].requires_grad_()

    def call():
        part = dgl.node_subgraph(graph, torch.arange(9))
        with torch.no_grad():
            part.update_all(message, reduce)
        kept.append(part.edata["w"].requires_grad)
        return part.ndata["y"]

    kept = []
    agrees(route, call)
    assert kept == [False, False]
