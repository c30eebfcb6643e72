"""BatchNorm over the nodes and random numbers for them: torch does each once in a call, in the
order of the code."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gnnaccel
from gnnaccel.dispatch.ops import aggregation_cost
from gnnaccel.dispatch.ops.aggregation_cost import Estimate
from tests.plain.held import codes, tensors_of
from tests.plain.test_layers import EDGES, NODES, tensors


class Base(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.lin, self.drop = nn.Linear(8, 8), nn.Dropout(0.4)
        self.norm, self.last = nn.BatchNorm1d(8, **options), nn.BatchNorm1d(8, **options)
        self.wide = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8, **options), nn.ReLU(),
                                  nn.Linear(8, 8))

    def summed(self, h, edge_index, w):
        src, dst = edge_index
        return torch.zeros_like(h).index_add_(0, dst, torch.tanh(h[src] - h[dst]) * w[:, None])


class After(Base):
    def forward(self, x, edge_index, w):
        return F.relu(self.norm(self.summed(self.lin(x), edge_index, w))) + x


class Before(Base):
    def forward(self, x, edge_index, w):
        h = self.norm(self.lin(x))
        return self.summed(h, edge_index, w), h


class InSequence(Base):
    """The update of E(n) networks with a mask (LRI, DiffLinker)."""

    def forward(self, x, edge_index, w):
        return x + self.wide(torch.cat([x, self.summed(x, edge_index, w)], 1))


class Rounds(Base):
    """One norm before, between and after the sums, whose statistics depend on that order."""

    def forward(self, x, edge_index, w):
        h = self.norm(x)
        for _ in range(2):
            h = self.norm(h + self.summed(h, edge_index, w))
        return h


class Unused(Base):
    """Norms of which nothing is made, before and after others."""

    def forward(self, x, edge_index, w):
        self.norm(x)
        total = self.summed(x, edge_index, self.drop(w))
        self.norm(total * 2)
        self.last(total)
        return total


class Draws(Base):
    """Masks and noise of nodes and edges, in turns."""

    def forward(self, x, edge_index, w):
        h = self.drop(x) + 0.1 * torch.randn_like(x)
        h = F.dropout(self.summed(h, edge_index, self.drop(w)), 0.2, self.training)
        total = self.summed(h, edge_index, F.dropout(w, 0.3, self.training))
        return self.drop(total) + torch.rand_like(total), h


class Sync(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.SyncBatchNorm(8)

    def forward(self, x, edge_index, w):
        return self.summed(self.norm(x), edge_index, w)


class Asks(Base):
    """A question about numbers that a norm gave."""

    def forward(self, x, edge_index, w):
        rows = self.norm(w[:, None].expand(-1, 8).contiguous())
        if rows.max() > 2.2:
            rows = rows.tanh()
        return torch.zeros_like(x).index_add_(0, edge_index[1], x[edge_index[0]] * rows)


FORMS = [After, Before, InSequence, Rounds, Unused, Draws]


def given(nodes=NODES, edges=EDGES, seed=0):
    x, ei, w = tensors("x edge_index w", nodes, edges, seed)
    return x.requires_grad_(), ei, w.requires_grad_()


def step(layer, args, grad=True):
    """All that a call gives and changes."""
    torch.manual_seed(0)
    with torch.set_grad_enabled(grad):
        out = tensors_of(layer(*args))
    drawn, wants = torch.get_rng_state(), [args[0], args[2], *layer.parameters()]
    found = list(out)
    if grad:
        found += torch.autograd.grad(sum((t * t.detach().cos()).sum() for t in out), wants,
                                     allow_unused=True)
    return [*found, *(t.clone() for t in layer.buffers())], drawn


def hold(ours, native, *args, **options):
    """Assert that a step of both is the same."""
    with gnnaccel.disabled():
        expected, drawn = step(native, args, **options)
    found, drawn_here = step(ours, args, **options)
    assert torch.equal(drawn, drawn_here)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-4)


def routes(layer):
    return gnnaccel.stats()[type(layer).__name__]["routes"]


@pytest.fixture
def on(emulated):
    with gnnaccel.enabled(backend="cuda", when="supported"):
        yield


OPTIONS = [{}, {"momentum": None}, {"affine": False, "momentum": 0.5},
           {"track_running_stats": False}]


@pytest.mark.parametrize("form, options", [(form, {}) for form in FORMS] + [
    (Rounds, options) for options in OPTIONS[1:]])
def test_each_is_done_once_in_a_call(on, form, options):
    torch.manual_seed(0)
    ours = form(**options)
    native = copy.deepcopy(ours)
    for args in (given(), given(), given(seed=1), given(NODES + 7, EDGES + 30, 2), given()):
        hold(ours, native, *args)
    hold(ours, native, *given(), grad=False)
    hold(ours.eval(), native.eval(), *given())
    for one in (ours.train(), native.train()):
        one.norm.momentum = 0.3
        with torch.no_grad():
            one.lin.weight.mul_(1.1)
    hold(ours, native, *given())
    assert routes(ours) == {"cuda": 8}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("form", [Rounds, Draws])
def test_checkpoints(on, form, reentrant):
    class Repeated(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *args):
            return checkpoint(self.inner, *args, use_reentrant=reentrant)

    ours = Repeated(form())
    native = copy.deepcopy(ours)
    for one in (ours, native):
        for args in (given(), given(seed=1)):
            with gnnaccel.enabled() if one is ours else gnnaccel.disabled():
                torch.manual_seed(0)
                out = tensors_of(one(*args))
                sum((t * t.detach().cos()).sum() for t in out).backward()
    for one, other in zip((*ours.parameters(), *ours.buffers()),
                          (*native.parameters(), *native.buffers())):
        torch.testing.assert_close(one, other)
        if one.requires_grad and other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, atol=2e-5, rtol=2e-4)


def test_calls_that_turn_native_after_they_were_read(emulated, monkeypatch):
    monkeypatch.setattr(aggregation_cost, "estimate",
                        lambda graph, given, grad: Estimate(-1.0, 1.0, 5.0, 4.0))
    ours = Rounds()
    native = copy.deepcopy(ours)
    with emulated.on(when="profitable", on_fallback="native"):
        for seed in (0, 0, 0, 0, 0, 1, 2):
            hold(ours, native, *given(seed=seed))
    assert routes(ours) == {"native": 7}


def test_other_norms(on):
    ours = Rounds()
    native = copy.deepcopy(ours)
    hold(ours, native, *given())
    for one in (ours, native):
        torch.manual_seed(1)
        one.norm = nn.BatchNorm1d(8, momentum=None)
    hold(ours, native, *given())
    for one in (ours, native):
        one.norm.running_mean = one.norm.running_var = one.norm.num_batches_tracked = None
        one.norm.track_running_stats = False
    hold(ours, native, *given())
    assert routes(ours) == {"cuda": 3}
    seen = []
    ours.norm.register_forward_hook(lambda *args: seen.append(1))
    hold(ours, native, *given())
    assert len(seen) == 3 and routes(ours) == {"cuda": 3, "native": 1}


def test_statistics_of_several_processes_are_the_hosts(on):
    ours = Sync()
    native = copy.deepcopy(ours)
    hold(ours, native, *given())
    assert codes(ours) == {"GA211"}


def test_questions_about_what_keeps_statistics(on):
    ours = Asks()
    native = copy.deepcopy(ours)
    for seed in (0, 0, 1, 2):
        x, edges, w = given(seed=seed)
        if seed == 1:
            w = torch.cat([w[1:], w.new_full((1,), 50.0)]).detach().requires_grad_()
        hold(ours, native, x, edges, w)


def test_too_few_rows_are_the_hosts_error(on):
    ours = Before()
    x, edges, w = given()
    for layer in (ours, ours):
        with pytest.raises((RuntimeError, ValueError)):
            layer(x[:, :7], edges, w)
    assert ours.norm.num_batches_tracked == 0
