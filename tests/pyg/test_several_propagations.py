"""Layers that propagate several times over the same edges, each time something of another form:
calls of each form are remembered."""
from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import MeanAggregation, MessagePassing

import gnnaccel
from gnnaccel.adapters.pyg.propagate import repeated_calls
from gnnaccel.dispatch.memory import layer_memory
from tests.call_counts import counted
from tests.judge import close
from tests.pyg import graphs

ONCE = 60  # Python calls of a repeated propagation by kernels, at most


class Several(MessagePassing):
    """Sums features and coordinates, each by itself, with weights where there are some."""

    def __init__(self):
        super().__init__(aggr="add")
        self.scale = None

    def forward(self, edge_index, *features, weight=None):
        return [self.propagate(edge_index, x=x, weight=weight) for x in features]

    def message(self, x_j, weight):
        x_j = x_j if self.scale is None else self.scale * x_j
        return x_j if weight is None else weight.view(-1, 1) * x_j


def features(*widths: int) -> list[torch.Tensor]:
    return [torch.randn(graphs.N, width) for width in widths]


def right(layer, *args, **kwargs) -> bool:
    with gnnaccel.disabled():
        expected = layer(*args, **kwargs)
    return all(close(a, b, 1e-4) for a, b in zip(layer(*args, **kwargs), expected))


@pytest.mark.parametrize("widths", [(3, 8), (3, 8, 16), (3, 8, 16, 5), (4, 4)], ids=str)
def test_each_is_remembered(emulated, widths):
    layer, edge_index, given = Several(), graphs.square(), features(*widths)
    with emulated.on():
        for _ in range(4):
            layer(edge_index, *given)
        assert counted(lambda: layer(edge_index, *given)).python <= len(widths) * ONCE
        assert right(layer, edge_index, *given)


@pytest.mark.long
def test_no_more_are_kept_than_a_few(emulated):
    layer, edge_index = Several(), graphs.square()
    with emulated.on():
        for width in range(3, 20):
            assert right(layer, edge_index, *features(width, 2))
    last, kept = next(iter(layer_memory.of(layer).over[3].values())), 0
    while last is not None:
        last, kept = last.older, kept + 1
    assert kept == repeated_calls._FORMS


def test_features_that_want_gradients_are_no_other_form_where_there_are_none(emulated):
    """The first hop is over a leaf, the next are over results, which want none."""
    layer, edge_index, (x,) = Several(), graphs.square(), features(8)
    x.requires_grad_()
    with emulated.on(), torch.no_grad():
        for _ in range(4):
            layer(edge_index, x, x + 1)
        assert counted(lambda: layer(edge_index, x, x + 1)).python <= 2 * ONCE


@pytest.mark.parametrize("change", ["weight", "edges", "scale", "mean", "hook", "gradients"])
def test_what_changes_is_seen_in_each(emulated, change):
    layer, edge_index, given = Several(), graphs.square(), features(3, 8)
    weight = torch.rand(edge_index.shape[1])
    with emulated.on(on_fallback="native"):
        for _ in range(4):
            assert right(layer, edge_index, *given)
            assert right(layer, edge_index, *given, weight=weight)
        if change == "weight":
            weight.mul_(2)
        elif change == "edges":
            edge_index.copy_(edge_index.roll(1, 1).flip(0))
        elif change == "scale":
            layer.scale = 3.0
        elif change == "mean":
            layer.aggr_module = MeanAggregation()
        elif change == "hook":
            layer.aggr_module.register_forward_hook(lambda module, args, out: 2 * out)
        for _ in range(2):
            assert right(layer, edge_index, *given)
            assert right(layer, edge_index, *given, weight=weight)
            if change == "gradients":
                leaves = [t.clone().requires_grad_() for t in (*given, weight)]
                found = [torch.autograd.grad(sum(out.square().sum() for out in layer(
                    edge_index, *leaves[:2], weight=leaves[2])), leaves) for _ in range(2)]
                with gnnaccel.disabled():
                    expected = torch.autograd.grad(sum(out.square().sum() for out in layer(
                        edge_index, *leaves[:2], weight=leaves[2])), leaves)
                assert all(close(a, b, 1e-4) for one in found for a, b in zip(one, expected))


class OfBoth(MessagePassing):
    """Features of both ends in a list."""

    def __init__(self):
        super().__init__(aggr="add")

    def forward(self, edge_index, x):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j


@pytest.mark.parametrize("change", ["source", "both the same", "a pair", "width", "gradients"])
def test_features_in_a_list_are_remembered(emulated, change):
    layer, edge_index, (a, b) = OfBoth(), graphs.square(), features(8, 8)
    with emulated.on():
        for _ in range(4):
            layer(edge_index, [a, b])
        assert counted(lambda: layer(edge_index, [a, b])).python <= ONCE
        if change == "gradients":
            a = a.clone().requires_grad_()
        elif change == "source":
            a += 1
        elif change == "width":
            a = torch.randn(graphs.N, 5)
        given = [a, a] if change == "both the same" else (a, b) if change == "a pair" else [a, b]
        with gnnaccel.disabled():
            expected = layer(edge_index, given)
        got = layer(edge_index, given)
        assert close(got, expected, 1e-5) and got.requires_grad == expected.requires_grad
        if change == "gradients":
            assert close(*(torch.autograd.grad(out.pow(2).sum(), a)[0] for out in (got, expected)),
                         1e-4)
