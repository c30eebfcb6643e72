"""Defaults of a message's, an aggregate's or an update's arguments, which propagate is not given."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter

from tests.pyg import graphs
from tests.pyg.generated_calls import both, routes
from tests.pyg.judge import compare


class Conv(MessagePassing):
    def __init__(self):
        super().__init__(aggr="add")
        self.lin = nn.Linear(graphs.F, graphs.F)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)


class OfNumbers(Conv):
    def message(self, x_j, norm=2.5, squared=True, shape=(2, 6)):
        rows = self.lin(x_j).tanh() * norm
        return (rows * rows if squared else rows).view(-1, *shape).flatten(1)


class ByName(Conv):
    def message(self, x_j, *, weight=None, scale=3):
        return x_j.tanh() * scale if weight is None else x_j * weight


class OfAggregate(Conv):
    def message(self, x_j):
        return self.lin(x_j).relu()

    def aggregate(self, inputs, index, scale=0.5, ptr=None, dim_size=None):
        return scatter(inputs * scale, index, 0, dim_size, "sum")


class OfUpdate(Conv):
    def message(self, x_j):
        return self.lin(x_j).relu()

    def update(self, out, bias=None, scale=4.0):
        return out * scale if bias is None else out + bias


@pytest.mark.long
@pytest.mark.parametrize("cls", [OfNumbers, ByName, OfAggregate, OfUpdate])
def test_defaults(emulated, cls):
    layer, given = cls(), (graphs.features(), graphs.square())
    for _ in range(2):
        compare(emulated, layer, *given)
    both(emulated, layer, graphs.features(), graphs.square(edges=90))
    both(emulated, layer.eval(), *given)


class Changes(Conv):
    def message(self, x_j, norm=2.0):
        return self.lin(x_j).tanh() * norm


@pytest.mark.long
def test_a_default_that_changes_after_the_class_was_first_used(emulated, monkeypatch):
    """PyG wrote the first one down, and goes on with it."""
    layer, given = Changes(), (graphs.features(), graphs.square())
    both(emulated, layer, *given)
    monkeypatch.setattr(Changes.message, "__defaults__", (5.0,))
    for one in (layer, Changes()):
        both(emulated, one, *given, on_fallback="native")
        assert routes(one) == {"native": 1}
    monkeypatch.undo()
    both(emulated, layer, *given)


class HandsOn(Conv):
    """PyG's general propagate hands on no default, but an object that is true."""

    def propagate(self, edge_index, **kwargs):
        return super().propagate(edge_index, **kwargs)

    def message(self, x_j, negated=False):
        return -x_j.tanh() if negated else x_j.tanh()


def test_a_propagate_that_pyg_did_not_write(emulated):
    x, edges = graphs.features(), graphs.square()
    both(emulated, HandsOn(), x, edges, on_fallback="native")
    with emulated.on(on_fallback="native"):
        out = HandsOn()(x, edges)
    assert torch.allclose(out, -scatter(x.tanh()[edges[0]], edges[1], 0, len(x)), atol=1e-5)
