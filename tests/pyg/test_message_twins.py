"""Messages in which rows of nodes and rows of the edges are terms of one sum: an edge has the same
gradient for both."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gnnaccel.cuda.messages import generated
from tests.pyg import graphs
from tests.pyg.generated_calls import arguments, compare_second, repeats, to
from tests.pyg.generated_layers import Message
from tests.pyg.judge import compare


class Rectified(Message):
    def message(self, x_i, x_j, edge_attr):
        return torch.relu(x_j + edge_attr) * x_i


class TransE(Message):
    def message(self, x_i, x_j, edge_attr):
        return torch.abs(x_j + edge_attr - x_i)


class Opposite(Message):
    """With the other sign, within two differences."""

    def message(self, x_i, x_j, edge_attr):
        return F.silu(x_i - (x_j - edge_attr)) + x_i


class Negative(Message):
    def message(self, x_j, edge_attr):
        return torch.tanh(edge_attr + (-x_j)) ** 2


class Twice(Message):
    """The rows of nodes are read beside the sum as well."""

    def message(self, x_j, edge_attr):
        return torch.relu(x_j + edge_attr) + x_j * 2


class Linear(Message):
    """Gradients need nothing of the edges' rows."""

    def message(self, x_i, x_j, edge_attr):
        return (x_j + edge_attr) * x_i


class Product(Message):
    def message(self, x_j, edge_attr):
        return torch.relu(x_j * edge_attr)


class Summed(Message):
    """Beside a sum over channels."""

    def message(self, x_i, x_j, edge_attr):
        both = torch.tanh(x_j + edge_attr)
        return both * (both * x_i).sum(-1, keepdim=True)


TWINS = [Rectified, TransE, Opposite, Negative, Summed]
FORMS = [*TWINS, Twice, Linear, Product]


@pytest.fixture
def copied(monkeypatch):
    """The sums of rows of the edges that backward made, whether with the other sign."""
    calls, forward = [], generated.forward

    def watched(graph, expression, *args):
        if expression in generated.COPIES:
            calls.append(expression is generated.COPIES[1])
        return forward(graph, expression, *args)

    monkeypatch.setattr(generated, "forward", watched)
    return calls


def given(form):
    x, edge_index, _ = arguments(form)
    return x, edge_index, graphs.edge_features(edge_index.shape[1], x.shape[1])


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients(kernels, copied, form, aggr):
    compare(kernels, form(aggr=aggr), *given(form))
    assert set(copied) == ({form in (Opposite, Negative)} if form in TWINS else set())


@pytest.mark.long
@pytest.mark.parametrize("form", TWINS)
def test_repeated_and_second_derivatives(kernels, form):
    compare_second(kernels, form().to(kernels.device), *to(kernels.device, *given(form)))
    repeats(kernels, form(), 12)


@pytest.mark.parametrize("frozen", ["x", "edge_attr"])
def test_one_of_both_wants_no_gradient(kernels, copied, frozen):
    x, edge_index, edge = given(TransE)

    class Frozen(TransE):
        def forward(self, x, edge_index, edge_attr=None, size=None):
            x, edge_attr = (x.detach(), edge_attr) if frozen == "x" else (x, edge_attr.detach())
            return super().forward(x, edge_index, edge_attr, size)

    compare(kernels, Frozen(), x, edge_index, edge, require=False)
    assert not copied
