"""Messages of several parts side by side, each of which is reduced for itself."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.utils import scatter

from gnnaccel.adapters.tracing import expressed
from tests.pyg import graphs
from tests.pyg.generated_calls import arguments, both, compare_second, repeats, to
from tests.pyg.generated_layers import Message
from tests.pyg.graphs import M, N
from tests.pyg.judge import close, compare


class RotatE(Message):
    """arXiv 1902.10197: complex numbers, their real parts beside their imaginary ones."""

    def message(self, x_i, x_j, edge_attr):
        (a, b), (c, d), (p, q) = x_i.chunk(2, -1), x_j.chunk(2, -1), edge_attr.chunk(2, -1)
        return torch.cat([c * p - d * q - a, c * q + d * p - b], -1)


class Three(Message):
    """Parts of other widths and of other ends of the edges."""

    def message(self, x_i, x_j, edge_attr):
        return torch.cat([(x_i * x_j)[:, :5].tanh(), x_j, edge_attr * x_i[:, :1]], dim=1)


class Heads(Message):
    """Beside each other in the dimension of the heads."""

    def message(self, x_i, x_j, edge_attr):
        x_i, x_j = x_i.view(-1, 3, 4), x_j.view(-1, 3, 4)
        return torch.cat([x_i * x_j, x_j + edge_attr.view(-1, 3, 4)], 1).flatten(1)


class Dimensions(Message):
    def __init__(self, **options):
        super().__init__(**options, node_dim=0)

    def message(self, x_i, x_j, edge_attr):
        x_i, x_j = x_i.view(-1, 3, 4), x_j.view(-1, 3, 4)
        return torch.cat([x_i * x_j, x_j - edge_attr.view(-1, 3, 4)], 1)


class Dropped(Message):
    def message(self, x_i, x_j, edge_attr):
        return torch.cat([F.dropout(x_i * x_j, 0.5, self.training), x_j + edge_attr], -1)


class Updated(Message):
    def message(self, x_i, x_j, edge_attr):
        return torch.cat([x_i * x_j, x_j + edge_attr], -1)

    def update(self, inputs, x):
        return inputs + torch.cat([x, -x], -1)


class Read(Message):
    """What is side by side is used before as well."""

    def message(self, x_i, x_j, edge_attr):
        both = torch.cat([x_i * x_j, x_j + edge_attr], -1)
        return both * both.sum(-1, keepdim=True)


class Aggregated(RotatE):
    """By an aggregate of one's own."""

    def aggregate(self, inputs, index, dim_size):
        return scatter(inputs, index, 0, dim_size, "mean") * 2


FORMS = [RotatE, Aggregated, Three, Heads, Dimensions, Updated, Read]
BY_PARTS = FORMS[:3] + FORMS[4:6]


@pytest.fixture
def written(monkeypatch):
    """How often kernels wrote rows for each edge."""
    calls = []
    at_edges = expressed.at_edges
    monkeypatch.setattr(expressed, "at_edges", lambda *args: calls.append(1) or at_edges(*args))
    return calls


def given(form):
    x, edge_index, _ = arguments(form)
    return x, edge_index, graphs.edge_features(edge_index.shape[1], x.shape[1])


