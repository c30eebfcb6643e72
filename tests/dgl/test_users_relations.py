"""Message functions that read the relation of their edges, or take features of edges away."""
from __future__ import annotations

import functools

import dgl
import dgl.function as fn
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gnnaccel.adapters.dgl.udf import memory
from tests.dgl.test_users_guards import agrees, filled, sums
from tests.dgl.users import WIDTH


class ByRelation(nn.Module):
    """A weight for each relation, by the name that DGL gives the function."""

    def __init__(self):
        super().__init__()
        self.scales = {("u", "likes", "i"): 2.0, ("u", "sees", "i"): -1.0, ("i", "of", "u"): 0.5}
        self.private = False

    def message(self, edges):
        kind = edges._etype if self.private else edges.canonical_etype
        return {"m": torch.tanh(edges.src["h"]) * self.scales[kind]}


@pytest.mark.parametrize("private", [True, False])
def test_relations_by_name(route, private):
    graph = dgl.heterograph({
        ("u", "likes", "i"): (torch.tensor([0, 1, 2, 2]), torch.tensor([0, 0, 1, 3])),
        ("u", "sees", "i"): (torch.tensor([0, 1, 2, 2]), torch.tensor([0, 0, 1, 3])),
        ("i", "of", "u"): (torch.tensor([0, 1, 1, 3]), torch.tensor([0, 0, 1, 3]))},
        num_nodes_dict={"u": 4, "i": 4})
    layer = ByRelation()
    layer.private = private
    for kind in graph.ntypes:
        graph.nodes[kind].data["h"] = torch.randn(4, WIDTH)

    def call():
        found = []
        for name in graph.etypes:
            with graph.local_scope():
                graph.update_all(layer.message, fn.sum("m", "y"), etype=name)
                found.append(graph.dstnodes[graph.to_canonical_etype(name)[2]].data["y"])
        return torch.stack(found)

    first = agrees(route, call)
    layer.scales["u", "sees", "i"] = 3.0
    assert not torch.equal(agrees(route, call), first)


def popped(edges):
    w = edges.data.pop("w")
    return {"m": F.relu(edges.src["h"]) * w}


@pytest.mark.long
def test_features_that_are_taken_away(route):
    graph = filled()

    def call():
        with graph.local_scope():
            graph.update_all(popped, fn.sum("m", "y"))
            assert "w" not in graph.edata
            graph.edata["w"] = torch.ones(graph.num_edges(), 1)
            graph.update_all(popped, lambda nodes: {"z": nodes.mailbox["m"].mean(1)})
            assert "w" not in graph.edata
            return graph.ndata["y"] + graph.ndata["z"]

    agrees(route, call)
    assert "w" in graph.edata
    graph.edata["w"].mul_(2.0)
    agrees(route, call)
    graph.apply_edges(popped)
    with route.on(on_fallback="native"), pytest.raises(KeyError):
        graph.apply_edges(popped)


@pytest.mark.parametrize("message", [
    lambda edges: {"m": edges.data.pop("w") * edges.data["w"] * edges.src["h"]},
    lambda edges: {"m": edges.data.pop("w") * edges.src["h"], "n": edges.data["w"]},
    lambda edges: {"m": edges.data.pop("none") * edges.src["h"]}])
def test_features_that_are_gone(emulated, message):
    with emulated.on(on_fallback="native"), pytest.raises(KeyError):
        sums(filled(), message)()


class ByKind(nn.Module):
    """A map for each relation, by the name that the script gives the function, or DGL does."""

    def __init__(self, names):
        super().__init__()
        self.maps = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})

    def given(self, edges, name):
        return {"m": self.maps[name](edges.src["h"]).tanh()}

    def asking(self, edges):
        return {"m": self.maps[edges.canonical_etype[1]](edges.src["h"]).tanh()}


@pytest.mark.long
@pytest.mark.parametrize("asks", [False, True])
def test_each_relation_is_read_once(route, asks, monkeypatch):
    """However many there are."""
    names = [f"kind{k}" for k in range(9)]
    graph = dgl.heterograph({("n", name, "n"): tuple(torch.randint(0, 9, (2, 20))) for name in names},
                            num_nodes_dict={"n": 9})
    layer, traced, native = ByKind(names), [], memory._traced
    monkeypatch.setattr(memory, "_traced", lambda *args: traced.append(1) or native(*args))
    graph.ndata["h"] = torch.randn(9, WIDTH)

    def call():
        found = []
        for name in names:
            message = layer.asking if asks else functools.partial(layer.given, name=name)
            with graph.local_scope():
                graph.update_all(message, fn.sum("m", "y"), etype=name)
                found.append(graph.ndata["y"])
        return torch.stack(found)

    agrees(route, call)
    first = len(traced)
    for _ in range(3):
        agrees(route, call)
    assert first == len(traced) == len(names)
    layer.maps["kind3"].weight.data.zero_()  # what is kept has no numbers
    agrees(route, call)
