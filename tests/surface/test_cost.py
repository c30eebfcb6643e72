"""What every layer call pays to the public surface."""
from __future__ import annotations

import timeit

from torch import nn

from gnnaccel.dispatch.observe.counters import count
from gnnaccel.dispatch.observe.records import listening
from gnnaccel.dispatch.policy import config, rules


def microseconds(call) -> float:
    """Of the best of many short runs, so that a busy machine does not matter."""
    return min(timeit.repeat(call, number=2000, repeat=30)) / 2000 * 1e6


def test_a_call_costs_little():
    config.set_active(config.Config())
    layer = nn.Linear(1, 1)

    def call():
        rules.verdict(layer, config.current())
        count("Linear", "cuda")
        return listening()

    assert microseconds(config.current) < 0.5
    assert microseconds(call) < 3
