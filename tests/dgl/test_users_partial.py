"""Functions with some of their arguments, by ``functools.partial``, as message and reduce functions."""
from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.dgl.test_users_guards import agrees, filled, sums
from tests.dgl.users import WIDTH

def weighed(edges, by, row):
    return {"m": torch.tanh(edges.src["h"] * row) * by}


def weighed_first(by, edges, *, row):
    return weighed_by(edges.src["h"], by, row)


def weighed_by(h, by, row):
    return {"m": torch.sigmoid(h * row) - by}


def reduced(nodes, by):
    return {"y": nodes.mailbox["m"].mean(1) * by}


class Partly(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def message(self, edges, by, row=None):
        return {"m": F.relu(self.lin(edges.src["h"])) * by + row}


@pytest.mark.long
@pytest.mark.parametrize("function", [
    weighed, weighed_first, Partly().message], ids=["named", "placed", "method"])
def test_partial_functions(route, function):
    """Arguments that are numbers or tensors, others in each call."""
    graph, seen = filled(), []
    row = torch.randn(WIDTH, requires_grad=True)

    def call(by, row):
        message = (functools.partial(function, by, row=row) if function is weighed_first
                   else functools.partial(function, row=row, by=by))

        def both():
            out = sums(graph, message, functools.partial(reduced, by=by))()
            return torch.cat([out, torch.autograd.grad(out.sin().sum(), row)[0].view(1, -1)])

        seen.append(agrees(route, both))

    call(2.0, row)
    call(3.0, row)
    call(3.0, (row * 2).detach().requires_grad_())
    with torch.no_grad():
        row.mul_(-1.0)
    call(3.0, row)
    assert all(not torch.equal(a, b) for a, b in zip(seen, seen[1:]))


@pytest.mark.long
def test_partial_functions_of_other_arguments(emulated):
    graph = filled()

    def message(edges, by=1.0, plus=0.0):
        return {"m": torch.tanh(edges.src["h"]) * by + plus}

    agrees(emulated, sums(graph, functools.partial(message, by=2.0)), taken=False)  # by a default
    agrees(emulated, sums(graph, functools.partial(message, by=2.0, plus=1.0)))
    agrees(emulated, sums(graph, functools.partial(message, plus=2.0, by=1.0)))
    nested = functools.partial(functools.partial(message, plus=3.0), by=0.5)
    agrees(emulated, sums(graph, nested))
    with emulated.on(on_fallback="native"), pytest.raises(TypeError):
        sums(graph, functools.partial(message, other=1.0))()
