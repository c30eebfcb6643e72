"""Stand-ins in this process, for one test."""
from __future__ import annotations

import sys

import pytest

import gnnaccel
from gnnaccel.adapters.standins import finder, seen_by_pyg
from gnnaccel.adapters.standins.modules import PACKAGES


@pytest.fixture
def stood_in():
    """All packages, which are not installed, are stood in for."""
    before = list(sys.meta_path)
    found = gnnaccel.standins()
    try:
        if found != tuple(PACKAGES):
            pytest.skip("a real package is installed")
        yield
    finally:
        finder.deactivate()
        seen_by_pyg.unwatch()
    assert sys.meta_path == before