@pytest.mark.parametrize("aggr", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients(kernels, written, form, aggr):
    compare(kernels, form(aggr=aggr), *given(form))
    assert not written or form not in BY_PARTS


@pytest.mark.parametrize("aggr", [["sum", "max"], "std", "softmax", "median"])
def test_other_aggregations(kernels, aggr):
    """Of all channels at once, by another way."""
    both(kernels, RotatE(aggr=aggr), *given(RotatE), on_fallback="native")


@pytest.mark.parametrize("form", BY_PARTS)
def test_second_derivatives(kernels, form):
    compare_second(kernels, form().to(kernels.device), *to(kernels.device, *given(form)))


def test_dropout(kernels):
    compare(kernels, Dropped(), *given(Dropped))
    compare(kernels, Dropped().eval(), *given(Dropped))


@pytest.mark.parametrize("form", BY_PARTS)
def test_repeated(kernels, form):
    repeats(kernels, form(), 12)


@pytest.mark.long
def test_what_changes_between_calls(kernels):
    """The aggregation, the edges, and the widths."""
    layer, (x, edge_index, edge) = RotatE(), given(RotatE)
    compare(kernels, layer, x, edge_index, edge)
    other = type(layer)(aggr="max")
    layer.aggr_module = other.aggr_module
    compare(kernels, layer, x, edge_index, edge)
    layer.aggr_module = type(layer)(aggr=["mean", "max"]).aggr_module
    both(kernels, layer, x, edge_index, edge, on_fallback="native")
    layer.aggr_module = other.aggr_module
    fewer = edge_index[:, ::2].contiguous()
    compare(kernels, layer, x, fewer, edge[::2].contiguous())
    compare(kernels, layer, x[:, :6].contiguous(), edge_index, edge[:, :6].contiguous())
    layer.aggr_module.register_forward_hook(lambda module, given, out: out * 2)
    both(kernels, layer, x, edge_index, edge, on_fallback="native")


def test_two_kinds_of_nodes_and_against_the_flow(kernels):
    layer = RotatE()
    left, right = graphs.features(), graphs.features(M)
    edge_index = graphs.bipartite()
    compare(kernels, layer, (left, right), edge_index,
            graphs.edge_features(edge_index.shape[1], left.shape[1]), (N, M),
            positions=("x", "edge_index", "edge_attr", "size"))
    layer.flow = "target_to_source"
    compare(kernels, layer, *given(RotatE))


class Network(nn.Module):
    """Within a model, whose maps of nodes run by torch."""

    def __init__(self):
        super().__init__()
        self.first, self.second = RotatE(), RotatE(aggr="mean")
        self.lin = nn.Linear(12, 12)

    def forward(self, x, edge_index, edge_attr):
        return self.second(self.lin(self.first(x, edge_index, edge_attr)), edge_index, edge_attr)


def test_a_model(kernels):
    compare(kernels, Network(), *given(RotatE), calls=2)


class Compared(Message):
    """No floats: sums of these are no floats either."""

    def message(self, x_i, x_j):
        return torch.cat([x_i > x_j, x_j > 0.5 * x_i], -1)


class Counted(Message):
    def message(self, x_i, x_j):
        return torch.cat([(x_i * x_j).long(), (x_j - x_i).long()], -1)


@pytest.mark.parametrize("form", [Compared, Counted])
def test_parts_that_are_no_floats(kernels, form):
    layer, (x, edge_index, _) = form().to(kernels.device), given(form)
    x, edge_index = x.to(kernels.device), edge_index.to(kernels.device)
    expected = layer(x, edge_index)
    with kernels.on(on_fallback="native"):
        for _ in range(3):
            out = layer(x, edge_index)
            assert out.dtype is expected.dtype and torch.equal(out, expected)


@pytest.mark.long
def test_another_aggregation_over_graphs_that_are_new_each_time(kernels):
    """What is kept of calls over other graphs is of the aggregation that the layer had then."""
    layer, (x, edge_index, edge) = RotatE().to(kernels.device), given(RotatE)
    x, edge_index, edge = (t.to(kernels.device) for t in (x, edge_index, edge))

    def calls(start: int) -> list[bool]:
        found = []
        for at in range(start, start + 12):
            given = x, edge_index[:, at:].contiguous(), edge[at:].contiguous()
            expected = layer(*given)
            with kernels.on(on_fallback="native"):
                found.append(close(layer(*given), expected))
        return found

    assert all(calls(0))
    for aggr in ("max", ["mean", "max"], "mean"):
        layer.aggr_module = type(layer)(aggr=aggr).aggr_module
        assert all(calls(20))
    layer.aggr_module.register_forward_hook(lambda module, given, out: out * 2)
    assert all(calls(40))
