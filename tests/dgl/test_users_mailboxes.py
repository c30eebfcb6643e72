"""Reduce functions that go on with a mailbox: results beside its messages, some of its channels,
messages side by side, and features of the node once for each message."""
from __future__ import annotations

import dgl.function as fn
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gnnaccel
from gnnaccel.adapters.dgl.udf import replaced
from tests.dgl import users
from tests.dgl.judge import compare, on_routes
from tests.dgl.test_users import followed, with_bare
from tests.dgl.test_users_guards import agrees, filled, sums
from tests.dgl.users import WIDTH, Mailbox


class Shares(Mailbox):
    """Messages over the sum of their sizes."""

    def reduce(self, nodes):
        m = nodes.mailbox["m"]
        return {"y": (m / (m.abs().sum(1, keepdim=True) + 0.1)).sum(1) * nodes.data["k"]}


class Deviations(Mailbox):
    def reduce(self, nodes):
        m = nodes.mailbox["m"]
        return {"y": ((m - torch.mean(m, dim=1, keepdim=True)) ** 2).mean(1)}


class ByHand(Mailbox):
    """A softmax as users write it."""

    def reduce(self, nodes):
        m = nodes.mailbox["m"]
        exponents = torch.exp(m - torch.max(m, 1, keepdim=True)[0])
        return {"y": (exponents / exponents.sum(1, keepdim=True) * m).sum(1)}


class Directions(Mailbox):
    """Weights of one channel, as in directional aggregations."""

    def reduce(self, nodes):
        m = nodes.mailbox["m"]
        weight = (m[:, :, 1] / (torch.sum(torch.abs(m[:, :, 1]), keepdim=True, dim=1)
                                + 1e-8)).unsqueeze(-1)
        return {"y": torch.abs(torch.sum(m * weight, dim=1)
                               - torch.sum(weight, dim=1) * nodes.data["k"])}


class Parts(Mailbox):
    def reduce(self, nodes):
        m = nodes.mailbox["m"]
        return {"y": (m[..., :3] * m[:, :, 3:6]).sum(1), "z": m[:, :, None, 2:4].mean(1)}


class Together(Mailbox):
    """The node's own features beside each message, as in DGMG."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(2 * WIDTH, 5)

    def own(self, nodes, m):
        return nodes.data["k"].unsqueeze(1).expand(-1, m.size(1), -1)

    def reduce(self, nodes):
        m = nodes.mailbox["m"]
        return {"y": F.relu(self.map(torch.cat([self.own(nodes, m), m], dim=2))).sum(1)}


class TogetherAs(Together):
    def own(self, nodes, m):
        return nodes.data["k"].unsqueeze(1).expand_as(m)


class TogetherRepeated(Together):
    def own(self, nodes, m):
        return nodes.data["k"][:, None].repeat(1, m.shape[1], 1)


@on_routes("layer", [Shares, Deviations, ByHand, Directions, Parts, Together, TogetherAs,
                     TogetherRepeated])
def test_values_and_gradients(route, layer):
    compare(route, layer(), with_bare(), *users.arguments(layer),
            went=followed(reduce_udf=route.backend))


def test_extrema_that_tie(emulated):
    """Of equal messages the first has the gradient of a maximum, and NaN is the largest."""
    graph = filled()
    graph.ndata["h"] = graph.ndata["h"].round()
    graph.ndata["h"][3, 0] = float("nan")
    x = graph.ndata["h"].requires_grad_()

    def reduce(nodes):
        m = nodes.mailbox["m"]
        return {"y": (m * m.max(1, keepdim=True).values - m.min(1, True)[0]).sum(1)}

    def call():
        graph.ndata["h"] = x
        out = sums(graph, lambda edges: {"m": edges.src["h"] * 2.0}, reduce)()
        return torch.cat([out, torch.autograd.grad(out.nansum(), x)[0]]).nan_to_num(7.0)

    agrees(emulated, call)


@pytest.mark.parametrize("kept", [lambda m: m.mean(1, keepdim=True), lambda m: F.softmax(m, 1),
                                  lambda m: m.softmax(dim=1)])
def test_no_gradient_through_what_is_kept(emulated, kept):
    graph = filled()
    x = graph.ndata["h"].requires_grad_()

    def reduce(nodes):
        m = nodes.mailbox["m"]
        with torch.no_grad():
            weights = kept(m)
        return {"y": (m * weights).sum(1)}

    def call():
        graph.ndata["h"] = x
        out = sums(graph, fn.u_mul_e("h", "w", "m"), reduce)()
        return torch.cat([out, torch.autograd.grad(out.sum(), x)[0]])

    agrees(emulated, call, taken=False)


@pytest.mark.long
def test_what_is_not_followed_is_not_read_again(monkeypatch):
    """On a CPU, where reading it would cost a tenth of the call; with another message it is."""
    graph, read, count = filled(), replaced._read, []
    graph.ndata["i"] = torch.arange(graph.num_nodes())
    monkeypatch.setattr(replaced, "_read", lambda *args: count.append(args) or read(*args))

    def whole(edges):
        return {"m": edges.src["i"]}

    def reduce(nodes):
        return {"y": nodes.mailbox["m"].sum(1)}

    for message in (whole, lambda edges: {"m": edges.dst["i"]}):
        call, _ = sums(graph, message, reduce), count.clear()
        expected = call()
        with gnnaccel.enabled():
            assert torch.equal(call(), expected) and count
            count.clear()
            assert all(torch.equal(call(), expected) for _ in range(20)) and not count
    with gnnaccel.enabled():
        sums(graph, fn.copy_u("h", "m"), reduce)()
    assert count
    assert gnnaccel.stats()["dgl.reduce_udf"]["routes"] == {"native": 42, "torch": 1}
