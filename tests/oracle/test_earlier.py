"""Calls before the one that is judged: what they see of earlier cases, and what they leave behind."""

from __future__ import annotations

import pytest

pytest.importorskip("torch_geometric")

import torch
from torch import nn

from tests.oracle import earlier, table
from tests.oracle.graphs import Case
from tests.oracle.modes import MODES


def test_what_is_kept_of_functions_is_forgotten():
    from gnnaccel.dispatch.policy import names

    def function():
        pass

    module, kept = nn.Linear(1, 1), names._names
    for owner in (function, function.__code__, nn.Linear, module):
        kept.set(owner, "a name")
    earlier.forget()
    assert [kept.get(one) for one in (function, function.__code__, nn.Linear, module)] == [
        None, None, None, "a name"]


def test_an_earlier_call_leaves_the_module_as_it_was():
    module = nn.Linear(3, 2).eval()
    module.bias.requires_grad_(False)
    for name in ("frozen", "train", "inference"):
        case = Case(module, (torch.randn(4, 3),))
        earlier.call(module, case, MODES[name], torch.device("cpu"), 1)
        assert not module.training
        assert module.weight.requires_grad and not module.bias.requires_grad


class Remembers(nn.Module):
    """Gives no gradients once a call went without them, if gnnaccel is on."""

    def __init__(self):
        super().__init__()
        self.without = []  # the same in copies

    def __deepcopy__(self, memo):
        return self

    def forward(self, x):
        from gnnaccel.dispatch.policy.config import current

        if current() is None:
            return x * 2
        self.without.append(not torch.is_grad_enabled())
        return (x.detach() if any(self.without) else x) * 2


@pytest.mark.parametrize(("before", "wrong"), [("no_grad", True), ("only_x", False),
                                               (None, False)])
def test_the_order_of_calls_is_seen(backend, before, wrong):
    trial = table.Trial(lambda look: Case(Remembers(), (torch.randn(4, 3),)), 1, MODES["grad"],
                        backend, MODES.get(before))
    assert (table._verdict(trial) is not None) is wrong
