"""Small graphs need no threads."""
from __future__ import annotations

import pytest
import torch

from tests.routes import one_thread  # noqa: F401


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
