"""A clean session around each test, and the routes that are held against the host's own layers."""
from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("torch_geometric")

from tests.routes import clean, emulated, gpu, kernels, one_thread, route  # noqa: F401
