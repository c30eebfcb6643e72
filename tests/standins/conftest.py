"""Stand-ins in this process, for one test."""
from __future__ import annotations

import sys

import pytest

import gnnaccel
from gnnaccel.adapters.standins.modules import PACKAGES
from tests.undone import no_standins


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
        no_standins()
    assert sys.meta_path == before
