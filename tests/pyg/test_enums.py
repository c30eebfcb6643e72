"""Messages that compare what the layer has with members of an `Enum`."""
from __future__ import annotations

import enum
import types

import pytest
from torch import nn
from torch_geometric.nn import MessagePassing

from tests.pyg import graphs
from tests.pyg.generated_calls import both, routes, stays_native


class Kind(enum.Enum):
    LINEAR = "linear"
    GATED = 2
    OTHER = (1, 2)


class Number(enum.IntEnum):
    ONE = 1
    TWO = 2


class Odd(enum.Enum):
    """Which compares by code of the user's."""

    ONE = 1

    def __eq__(self, other):
        return True

    __hash__ = enum.Enum.__hash__


USUAL = Kind.GATED
options = types.ModuleType("options")
options.Kind = Kind


class Conv(MessagePassing):
    edge = 0

    def __init__(self):
        super().__init__(aggr="add")
        self.lin, self.kind, self.number = nn.Linear(graphs.F, graphs.F), Kind.LINEAR, Number.ONE

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)


class Compares(Conv):
    def message(self, x_i, x_j):
        rows = self.lin(x_j) * x_i
        if self.kind == Kind.LINEAR:
            return rows.tanh()
        if self.kind is USUAL and self.kind.value == 2:
            return rows.sigmoid()
        return -rows if self.kind in (options.Kind.OTHER,) else rows

    def aggregate(self, inputs, index, dim_size):
        return super().aggregate(inputs * 3 if self.number == Number.TWO else inputs, index,
                                 dim_size=dim_size)


@pytest.mark.long
def test_members(emulated, monkeypatch):
    layer, given = Compares(), (graphs.features(), graphs.square())
    for layer.kind in (*Kind, Kind.LINEAR):
        for layer.number in Number:
            for _ in range(2):
                both(emulated, layer, *given)
    layer.kind = None  # which has no value
    both(emulated, layer, *given)
    layer.kind = Kind.GATED
    both(emulated, layer, *given)
    monkeypatch.setitem(globals(), "USUAL", Kind.OTHER)
    both(emulated, layer, *given)
    monkeypatch.setitem(globals(), "Kind", enum.Enum("Kind", {"LINEAR": Kind.GATED}))
    both(emulated, layer, *given, on_fallback="native")


class ByCode(Conv):
    def message(self, x_j):
        return x_j.tanh() if self.kind == Odd.ONE else x_j


class ByText(Conv):
    def message(self, x_j):
        return x_j.tanh() if str(self.kind) == "Kind.LINEAR" else x_j


@pytest.mark.parametrize("cls", [ByCode, ByText])
def test_what_runs_code_is_not_followed(emulated, cls):
    layer = cls()
    stays_native(emulated, layer)
    layer.kind = Odd.ONE
    both(emulated, layer, graphs.features(), graphs.square(), on_fallback="native")
    assert routes(layer) == {"native": 1}
