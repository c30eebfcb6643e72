"""Functions of users whose kernels come while a call is under way."""
from __future__ import annotations

import dgl
import dgl.function as fn
import pytest
import torch

import gnnaccel
from gnnaccel.cuda.runtime.driver import using
from gnnaccel.dispatch.ops import route
from gnnaccel.dispatch.plan import compiling
from gnnaccel.dispatch.policy.reasons import reason
from tests.emulation.emulator import EmulatedDriver


def reduce(nodes):
    return {"o": nodes.mailbox["m"].sum(1)}


@pytest.mark.parametrize("reducer", [fn.sum("m", "o"), reduce])
@pytest.mark.parametrize("asked", range(6))
def test_a_call_is_decided_once(monkeypatch, asked, reducer):
    """The kernels are there once they have been asked for so many times."""
    left, real = [None] * asked, compiling.problem

    def problem(*args, **kwargs):
        return reason(compiling.PENDING) if left and left.pop() is None else real(*args, **kwargs)

    # as on a GPU
    monkeypatch.setattr(route, "_host_is_as_good", lambda call, config: False)
    g = dgl.graph((torch.randint(0, 50, (2000,)), torch.randint(0, 50, (2000,))))
    g.ndata["h"] = torch.randn(50, 8)

    def called():
        with g.local_scope():
            g.update_all(lambda e: {"m": torch.relu(e.src["h"] - e.dst["h"])}, reducer)
            return g.ndata["o"]

    expected = called()
    monkeypatch.setattr(compiling, "problem", problem)
    with using(EmulatedDriver()), gnnaccel.enabled():
        for _ in range(3):
            torch.testing.assert_close(called(), expected, rtol=1e-4, atol=1e-4)
