"""Quantized gradients whose rounding is known."""
from __future__ import annotations

import pytest
import torch


@pytest.fixture
def nearest():
    """Gradients rounded to nearest."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
