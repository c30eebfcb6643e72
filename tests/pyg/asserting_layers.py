"""Layers of users whose messages assert something, as Python runs an assertion.

PYTEST_DONT_REWRITE, which would make other code of it.
"""
from __future__ import annotations

import torch
from torch import nn

from tests.pyg.generated_layers import WIDTH, Message


class Asserted(Message):
    """Says that there is no NaN."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def message(self, x_i, x_j):
        out = torch.tanh(self.lin(x_j - x_i))
        assert not torch.isnan(out).any()
        assert torch.isfinite(x_j * x_i).all()
        return out
