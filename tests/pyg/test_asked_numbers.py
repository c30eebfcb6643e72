"""Messages that ask questions about numbers: whether there are any that are none."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.pyg.asserting_layers import Asserted
from tests.pyg.generated_calls import arguments, both
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
