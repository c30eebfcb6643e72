"""Calls of layers whose message has no form that kernels could compute: after the first they go
native unread, until something may have changed."""
from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import MessagePassing, SAGEConv, SumAggregation
from torch_geometric.utils import degree

import gnnaccel
from gnnaccel.adapters.pyg.propagate import new_graphs_native, reading
from gnnaccel.dispatch.memory.native_cache import UNLOOKED
from tests.call_counts import counted
from tests.pyg import graphs

WIDTH = 12


class Summed(MessagePassing):
    """Sums of an edge with those before have no form, sums with channels before have one."""

    def __init__(self):
        super().__init__(aggr="add")
        self.dim = 0

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        h = torch.tanh(x_i * x_j)
        return h + h.cumsum(self.dim)


@pytest.fixture()
def reads(monkeypatch):
    """How many calls were read."""
    seen, read = [0], reading.read

    def counting(*args):
        seen[0] += 1
        return read(*args)

    monkeypatch.setattr(reading, "read", counting)
    return seen


def routes() -> dict[str, int]:
    return gnnaccel.stats()["Summed"]["routes"]


def given() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(graphs.N, WIDTH), graphs.square()


@pytest.mark.parametrize("fresh", [False, True], ids=["known", "new"])
def test_such_calls_are_not_read_again(emulated, reads, fresh):
    layer, args = Summed(), given()
    with emulated.on(on_fallback="native"):
        for _ in range(20):
            layer(*(given() if fresh else args))
        assert reads[0] == 1 and routes() == {"native": 20}
        assert counted(lambda: [layer(*args) for _ in range(8)]).python <= 52
        assert gnnaccel.stats()["Summed"]["reasons"] == {"GA211": 28}


def test_aggregations_without_kernels_are_not_read_again(emulated, reads):
    layer, args = SAGEConv(WIDTH, WIDTH, aggr="median"), given()
    with emulated.on(on_fallback="native"):
        for _ in range(20):
            layer(*args)
        assert reads[0] == 1 and gnnaccel.stats()["SAGEConv"]["reasons"] == {"GA201": 20}
        layer.aggr_module = SumAggregation()
        for _ in range((UNLOOKED + 1) * (new_graphs_native._READ_AT + 1)):
            out = layer(*args)
        assert gnnaccel.stats()["SAGEConv"]["routes"]["cuda"] > 1
    torch.testing.assert_close(out, layer(*args))


def test_a_form_that_appears_is_found(emulated):
    layer, args = Summed(), given()
    with emulated.on(on_fallback="native"):
        for _ in range(3):
            layer(*args)
        layer.dim = -1
        for _ in range((UNLOOKED + 1) * (new_graphs_native._READ_AT + 1)):
            out = layer(*args)
    assert routes()["cuda"] > 1
    torch.testing.assert_close(out, layer(*args))


def test_a_change_is_computed_at_once(emulated):
    layer, (x, edge_index) = Summed(), given()
    with emulated.on(on_fallback="native"):
        for dim in (0, 0, -1, 0):
            layer.dim = dim
            out = layer(x, edge_index)
            with gnnaccel.disabled():
                torch.testing.assert_close(out, layer(x, edge_index))


@pytest.mark.parametrize("other", [
    lambda x, edges: (x[:, :4], edges), lambda x, edges: (x.double(), edges),
    lambda x, edges: ((x, x), edges)], ids=["width", "dtype", "pair"])
def test_other_arguments_are_read(emulated, reads, other):
    layer, (x, edge_index) = Summed(), given()
    with emulated.on(on_fallback="native"):
        for _ in range(3):
            layer(x, edge_index)
        layer(*other(x, edge_index))
    assert reads[0] == 2


class Scaled(Summed):
    """With a number that is a tensor without axes."""

    def forward(self, x, edge_index, scale):
        return self.propagate(edge_index, x=x, scale=scale)

    def message(self, x_i, x_j, scale):
        return scale * super().message(x_i, x_j)


def test_numbers_without_axes(emulated):
    layer, args, scale = Scaled(), given(), torch.tensor(2.0)
    with emulated.on(on_fallback="native"):
        outs = [layer(*args, scale) for _ in range(3)]
    torch.testing.assert_close(outs[2], layer(*args, scale))
    assert gnnaccel.stats()["Scaled"]["routes"] == {"native": 3}


class Ends(Summed):
    """Numbers for the sources are read at the destinations, which has a form where these are the
    same nodes."""

    def forward(self, x, edge_index, y):
        return self.propagate(edge_index, x=x, y=y)

    def message(self, x_j, y_i, edge_index_j, edge_index_i, size_j):
        deg = degree(edge_index_j, size_j) + 1.0
        return torch.relu(x_j - y_i) / deg[edge_index_i].view(-1, 1)


def test_other_numbers_of_nodes_are_read(emulated):
    """Over edges that are new in each call."""
    layer, (x, edge_index) = Ends(), given()
    edge_index[1].clamp_(max=graphs.N - 5)
    with emulated.on(on_fallback="native"):
        for rows, went in ((4, "native"), (0, "cuda"), (4, "native"), (4, "native"), (0, "cuda")):
            gnnaccel.reset_stats()
            layer(x, edge_index.clone(), torch.randn(graphs.N - rows, WIDTH))
            assert gnnaccel.stats()["Ends"]["routes"] == {went: 1}


def test_the_user_is_told_of_each_where_asked(emulated):
    layer, args = Summed(), given()
    with emulated.on(on_fallback="raise"):
        for _ in range(3):
            with pytest.raises(gnnaccel.errors.GnnaccelError):
                layer(*args)
