"""A clean session around each test."""
from __future__ import annotations

import pytest

pytest.importorskip("torch_geometric")

from tests.routes import clean, gpu, one_thread  # noqa: F401
