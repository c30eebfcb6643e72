"""Gradients at rows of the edges that functions of users write or give back, from which they make
others."""
from __future__ import annotations

import dgl.function as fn
import pytest
import torch
from torch import nn

from tests.dgl.test_users_effects import apart
from tests.dgl.test_users_guards import agrees
from tests.dgl.users import WIDTH


def before(edges):
    m = edges.src["x"] * edges.dst["x"]
    a = m[:, :2]
    edges.data["m"] = m
    return {"s": a * 2 + 1}


def after(edges):
    m = torch.tanh(edges.src["x"] - edges.dst["x"])
    edges.data["m"] = m
    return {"s": m * m}


def scores(edges):
    m = edges.src["x"] * edges.dst["x"]
    return {"m": m, "s": m.sum(-1, keepdim=True)}


def features(edges):
    m = edges.data["v"] * edges.src["x"]
    return {"s": torch.sin(m[:, :2]), "m": m}


def others(edges):
    """None of these is made of another."""
    return {"m": edges.src["x"] * edges.dst["x"], "s": edges.src["x"] - edges.dst["x"]}


def copies(edges):
    return {"m": edges.src["x"], "s": edges.dst["x"] + edges.src["x"]}


class Maps(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, edges):
        m = self.map(edges.src["x"]) + self.map(edges.dst["x"])
        gate, rest = m.chunk(2, -1)
        return {"m": m, "s": torch.sigmoid(gate) * rest}


@pytest.mark.parametrize("message, summed", [
    (before, True), (after, True), (scores, False), (features, False), (others, False),
    (copies, False), (Maps(), False)])
def test_gradients_go_through_them(route, message, summed):
    torch.manual_seed(0)
    graph = apart()

    def call():
        x = graph.ndata["x"] = (graph.ndata["h"] * 1.0).requires_grad_()
        graph.edata["v"] = graph.edata["w"] * 1.0
        with graph.local_scope():
            if summed:
                graph.update_all(message, fn.sum("s", "y"))
            else:
                graph.apply_edges(message)
            m, out = graph.edata["m"], graph.ndata["y"] if summed else graph.edata["s"]
        m.retain_grad()
        grads = torch.autograd.grad(out.square().sum(), [m, x], retain_graph=True,
                                    allow_unused=True)
        (out.square().sum() + m.sum()).backward()
        return torch.cat([t.flatten() for t in (
            out, m, m.grad, *[torch.zeros(1) if grad is None else grad for grad in grads])])

    taken = summed or message in (others, copies) or route.backend == "torch"
    agrees(route, call, taken or None)
