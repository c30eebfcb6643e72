"""Adam's steps in one kernel: what earlier steps found out of tensors is kept, the tensors are not."""
from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from gnnaccel.adapters import optimizers
from tests.test_optimizers import device, enabled, runs  # noqa: F401 - a fixture


def stepped(weights, optimizer, steps=2):
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()


def test_rows_that_are_cut_off_in_place(device):
    """Parameter and averages begin where they began. The rows behind are no longer theirs."""
    weight = nn.Parameter(torch.ones(8, 3, device=device))
    optimizer = torch.optim.Adam([weight], 0.1)
    with enabled(device):
        stepped([weight], optimizer)
        behind = []
        for t in (weight, *(optimizer.state[weight][name] for name in ("exp_avg", "exp_avg_sq"))):
            behind.append(t.data[2:])
            weight.grad, t.data = None, t.data[:2]
        before = [t.clone() for t in behind]
        stepped([weight], optimizer)
    assert runs() and all(map(torch.equal, behind, before))


def test_an_average_of_another_shape_in_the_same_place(device):
    weight = nn.Parameter(torch.ones(8, 3, device=device))
    optimizer = torch.optim.Adam([weight], 0.1)
    with enabled(device):
        stepped([weight], optimizer)
        average = optimizer.state[weight]["exp_avg"]
        average.data = average.data[:2]
        with pytest.raises(RuntimeError):
            stepped([weight], optimizer)


def test_parameters_can_be_exchanged(device):
    """torch exchanges no tensors that are known by weak references."""
    weights = [nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    optimizer = torch.optim.Adam(weights, 0.1)
    with enabled(device):
        stepped(weights, optimizer)
        for weight in weights:
            torch.utils.swap_tensors(weight, nn.Parameter(torch.zeros(3, device=device)))
        stepped(weights, optimizer)
    assert all((weight < 0).all() for weight in weights)


@pytest.mark.long
def test_nothing_is_kept_of_optimizers_that_are_gone(device):
    weights = [nn.Parameter(torch.ones(3, device=device))]
    before = len(optimizers._groups)
    with enabled(device):
        optimizer = torch.optim.Adam(weights, 0.1)
        stepped(weights, optimizer)
        count = weakref.ref(optimizer.state[weights[0]]["step"])
        del optimizer
        gc.collect()
    assert count() is None and len(optimizers._groups) == before
