"""A clean session around each test, and the routes that are held against plain modules."""
from __future__ import annotations

from tests.routes import clean, emulated, gpu, kernels, one_thread, route  # noqa: F401
