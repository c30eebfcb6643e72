"""Modules as message and reduce functions: a call of one is its ``forward``."""
from __future__ import annotations

import functools

import dgl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gnnaccel
from tests.dgl.test_users_guards import agrees, filled, sums
from tests.dgl.users import WIDTH


class Message(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.map = 0.5, nn.Linear(WIDTH, 6)

    def forward(self, edges):
        return {"m": torch.tanh(self.map(edges.src["h"] - edges.dst["h"])) * self.scale}


class Aggregator(nn.Module):
    """As in DGL's example of DiffPool."""

    def forward(self, nodes):
        return {"y": self.aggregated(nodes.mailbox["m"])}


class Pooled(Aggregator):
    def __init__(self, activation=F.relu):
        super().__init__()
        self.linear, self.activation = nn.Linear(6, 4), activation

    def aggregated(self, m):
        m = self.linear(m)
        if self.activation:
            m = self.activation(m)
        return torch.sum(m, dim=1)


@pytest.mark.long
def test_modules(route):
    graph, message, reduce, seen = filled(), Message(), Pooled(), []

    def call():
        out = sums(graph, message, reduce)()
        weights = [*message.parameters(), *reduce.parameters()]
        return torch.cat([t.flatten() for t in (
            out, *torch.autograd.grad(out.sin().sum(), weights))])

    seen.append(agrees(route, call))
    message.scale = 2.0
    seen.append(agrees(route, call))
    reduce.activation = None
    seen.append(agrees(route, call))
    reduce.linear = nn.Linear(6, 4)
    seen.append(agrees(route, call))
    assert all(not torch.equal(a, b) for a, b in zip(seen, seen[1:]))


@pytest.mark.long
def test_modules_that_are_watched_or_changed(emulated, monkeypatch):
    graph, message, reduce, calls = filled(), Message(), Pooled(), []
    call = sums(graph, message, reduce)
    first = agrees(emulated, call)
    hook = message.register_forward_hook(lambda module, args, out: {"m": out["m"] * 2})
    assert not torch.equal(agrees(emulated, call, None), first)
    hook.remove()
    hook = reduce.register_forward_pre_hook(lambda module, args: calls.append(module))
    agrees(emulated, call, None)
    hook.remove()
    assert len(calls) > 1
    agrees(emulated, call)
    message.forward = lambda edges: {"m": edges.src["h"][:, :6]}
    assert not torch.equal(agrees(emulated, call, None), first)
    del message.forward
    assert torch.equal(agrees(emulated, call), first)
    monkeypatch.setattr(Message, "forward", lambda self, edges: {"m": edges.src["h"][:, :6] * 3})
    assert not torch.equal(agrees(emulated, call), first)


def test_a_module_with_a_call_of_its_own(emulated):
    class Twice(Message):
        def __call__(self, edges):
            return {"m": 2 * super().__call__(edges)["m"]}

    agrees(emulated, sums(filled(), Twice()), taken=False)


def test_a_module_by_a_partial(emulated):
    class Scaled(nn.Module):
        def forward(self, edges, by):
            return {"m": torch.tanh(edges.src["h"]) * by}

    agrees(emulated, sums(filled(), functools.partial(Scaled(), by=2.0)))


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.BatchNorm1d(WIDTH)
        self.gru, self.lstm = nn.GRUCell(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, nodes):
        first, second, third = self.wide(nodes.mailbox["m"].sum(1)).chunk(3, -1)
        state = self.gru(first * second, nodes.data["h"])
        out, memory = self.lstm(third, (state, nodes.data["h"]))
        return {"y": self.norm(out) - memory}


@pytest.mark.long
def test_cells_and_pieces_of_what_was_reduced(emulated):
    graph, cells = filled(), Cells().eval()
    call = sums(graph, lambda edges: {"m": edges.src["h"] * edges.data["w"]}, cells)
    first = agrees(emulated, call)
    cells.gru = nn.GRUCell(WIDTH, WIDTH)
    second = agrees(emulated, call)
    cells.norm.running_mean += 1.0
    assert not torch.equal(first, second) and not torch.equal(agrees(emulated, call), second)


@pytest.mark.long
def test_norms_of_the_nodes_of_one_degree(emulated):
    """DGL gives a function the nodes of one degree at a time."""
    into = torch.cat([torch.arange(12), torch.arange(6, 12)])  # of one degree and of another
    graph, cells = filled(dgl.graph((into.flip(0), into))), Cells()
    for norm in (nn.BatchNorm1d(WIDTH, track_running_stats=False).eval(), nn.LayerNorm(WIDTH)):
        cells.norm = norm
        reduce = lambda nodes: {"y": cells.norm(nodes.mailbox["m"].sum(1))}  # noqa: E731
        message = lambda edges: {"m": edges.src["h"] * edges.data["w"]}  # noqa: E731
        agrees(emulated, sums(graph, message, reduce), None)
        taken = gnnaccel.stats()["dgl.reduce_udf"]["routes"].get("cuda", 0)
        assert bool(taken) is isinstance(norm, nn.LayerNorm)
