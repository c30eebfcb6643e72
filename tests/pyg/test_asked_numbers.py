"""Messages that ask questions about numbers: whether there are any that are none."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.pyg.asserting_layers import Asserted
from tests.pyg.generated_calls import arguments, both, routes
from tests.pyg.generated_layers import WIDTH, Message
from tests.pyg.judge import close, compare


class Raises(Message):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def message(self, x_i, x_j):
        out = torch.mm(x_j * x_i, self.weight)
        if torch.any(torch.isnan(out)) or torch.isinf(x_j).sum() > 0:
            raise ValueError("no number")
        return out


@pytest.mark.parametrize("cls", [Asserted, Raises])
def test_assertions_about_numbers(kernels, cls):
    compare(kernels, cls(), *arguments(cls)[:2])


@pytest.mark.long
@pytest.mark.parametrize("cls, error", [(Asserted, AssertionError), (Raises, ValueError)])
def test_assertions_that_fail(emulated, cls, error):
    x, ei, _ = arguments(cls)
    layer = cls()
    both(emulated, layer, x, ei)
    for value in (float("nan"), float("inf")):
        bad = x.clone()
        bad[ei[0, 5], 3] = value
        for one in (layer, cls()):
            with emulated.on(on_fallback="native"), pytest.raises(error):
                one(bad, ei)
    both(emulated, layer, x, ei)
    x[3] = float("nan")  # of a node without edges
    keep = (ei != 3).all(0)
    both(emulated, layer, x, ei[:, keep])


class AssertedAfterDropout(Message):
    """A call that goes native after all draws the host's numbers."""

    def message(self, x_j):
        out = nn.functional.dropout(x_j, 0.5, self.training)
        assert not torch.isnan(out).any()
        return torch.tanh(out)


def test_questions_about_drawn_numbers_are_not_followed(emulated):
    layer, (x, ei, _) = AssertedAfterDropout(), arguments(Message)
    torch.manual_seed(1)
    expected = layer(x, ei)
    torch.manual_seed(1)
    with emulated.on(on_fallback="native"):
        assert close(layer(x, ei), expected)


class Thresholds(Message):
    """Settings that are tensors, of the layer and of the call."""

    def __init__(self, **options):
        super().__init__(**options)
        self.register_buffer("slope", torch.tensor(0.3))
        self.scale = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x, edge_index, limit):
        return self.propagate(edge_index, x=x, limit=limit)

    def message(self, x_i, x_j, limit):
        out = x_j * self.scale if self.scale > 0 and limit <= 2 else x_j - x_i
        return nn.functional.leaky_relu(out, 0.2) if 0.1 < self.slope else torch.tanh(out)


@pytest.mark.parametrize("aggr", ["add", "max"])
def test_tensors_of_one_number(kernels, aggr):
    compare(kernels, Thresholds(aggr=aggr), *arguments(Message)[:2], torch.tensor(1.5),
            require=False)


@pytest.mark.long
def test_tensors_of_one_number_that_change(emulated):
    """In place, and back: another way through the message each time."""
    layer, (x, ei, _) = Thresholds(), arguments(Message)
    limit = torch.tensor(1.5)
    for change in (lambda: None, lambda: layer.slope.fill_(0.0), lambda: limit.fill_(3.0),
                   lambda: layer.scale.data.neg_(), lambda: limit.fill_(1.0),
                   lambda: layer.slope.fill_(0.3), lambda: layer.scale.data.neg_()):
        change()
        expected = layer(x, ei, limit)
        with emulated.on(on_fallback="native"):
            for _ in range(2):
                assert close(layer(x, ei, limit), expected)
    assert routes(layer)["cuda"] >= 2  # calls with other answers are native


class AsAValue(Thresholds):
    def __init__(self, use):
        super().__init__()
        self.use = use

    def message(self, x_i, x_j):
        return self.use(self, self.scale > 0, x_j)

    def kept(self, value, rows):
        self.last = value
        return torch.tanh(rows)


@pytest.mark.parametrize("use", [
    lambda layer, value, rows: rows * value, lambda layer, value, rows: torch.where(value, rows, 0),
    lambda layer, value, rows: torch.tanh(rows) if value == True else rows,  # noqa: E712
    lambda layer, value, rows: torch.tanh(rows) * len(f"{value}"), AsAValue.kept,
    lambda layer, value, rows: torch.tanh(rows) * value.float()])
def test_answers_that_are_used_stay_native(emulated, use):
    layer, (x, ei, _) = AsAValue(use), arguments(Message)
    both(emulated, layer, x, ei, torch.tensor(1.0), on_fallback="native")
    assert routes(layer) == {"native": 1}
