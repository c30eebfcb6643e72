"""Whether these tests run at all: without DGL, this one is all that is collected."""
from __future__ import annotations

import importlib.util

import pytest


def test_dgl_is_installed():
    if importlib.util.find_spec("dgl") is None:
        pytest.skip("dgl is not installed, so the tests of its layers are left out")
