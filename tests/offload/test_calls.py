"""Calls of functions in bands: what they gather, and where it comes from."""
from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

import gnnaccel
from gnnaccel.adapters.pyg.distributed import layers
from gnnaccel.dispatch.distributed.building import EDGE
from gnnaccel.dispatch.offload import plan
from gnnaccel.dispatch.offload.calls import Call
from gnnaccel.dispatch.offload.memory import Memory
from gnnaccel.errors import OffloadError
from tests.distributed import graphs

NODES = 30
MEMORY = Memory(torch.device("cpu"))


@pytest.fixture
def edges():
    return torch.randint(0, NODES, (2, 90), generator=graphs.generator(0))


def called(function, edges, *inputs, whole=(), **kwargs):
    bands = plan.cut(edges, (NODES, NODES), EDGE, 4, MEMORY)
    call = Call(function, bands, ["node"] * len(inputs), MEMORY, "a function",
                contextlib.nullcontext, **kwargs)
    return call, call(list(inputs), list(whole))


def total(session, x, name="x"):
    """Sums over the edges that enter the band's nodes."""
    rows = session.extend("node", x, name, "a function")
    source, target = session.part.edges[EDGE]
    own = len(session.part.rows["node"].own)
    return torch.zeros(own, *x.shape[1:], dtype=x.dtype).index_add(0, target, rows[source])


def right(edges, x):
    return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])


def test_an_input_is_gathered_as_it_was_given(edges):
    x = torch.randn(NODES, 3)
    call, out = called(lambda session, inputs, whole: total(session, inputs[0]), edges, x)
    assert call.answers == {("x", 0): 0}
    torch.testing.assert_close(out, right(edges, x))


def test_an_input_that_was_written_to_is_collected(edges):
    x = torch.randn(NODES, 3)
    held = x.clone()
    call, out = called(lambda session, inputs, whole: total(session, inputs[0].mul_(2)), edges, x)
    assert isinstance(call.answers["x", 0], torch.Tensor) and torch.equal(x, held)
    torch.testing.assert_close(out, right(edges, 2 * x))


@pytest.mark.parametrize("spare", [0, 10**6])
def test_stages_and_what_is_known(edges, spare):
    def function(session, inputs, whole):
        x = total(session, inputs[0]) @ whole[0]
        return total(session, x) + total(session, x.tanh(), "y") + total(session, inputs[1])

    x, y, w = (torch.randn(shape, requires_grad=True) for shape in ((NODES, 3), (NODES, 3), (3, 3)))

    def whole_graph():
        z = right(edges, x) @ w
        return right(edges, z) + right(edges, z.tanh()) + right(edges, y)

    truth = whole_graph()
    gradients = torch.autograd.grad(truth.square().sum(), (x, y, w))
    # wrong, as an earlier call of another form may have left it
    known = {("x", 1): 0, ("y", 0): 1, ("z", 3): 0}
    call, out = called(function, edges, x, y, whole=[w], known=known, spare=spare)
    assert known == {("x", 0): 0, ("x", 2): 1, ("z", 3): 0}
    torch.testing.assert_close(out, truth)
    for got, share in zip(torch.autograd.grad(out.square().sum(), (x, y, w)), gradients):
        torch.testing.assert_close(got, share, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_an_error(edges):
    x = torch.randn(NODES, 3)
    for wrong, words in (
            (lambda session, inputs, whole: inputs[0][:1], "rows; to run in bands"),
            (lambda session, inputs, whole: (inputs[0],), "gave a tuple over a band"),
            (lambda session, inputs, whole: total(session, inputs[0][:1]), "a row for each"),
            (lambda session, inputs, whole: inputs[0][:, :1 + session.part.rank % 2],
             "another way over one band")):
        with pytest.raises(OffloadError, match=words):
            called(wrong, edges, x)


@pytest.mark.long
def test_many_bands_add_up_no_rounding_to_a_weights_gradient():
    rows = torch.full((2000, 1), 0.1)
    weight = torch.ones(1, requires_grad=True)
    call = Call(lambda session, inputs, whole: inputs[0] * whole[0], plan.ranges(2000, 2000),
                ["rows"], MEMORY, "a function", contextlib.nullcontext)
    call([rows], [weight]).sum().backward()
    assert weight.grad.item() == pytest.approx(2000 * rows[0].double().item(), rel=1e-7)


@pytest.mark.parametrize("kind", [SAGEConv, GCNConv, GATConv])
@pytest.mark.parametrize("train", [False, True])
def test_rows_of_earlier_bands_are_let_go_of(kind, train, monkeypatch):
    """Without waiting for the garbage collector: at most three bands have rows on the device, where
    each copies its own."""
    monkeypatch.setattr(layers, "GATHERING", ())
    live, most = weakref.WeakSet(), []
    native = Memory.fetch

    def fetch(self, far, *wheres, free=0):
        close = native(self, far, *wheres, free=free)
        if len(wheres) > 1 or free:
            live.add(close.untyped_storage())
            most.append(len(live))
        return close

    monkeypatch.setattr(Memory, "fetch", fetch)
    torch.manual_seed(0)
    layer, x, edges = kind(8, 8), torch.randn(200, 8), torch.randint(0, 200, (2, 900))
    x.requires_grad_(train)
    gc.collect()
    gc.disable()
    try:
        with gnnaccel.offload(limit=12_000) as ran, torch.set_grad_enabled(train):
            out = layer(x, edges)
        if train:
            out.sum().backward()
    finally:
        gc.enable()
    assert max(bands for _, bands in ran.ran) > 8 and len(most) > 8
    assert max(most) <= 3
