"""Intervals of calls and their backward, by a clock that only the test moves."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.profile.timeline import Backward, Interval, Timeline, sequence

CPU = torch.device("cpu")


class Clock:
    """Nanoseconds, in steps of a million."""

    now = 0

    def mark(self, device, again=None):
        return self.now * 1_000_000

    def milliseconds(self, start, end):
        return (end - start) / 1e6


@pytest.fixture
def timeline():
    made = Timeline()
    made.clock = Clock()
    return made


def spending(timeline: Timeline, milliseconds: int):
    """An operation whose backward takes so long."""
    class Spend(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            timeline.clock.now += milliseconds
            return g

    return Spend.apply


def followed(timeline, inside, x):
    found = []
    since = sequence()
    out = inside(x)
    Backward(timeline, CPU, found.append).follow([out], since)
    return out, found


def test_backward_is_what_the_call_made_and_nothing_else(timeline):
    before, after, inside = (spending(timeline, n) for n in (100, 1000, 3))
    x = before(torch.ones(2, requires_grad=True))
    out, found = followed(timeline, lambda x: inside(inside(x) * 2) + inside(x), x)
    after(out).sum().backward()
    timeline.finish()
    assert found == [9.0]


def test_every_backward_is_one_interval(timeline):
    inside = spending(timeline, 5)
    out, found = followed(timeline, inside, torch.ones(2, requires_grad=True))
    for _ in range(3):
        out.sum().backward(retain_graph=True)
    timeline.finish()
    assert found == [5.0, 5.0, 5.0]


def test_a_backward_that_stops_short_ends_where_it_stops(timeline):
    inside = spending(timeline, 5)
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    out, found = followed(timeline, lambda x: inside(x) * inside(y), x)
    torch.autograd.grad(out.sum(), y)
    timeline.finish()
    assert found == [5.0]


def test_what_is_made_without_gradients_has_no_backward(timeline):
    out, found = followed(timeline, lambda x: x * 2, torch.ones(2))
    timeline.finish()
    assert found == [] and out.grad_fn is None


def test_draining_waits_for_what_is_not_passed(timeline):
    found = []
    late, early = (Interval(0, -1, found.append) for _ in range(2))
    early.end = 1_000_000
    timeline.add(late)
    timeline.add(early)
    timeline.drain()
    assert found == []
    late.end = 2_000_000
    timeline.drain()
    assert found == [2.0, 1.0]


def test_finish_drops_what_never_ended(timeline):
    found = []
    timeline.add(Interval(0, -1, found.append))
    timeline.finish()
    timeline.finish()
    assert found == []
