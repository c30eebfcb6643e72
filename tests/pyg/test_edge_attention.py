"""Attention as users write it, whose scores, softmax and sum are one kernel."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn.resolver import aggregation_resolver
from torch_geometric.utils import softmax

import gnnaccel
from gnnaccel.dispatch.generated import operations
from tests.pyg import graphs
from tests.pyg.edge_layers import (CHANNELS, HEADS, Attended, ByHeads, ByMap, BySoftmaxMethod,
                                   Embedded, Ends, Keeps, OfEachChannel)
from tests.pyg.generated_calls import arguments, compare_second, hub, repeats, to
from tests.pyg.generated_layers import EDGE, WIDTH
from tests.pyg.graphs import E
from tests.pyg.judge import close, compare


class ByParts(Ends):
    """Scores that nodes have for each head, a mask, and a map of what was summed."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def message(self, q_i, k_j, v_j, edge_attr, index):
        shape = -1, HEADS, CHANNELS
        score = F.leaky_relu(q_i.view(shape).sum(-1) + k_j.view(shape).sum(-1), 0.1)
        score = score.masked_fill(edge_attr[:, :1] > 0.5, -1e9)
        alpha = softmax(score, index)
        return self.out((v_j.view(shape) * alpha.unsqueeze(-1)).view(-1, WIDTH) / 2)


class OtherWidth(Ends):
    """Keys of another width than the values'."""

    def message(self, q_i, k_j, v_j, edge_attr, index):
        alpha = softmax((q_i[:, :5] * k_j[:, :5]).tanh().sum(-1, keepdim=True) * 2, index)
        return -(v_j * alpha)


class Masked(Ends):
    """Edges that are masked out; in some rows all of them, which the host makes NaN."""

    def message(self, q_i, k_j, v_j, edge_attr, index):
        score = (q_i * k_j).sum(-1).masked_fill(edge_attr[:, 0] > 0, -float("inf"))
        return v_j * softmax(score, index).unsqueeze(-1)


class Normed(Ends):
    """A norm of the keys within the score, and one of the values."""

    def message(self, q_i, k_j, v_j, edge_attr, index):
        keys = F.layer_norm(q_i + k_j, (WIDTH,))
        values = F.layer_norm(v_j - q_i, (WIDTH,))
        return values * softmax((keys * self.att).sum(-1, keepdim=True), index)


ONE = [Attended, ByMap, ByHeads, BySoftmaxMethod, Embedded, ByParts, OtherWidth, Masked, Normed]


def kernel_of(kernels, layer, args) -> str:
    with kernels.on(records=5):
        layer(*args)
        return gnnaccel.records()[-1]["kernel"]


@pytest.mark.parametrize("form", ONE)
def test_one_kernel(kernels, form, monkeypatch):
    """No score is written for each edge, and torch takes no softmax."""
    layer, args = form().to(kernels.device), to(kernels.device, *arguments(form))
    written = []
    monkeypatch.setattr(operations.GeneratedAtEdges, "forward",
                        lambda *a, f=operations.GeneratedAtEdges.forward: written.append(1)
                        or f(*a))
    assert "softmax(" in kernel_of(kernels, layer, args)
    assert len(written) == (form is OtherWidth)


@pytest.mark.parametrize("form", [ByParts, OtherWidth, Normed])
def test_values_and_gradients(kernels, form):
    compare(kernels, form(), *arguments(form))


@pytest.mark.long
@pytest.mark.parametrize("form", [ByMap, ByParts, Normed])
def test_rows_that_are_split(kernels, form):
    ei = hub()
    compare(kernels, form(), graphs.features(), ei, graphs.edge_features(ei.shape[1], EDGE))


@pytest.mark.parametrize("form", [Attended, ByParts])
def test_second_derivatives(kernels, form):
    edge = graphs.edge_features(E, EDGE)
    compare_second(kernels, form().to(kernels.device),
                   *to(kernels.device, graphs.features(), graphs.square(), edge))


def test_results_repeat(kernels):
    repeats(kernels, ByParts(), EDGE)


def test_masked_edges(kernels):
    layer, args = Masked().to(kernels.device), to(kernels.device, *arguments(Masked))
    found = []
    for block in (gnnaccel.disabled(), kernels.on()):
        given = args[0].clone().requires_grad_()
        with block:
            out = layer(given, *args[1:])
            out.nan_to_num().sum().backward()
        found.append((out, given.grad))
    (expected, grad), (got, got_grad) = found
    assert expected.isnan().any() and expected.isfinite().any()
    assert torch.allclose(got, expected, 1e-4, 1e-5, equal_nan=True)
    assert torch.allclose(got_grad, grad, 1e-4, 1e-5, equal_nan=True)


@pytest.mark.long
@pytest.mark.parametrize("form, aggr", [(Attended, "mean"), (Attended, "max"), (Keeps, "add"),
                                        (OfEachChannel, "add")])
def test_others_have_their_weights_written(kernels, form, aggr):
    """What is asked for besides the sum, or is not one number for each head."""
    layer = form()
    layer.aggr_module = aggregation_resolver(aggr)
    args = arguments(form)
    compare(kernels, layer, *args)
    args = to(kernels.device, *args)
    assert "softmax(" not in kernel_of(kernels, layer.to(kernels.device), args)


def test_dropout_of_weights(kernels):
    """It has the host's mask, and is still one kernel."""
    layer, args = Attended(0.4).to(kernels.device), to(kernels.device, *arguments(Attended))
    found = []
    for block in (gnnaccel.disabled(), kernels.on()):
        given = args[0].clone().requires_grad_()
        with block:
            torch.manual_seed(5)
            out = layer(given, *args[1:])
            out.sin().sum().backward()
        found.append((out, given.grad))
    assert all(close(*pair) for pair in zip(*found))
    assert "softmax(" in kernel_of(kernels, layer, args)
